"""Copies of the installed package with other variant files, and services that run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

import qkv


class CopiedService(NamedTuple):
    """A running service of a copied package.

    Attributes:
        http: a client of it.
        messages: the lines that it wrote to standard error before it listened.
    """

    http: httpx.Client
    messages: str


def copy_package(target: Path, variants: Mapping[str, str]) -> Path:
    """Copies the installed package to `target`/qkv, adds variant files, and returns the copy."""
    package = Path(qkv.__file__).parent
    # compiled files keep their dates, so that the copy uses them; unfinished ones may vanish
    copy = shutil.copytree(package, target / "qkv", ignore=shutil.ignore_patterns("*.pyc.*"))
    for name, text in variants.items():
        (copy / "attention" / "variants" / name).write_text(text)
    return copy


def environment(copy: Path) -> dict[str, str]:
    """Returns the environment of a command that is to use the copy."""
    settings = {k: v for k, v in os.environ.items() if not k.upper().startswith("QKV_")}
    return settings | {"PYTHONPATH": str(copy.parent), "QKV_DEVICE": "cpu", "QKV_THREADS": "2"}


@contextmanager
def serving(copy: Path) -> Iterator[CopiedService]:
    """Runs `qkv serve` of the copy; it must end with status 0."""
    command = [sys.executable, "-m", "qkv", "serve", "--port", "0"]
    with subprocess.Popen(
        command, cwd=copy.parent, env=environment(copy), stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        messages = ""
        try:
            for line in server.stderr:  # the line is written once the service listens
                if line.startswith("qkv serves on http"):
                    break
                messages += line
            else:
                raise AssertionError(messages)
            with httpx.Client(base_url=line.split()[3], timeout=60) as client:
                yield CopiedService(client, messages)
        finally:
            server.terminate()
            server.communicate(timeout=60)
        assert server.returncode == 0
