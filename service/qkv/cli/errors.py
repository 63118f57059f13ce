"""Errors of the command line: one line each, and no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from qkv.errors import QkvError

__all__ = ["OneLineErrorGroup", "one_line_errors"]


class _Interrupted(click.ClickException):
    exit_code = 130  # 128 and SIGINT's number, as shells have it


class OneLineErrorGroup(click.Group):
    """A group whose errors of usage are one line, as all others are."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            return super().parse_args(ctx, args)  # which shows the help
        with _one_line_usage():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _one_line_usage():
                return super().invoke(ctx)
        except BrokenPipeError:  # who read it has read enough; click ends without a word
            raise
        except OSError as error:  # such as a full disk that stdout goes to
            raise click.ClickException(_one_line(error.strerror or str(error))) from None


@contextmanager
def _one_line_usage() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "qkv"
        raise click.UsageError(f"{_one_line(error.format_message())} See {path} --help.") from None


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What can be expected to go wrong is one line, not a traceback."""
    try:
        yield
    except QkvError as error:
        where = f" ({error.pointer})" if error.pointer else ""
        raise click.ClickException(_one_line(f"{error.detail}{where}")) from None
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        who, extra = ("a plot", "plot") if name == "matplotlib" else ("the service", "server")
        raise click.ClickException(
            f"{name} is missing: {who} needs `pip install 'qkv[{extra}]'`"
        ) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise click.ClickException(_one_line(f"{where}{error.strerror or error}")) from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate" not in str(error):  # torch's words
            raise
        raise click.ClickException("out of memory") from None
    except KeyboardInterrupt:
        raise _Interrupted("interrupted") from None


def _one_line(text: str) -> str:
    return " ".join(text.split())
