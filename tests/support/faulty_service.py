"""A service whose devices fail on request: `python -m support.faulty_service`.

Variables, each of which may be absent: a new device fails while the file `BROKEN` exists; if
`DEVICE` is "pretended", it is a pretended accelerator, which stacks batches. The requests that make
a device fail are those of `failing_device`.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import qkv.api.app
from qkv.cli.main import main
from qkv.engine.engine import Engine
from support.failing_device import FailingDevice, broken, failing
from support.pretended_device import PretendedDevice


class FailingAccelerator(PretendedDevice):
    """A pretended accelerator that can run nothing more after a sticky failure."""

    def is_fatal(self, error: BaseException) -> bool:
        """Returns True after a sticky failure."""
        return bool(broken) and isinstance(error, RuntimeError)


def new_device(*_: Any) -> FailingDevice | FailingAccelerator:
    """Returns a device.

    Raises:
        RuntimeError: the file exists.
    """
    if Path(os.environ.get("BROKEN", "/nonexistent")).exists():
        raise RuntimeError("the device is broken")
    return FailingAccelerator() if os.environ.get("DEVICE") == "pretended" else FailingDevice()


if __name__ == "__main__":
    qkv.api.app.Engine = partial(Engine, launch=failing)  # type: ignore[assignment, attr-defined]
    qkv.api.app.new_device = new_device  # type: ignore[assignment, attr-defined]
    main(prog_name="qkv")
