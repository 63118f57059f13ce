"""Paths of the repository and of the installed package."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import qkv

ROOT: Final = Path(__file__).parent.parent.parent
PACKAGE: Final = Path(qkv.__file__).parent
