"""Turns the errors of all commands into one line on stderr, without a traceback.

A line has the words of the command line in place of a JSON pointer. Commands use
`one_line_errors`; the group `qkv` is a `OneLineErrorGroup`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from qkv.cli.output import escape_controls
from qkv.errors import QkvError, pointer_to
from qkv.wire.checkpoint.checkpoint import is_checkpoint

# a field that is missing beside one of these is named by its flag: they need each other
_OF_LAYER: Final = (
    "layout", "target_layout", "name", "prefix", "heads", "kv_heads", "rope", "alibi", "to_order",
    "grouped", "bias",
)  # fmt: skip
_FIELDS: Final = {"--return": "/outputs", "--layer": "/layer/name"}  # the others by their flags


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
        words = _place(error.pointer, click.get_current_context(silent=True))
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


def _place(pointer: str | None, context: click.Context | None) -> str:
    """Returns the words of a command line that set a part of its request.

    Args:
        pointer: JSON pointer to the part; None: no part.
        context: of the command; None: no command has begun.

    Returns:
        Such as "--weights" for "/weights", or "key in in.npz" for "/inputs/key"; the pointer for
        a field of a file; "" without a pointer.
    """
    if not pointer or context is None:
        return pointer or ""
    typed, parts = _typed_words(context), pointer.split("/")
    for count in range(len(parts), 1, -1):
        words = typed.get("/".join(parts[:count]))
        if words is not None:
            rest = "/".join(parts[count:]).replace("~1", "/").replace("~0", "~")
            return words.replace("{}", rest).strip()
    return pointer


def _typed_words(context: click.Context) -> dict[str, str]:
    """Returns the words by pointer; "{}" in them stands for the rest of a longer pointer."""
    params = context.params
    variants = params.get("variants") or ()
    typed = {f"/variants/{i}": f"{word:.60}" for i, word in enumerate(variants)}
    within = ["", "/anchor", *typed]
    for word in params.get("parameters") or ():
        name = pointer_to(word.partition("=")[0])
        typed |= {f"{part}/parameters{name}": f"-p {word:.60}" for part in within}
    typed |= _tensor_names(params)
    options = {o.name: o.opts[0] for o in context.command.params if isinstance(o, click.Option)}
    return typed | _flags(options, params)


def _tensor_names(params: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of tensors in the files. A JSON file has the pointers themselves."""
    names = {}
    source, check = params.get("source"), params.get("check_file")
    if isinstance(source, Path) and (source.suffix != ".json" or is_checkpoint(source)):
        groups = {"/inputs": "{}", "/tensors": "{}", "/layer/tensors": "layer.{}"}
        names = {pointer: f"{name} in {source.name}" for pointer, name in groups.items()}
    return names if check is None else names | {"/check": f"{{}} in {check.name}"}


def _flags(options: Mapping[str, str], params: Mapping[str, Any]) -> dict[str, str]:
    """Returns the flags that are set, and all of a layer if one of them is."""
    given = {name for name in options if _is_set(params.get(name))}
    if given.intersection(_OF_LAYER):
        given |= options.keys() & set(_OF_LAYER)
    below = "/layer" if "name" in options else ""
    return {
        _field(flag, below if name in _OF_LAYER else ""): flag
        for name, flag in options.items()
        if name in given
    }


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != ()


def _field(flag: str, below: str) -> str:
    """Returns the pointer of the field that a flag sets."""
    return _FIELDS.get(flag, f"{below}/{flag.lstrip('-').replace('-', '_')}")
