"""The command line: `qkv serve`."""

from __future__ import annotations

from typing import Any

import click

from qkv import __version__

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Serves attention over HTTP: output, attention weights and timing."""


@main.command()
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1, or QKV_HOST]")
@click.option("--port", type=int, help="Port; 0 takes a free one.  [default: 8000, or QKV_PORT]")
def serve(**flags: Any) -> None:
    """Serves until it is stopped with Ctrl-C or SIGTERM.

    Every other setting comes from the environment; README.md lists them.
    """
    try:
        import pydantic

        from qkv.serve import serve as run
        from qkv.settings import Settings
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is missing: the service is installed by `pip install 'qkv[server]'`"
        ) from None
    try:
        settings = Settings(**{name: value for name, value in flags.items() if value is not None})
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = str(fault["loc"][0])
        raise click.ClickException(
            f"setting {name} (QKV_{name.upper()}) is {fault['input']!r}: {fault['msg']}"
        ) from None
    try:
        run(settings)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
