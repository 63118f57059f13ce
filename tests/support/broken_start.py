"""A service whose new device processes fail while a file exists: `python -m support.broken_start`.

The variable `BROKEN` names the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import qkv.api.app
from qkv.cli.main import main
from qkv.engine.device.cpu import CpuDevice


def new_device(*_: Any) -> CpuDevice:
    """Returns the CPU.

    Raises:
        RuntimeError: the file exists.
    """
    if Path(os.environ["BROKEN"]).exists():
        raise RuntimeError("the device is broken")
    return CpuDevice()


if __name__ == "__main__":
    qkv.api.app.new_device = new_device  # type: ignore[assignment, attr-defined]
    main(prog_name="qkv")
