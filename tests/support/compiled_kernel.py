"""Compiles `attention_kernel.cpp`, a kernel in another language, once for each session."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., str]
"""Returns the command line of the kernel: `kernel()`, or `kernel("scale-missing")` with a bug."""


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Compiles the kernel, into a folder with a space in its name.

    Skips the tests if there is no compiler.
    """
    compiler = shutil.which("c++")
    if not compiler:
        pytest.skip("needs a C++ compiler")
    source = Path(__file__).with_name("attention_kernel.cpp")
    program = tmp_path_factory.mktemp("a kernel") / "attention"
    flags = ("-std=c++17", "-Wall", "-Wextra", "-Werror")
    subprocess.run([compiler, *flags, source, "-o", program], check=True)
    return lambda *bug: f"{shlex.quote(str(program))} {{in}} {{out}} {' '.join(bug)}"
