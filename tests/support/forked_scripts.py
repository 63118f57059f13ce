"""Scripts and programs of the documentation, run as forks of a process that has the package.

A new process of `qkv` or of a program takes 3 seconds of a processor to import torch.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from support.processes import Process, killed_at_the_end


def run_script(script: str, folder: Path, **environment: str) -> str:
    """Returns what the lines of a shell script print; each must succeed and write no error.

    Bash runs the lines, except commands of `qkv` without pipes and redirections.
    """
    with tempfile.TemporaryFile("w+") as output:
        for line in script.replace("\\\n", "").splitlines():
            name, *words = shlex.split(line)
            if name == "qkv":
                assert not set("|<>;&$`").intersection(line), line
                _run("qkv", words, folder, environment, output)
            else:
                variables = os.environ | environment
                subprocess.run(
                    ["bash", "-ec", line], cwd=folder, env=variables, stdout=output, check=True
                )
        output.seek(0)
        return output.read()


def run_program(text: str, folder: Path, **environment: str) -> str:
    """Returns what a Python program prints; it must succeed."""
    with tempfile.TemporaryFile("w+") as output:
        _run("support.forked_program", [text], folder, environment, output, may_warn=True)
        output.seek(0)
        return output.read()


def _run(
    module: str,
    words: list[str],
    folder: Path,
    environment: dict[str, str],
    output: IO[str],
    may_warn: bool = False,
) -> None:
    with contextlib.chdir(folder):  # forks begin in the folder of this process
        process = Process(tuple(words), environment, stdout=output, module=module)
    with killed_at_the_end(process):
        assert process.wait() == 0, process.lines
    assert may_warn or not process.lines, process.lines
