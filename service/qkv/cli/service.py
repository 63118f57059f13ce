"""A call to the service that a command was told to ask, and what is said of its answer."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click
import httpx

from qkv.client.client import Client
from qkv.client.request_builders import Call
from qkv.wire.message import Message

__all__ = ["asking", "report", "room", "send"]

_T = TypeVar("_T")


def send(url: str, api_key: str | None, call: Call[_T]) -> _T:
    """The service's answer."""
    with asking(url, api_key) as client:
        return client.send(call)


@contextmanager
def asking(url: str, api_key: str | None) -> Iterator[Client]:
    """A client, for calls whose failures are one line each."""
    try:
        with Client(url, api_key=api_key) as client:
            yield client
    # the last two: what httpx makes of a URL, or of a proxy in the environment, that is none
    except (httpx.RequestError, httpx.InvalidURL, ValueError, ImportError) as error:
        reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
        raise click.ClickException(f"no answer from {url!r}: {reason}") from None


def report(answer: Message, target: Path) -> None:
    for name, tensor in answer.tensors.items():
        click.echo(f"{name:16} {tensor.dtype:9} {'x'.join(map(str, tensor.shape))}")
    narrow = any(tensor.dtype == "bfloat16" for tensor in answer.tensors.values())
    note = " (bfloat16 as float32)" if narrow and target.suffix == ".npz" else ""
    click.echo(f"written to {target}{note}")


def room() -> int | None:
    """Letters that a line has room for; None where it goes to no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
