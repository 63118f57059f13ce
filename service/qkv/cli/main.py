"""The entry point of the command line: the group `qkv` and the command `qkv serve`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from qkv.cli.attend import attend, gradients
from qkv.cli.check_variant import check_variant
from qkv.cli.compare import compare
from qkv.cli.convert import convert
from qkv.cli.describe import describe
from qkv.cli.detect import detect
from qkv.cli.errors import OneLineErrorGroup, one_line_errors
from qkv.cli.layers import layers
from qkv.cli.oracle import oracle
from qkv.cli.output import echo
from qkv.cli.sweep import sweep
from qkv.cli.variants import variants
from qkv.cli.verify import verify
from qkv.version import __version__


@click.group(
    cls=OneLineErrorGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__)
def main() -> None:
    """Serves attention over HTTP, sends requests to a service, or runs attention here.

    \b
    qkv serve
    qkv attend softmax in.safetensors -o out.safetensors -p causal=true
    qkv COMMAND --help
    """


class _ServeCommand(click.Command):
    """`qkv serve`, whose help lists the settings that have no flag."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the name, the first sentence and the default of each setting without a flag."""
        try:
            from qkv.settings import Settings
        except ImportError:  # without the extra `server`
            return
        rows = [
            (f"QKV_{name.upper()}", _setting_help(field.description or "", field.default))
            for name, field in Settings.model_fields.items()
            if name not in {option.name for option in self.params}
        ]
        with formatter.section("Other settings, as variables of the environment"):
            formatter.write_dl(rows, col_max=28)


def _setting_help(description: str, default: object) -> str:
    first = description.partition(". ")[0].rstrip(".").replace("`", "")
    return f"{first}." if default is None else f"{first}.  [default: {default}]"


@main.command(cls=_ServeCommand, short_help="Serves over HTTP.")
@click.option(
    "--host",
    metavar="ADDRESS",
    help="Address to listen on.  [env var: QKV_HOST; default: 127.0.0.1]",
)
@click.option(
    "--port", type=int, help="Port; 0 takes a free one.  [env var: QKV_PORT; default: 8000]"
)
@click.option(
    "--workers",
    type=int,
    help="Worker processes; 0 starts one per CPU, or one per GPU.  [env var: QKV_WORKERS; "
    "default: 0]",
)
@click.option(
    "--devices",
    metavar="NAMES",
    help="Devices, such as cuda:0,cuda:1; each has a process of its own.  [env var: QKV_DEVICES]",
)
@click.option(
    "--variants",
    metavar="DIR",
    help="Folder of your own variants, a file NAME.py for each.  [env var: QKV_VARIANTS]",
)
@click.option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    metavar="NAME=PATH",
    help="A model's checkpoint, whose attention layers requests may name; may repeat.  "
    "[env var: QKV_CHECKPOINTS]",
)
@click.option(
    "--preload",
    is_flag=True,
    default=None,
    help="Give a GPU as many layers as fit before the first request.  [env var: QKV_PRELOAD]",
)
@click.option(
    "--strict-checkpoints",
    is_flag=True,
    default=None,
    help="A checkpoint that cannot be loaded stops the start.  [env var: QKV_STRICT_CHECKPOINTS]",
)
def serve(checkpoints: Sequence[str], **flags: Any) -> None:
    """Serves over HTTP until Ctrl-C or SIGTERM."""
    with one_line_errors():
        settings = _load_settings(flags | {"checkpoints": ",".join(checkpoints) or None})
        # Imports torch, which takes seconds; a wrong setting is reported before that. Imports leave
        # no garbage, for which collections would look an eighth of the time.
        gc.disable()
        from qkv.server.startup import serve as run_service

        gc.enable()
        sys.exit(run_service(settings))


for command in (
    variants,
    attend,
    gradients,
    compare,
    sweep,
    layers,
    describe,
    convert,
    detect,
    check_variant,
    oracle,
    verify,
):
    main.add_command(command)


def _load_settings(flags: dict[str, Any]) -> Any:
    import pydantic

    from qkv.settings import Settings, find_unknown_variables

    try:
        for unknown in find_unknown_variables(os.environ):
            echo(f"Warning: {unknown} is not a setting and has no effect", err=True)
        return Settings(**{n: v for n, v in flags.items() if v is not None})
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        # the message must not show keys
        value = "not a list of keys" if name == "api_keys" else repr(problem["input"])
        raise click.ClickException(
            f"setting {name} (QKV_{name.upper()}) is {value}: {problem['msg']}"
        ) from None
    except ValueError as error:
        raise click.ClickException(str(error)) from None
