"""The variants of a folder outside the package, which QKV_VARIANTS names.

The service checks them at its start; commands that run here only load them.
"""

from __future__ import annotations

from pathlib import Path

from qkv.attention import catalogue, contract_results, variant_file
from qkv.attention.variant import Variant
from qkv.attention.variant_file import BrokenVariant
from qkv.errors import InvalidContent


def add_folder(folder: Path) -> list[Variant]:
    """Adds the variant of each file in a folder to the catalogue, and returns them.

    Raises:
        InvalidContent: there is no such file, or one cannot be used.
    """
    if not (files := variant_file.files(folder)):
        raise InvalidContent(f"QKV_VARIANTS has no variant: got {folder}, expected files NAME.py")
    try:
        return [catalogue.add(path) for path in files]
    except BrokenVariant as error:
        raise InvalidContent(f"{error.path} is no variant: {error.problem}") from None


def failure(variant: Variant) -> str:
    """Runs the checks of `qkv check-variant`; returns a line about those that fail, or "".

    The line has the number of failures, and the first one.
    """
    failed = [each for each in contract_results.check(variant) if each.status == "FAIL"]
    if not failed:
        return ""
    return (
        f"{variant.module.__file__} fails {len(failed)} of the checks of `qkv check-variant`: "
        f"{failed[0].name}: {failed[0].reason}"
    )
