"""The oracle: checks that an attention function is right, and names the bug if it is not.

`verify` returns a report, `assert_matches` raises. docs/accuracy.md derives the errors that are
allowed. It needs torch, which the extra `server` installs.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"qkv.testing needs qkv[server]: {error.name} is not installed; "
        "run `pip install '.[server]'` in a clone of qkv",
        name=error.name,
    ) from None

from qkv.testing.check import Check
from qkv.testing.families import FAMILIES
from qkv.testing.known_bugs import KNOWN_BUGS
from qkv.testing.report import Report
from qkv.testing.verification import assert_matches, verify

__all__ = ["FAMILIES", "KNOWN_BUGS", "Check", "Report", "assert_matches", "verify"]
