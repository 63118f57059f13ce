"""Sends the request of a command to the service, and prints the names of the written tensors."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click
import httpx

from qkv.cli.output import echo
from qkv.cli.tensor_files import STANDARD
from qkv.client.client import Client
from qkv.client.request_builders import RequestSpec
from qkv.client.retries import ServiceUnreachable
from qkv.wire.message import Message

_T = TypeVar("_T")


def send(url: str, api_key: str | None, spec: RequestSpec[_T]) -> _T:
    """Sends a request and returns the parsed response."""
    with open_client(url, api_key) as client:
        return client._send(spec)


@contextmanager
def open_client(url: str, api_key: str | None) -> Iterator[Client]:
    """Opens a client whose connection errors are one-line errors."""
    try:
        client = Client(url, api_key=api_key)
    # httpx raises the last two for a proxy in the environment that is not valid
    except (httpx.InvalidURL, ValueError, ImportError) as error:
        raise _nothing_sent(url, error) from None
    try:
        with client:
            yield client
    except ServiceUnreachable as error:
        raise click.ClickException(
            f"no response from {url!r}: {error.reason}. Start a service with `qkv serve`, "
            "or set its address with --url"
        ) from None
    except (
        httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError, UnicodeError
    ) as error:  # fmt: skip
        raise _nothing_sent(url, error) from None
    except httpx.RequestError as error:
        reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
        raise click.ClickException(f"no response from {url!r}: {reason}") from None


def _nothing_sent(url: str, error: Exception) -> click.ClickException:
    """Returns the error of a request that cannot be sent: of a wrong address, proxy or key."""
    return click.ClickException(f"nothing was sent to {url!r}: {error or type(error).__name__}")


def report(response: Message, target: Path, lines: Iterable[str] = ()) -> None:
    """Prints name, dtype and shape of each tensor, the file, and further lines: on stderr if
    stdout has the tensors."""
    tensors = response.tensors
    has_bfloat16 = any(tensor.dtype == "bfloat16" for tensor in tensors.values())
    note = " (bfloat16 as float32)" if has_bfloat16 and target.suffix == ".npz" else ""
    place = "standard output" if target == STANDARD else target
    for line in (
        *(f"{n:16} {x.dtype:9} {'x'.join(map(str, x.shape))}" for n, x in tensors.items()),
        f"written to {place}{note}",
        *lines,
    ):
        echo(line, err=target == STANDARD)


def line_width() -> int | None:
    """Returns the columns of the terminal; None if stdout is not one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
