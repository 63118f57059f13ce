"""Turns the errors of all commands into one line on stderr, without a traceback.

Commands use `one_line_errors`; the group `qkv` is a `OneLineErrorGroup`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from qkv.cli.output import escape_controls
from qkv.cli.typed_words import place
from qkv.errors import QkvError


class _Interrupted(click.ClickException):
    exit_code = 130  # 128 and the number of SIGINT, as in shells


class OneLineErrorGroup(click.Group):
    """A group whose usage errors are one line, like all other errors."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            return super().parse_args(ctx, args)  # prints the help
        with _one_line_usage():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _one_line_usage():
                return super().invoke(ctx)
        except BrokenPipeError:  # the reader of stdout has closed it; click exits silently
            raise
        except click.ClickException as error:
            # it may quote a file; another error would lose the exit status
            error.message = escape_controls(error.message)  # type: ignore[misc]
            raise
        except OSError as error:  # such as a full disk behind stdout
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
    """Turns expected errors into one line each, with the words of the command line for the part of
    the request that is wrong."""
    try:
        yield
    except QkvError as error:
        words = place(error.pointer, click.get_current_context(silent=True))
        line = f"{error.detail} ({words})" if words and words not in error.detail else error.detail
        raise click.ClickException(_one_line(line)) from None
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        user, extra = ("a plot", "plot") if name == "matplotlib" else ("the service", "server")
        raise click.ClickException(
            f"{name} is missing: {user} needs it. Run `pip install '.[{extra}]'` in a clone of qkv"
        ) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise click.ClickException(_one_line(f"{where}{error.strerror or error}")) from None
    except (MemoryError, RuntimeError) as error:
        of_torch = ("can't allocate", "Storage size calculation overflowed")
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in of_torch):
            raise
        raise click.ClickException("out of memory") from None
    except KeyboardInterrupt:
        raise _Interrupted("interrupted") from None


def _one_line(text: str) -> str:
    return " ".join(text.split())
