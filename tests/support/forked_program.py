"""Runs its first argument as a Python program: `python -c` as a fork of `forked_commands`.

What the program finds imported is what a service imports before it looks at its settings.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    exec(compile(sys.argv.pop(1), "program", "exec"), {"__name__": "__main__"})
