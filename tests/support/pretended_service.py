"""The service on a pretended accelerator, by `python -m support.pretended_service`."""

from __future__ import annotations

import qkv.api.app
from qkv.cli.main import main
from support.pretended_device import PretendedDevice

if __name__ == "__main__":
    qkv.api.app.new_device = lambda *_: PretendedDevice()  # type: ignore[attr-defined]
    main(prog_name="qkv")
