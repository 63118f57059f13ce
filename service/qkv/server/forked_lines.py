"""Runs a function in a forked process, for what the supervisor must not do itself.

If the supervisor initialised a driver or started threads, its other forks could not use them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

__all__ = ["forked_lines"]


def forked_lines(lines: Callable[[], Iterable[str]]) -> list[str]:
    """Returns the lines that a function yields in a forked process, until that ends or fails."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        with contextlib.suppress(BaseException):
            for line in lines():
                os.write(writer, f"{' '.join(line.split())}\n".encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text.splitlines()
