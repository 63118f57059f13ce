"""The command line: serve, variants, attend, convert."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import httpx

from qkv import __version__, files
from qkv.client import Client, build_message, build_variants
from qkv.errors import QkvError
from qkv.message import Message
from qkv.wire import json

__all__ = ["main"]

_IN: Final = click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
_OUT: Final = click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help=f"Where the answer goes: {', '.join(files.SUFFIXES)}.",
)
_URL: Final = click.option(
    "--url",
    envvar="QKV_URL",
    default="http://127.0.0.1:8000",
    show_default=True,
    show_envvar=True,
    help="The service to ask.",
)
_LOCAL: Final = click.option(
    "--local", is_flag=True, help="Ask no service: run here, on the CPU (needs qkv[server])."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Serves attention over HTTP: output, attention weights and timing. And asks for it."""


@main.command()
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1, or QKV_HOST]")
@click.option("--port", type=int, help="Port; 0 takes a free one.  [default: 8000, or QKV_PORT]")
@click.option(
    "--workers", type=int, help="Worker processes.  [default: one per CPU, or QKV_WORKERS]"
)
def serve(**flags: Any) -> None:
    """Serve until stopped with Ctrl-C or SIGTERM.

    Every other setting comes from the environment; README.md lists them.
    """
    with _one_line_errors():
        import pydantic

        from qkv.serve import serve as run
        from qkv.settings import Settings

        try:
            given = {name: value for name, value in flags.items() if value is not None}
            settings = Settings(**given)
        except pydantic.ValidationError as error:
            fault = error.errors(include_url=False)[0]
            name = str(fault["loc"][0])
            raise click.ClickException(
                f"setting {name} (QKV_{name.upper()}) is {fault['input']!r}: {fault['msg']}"
            ) from None
        sys.exit(run(settings))


@main.command()
@click.argument("name", required=False)
@_URL
@_LOCAL
def variants(name: str | None, url: str, local: bool) -> None:
    """List the variants, or describe the one called NAME."""
    with _one_line_errors():
        if local:
            from qkv.local import variants as ask

            catalogue = ask()
        else:
            with Client(url) as client:
                catalogue = client.send(build_variants())
    if name is None:
        width = max(len(v["variant"]) for v in catalogue)
        for v in catalogue:
            click.echo(f"{v['variant']:{width}}  {v['summary']}")
        return
    found = [v for v in catalogue if v["variant"] == name]
    if not found:
        raise click.ClickException(
            f"no variant {name!r}; there are {', '.join(v['variant'] for v in catalogue)}"
        )
    _describe(found[0])


@main.command()
@click.argument("variant")
@_IN
@_OUT
@click.option(
    "-p",
    "--parameter",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter, its value as JSON: -p causal=true -p 'window=[128,0]'.  Repeatable.",
)
@click.option("--return", "outputs", multiple=True, help="An output to return.  Repeatable.")
@click.option("--weights", type=click.Choice(["full", "none"]), help="The form of the weights.")
@click.option("--layout", help="The layout of the file's layer.* tensors, a layer to run in.")
@click.option("--heads", type=int, help="The layer's heads.")
@_URL
@_LOCAL
def attend(
    variant: str,
    source: Path,
    target: Path,
    parameters: tuple[str, ...],
    outputs: tuple[str, ...],
    weights: str | None,
    layout: str | None,
    heads: int | None,
    url: str,
    local: bool,
) -> None:
    """Run VARIANT on the tensors in SOURCE: query, key, value, mask, key_lengths, or x and layer.*.

    SOURCE is .safetensors, .npz or .json; flags go before what it says itself.
    """
    with _one_line_errors():
        files.check_suffix(target)
        message = files.read(source, "inputs")
        asked = {"outputs": list(outputs) or None, "weights": weights}
        message.fields.update({name: value for name, value in asked.items() if value is not None})
        message.fields.setdefault("parameters", {}).update(map(_parameter, parameters))
        if layout is not None:
            message.fields["layer"] = {"layout": layout, "heads": heads}
        if local:
            from qkv.local import attend as run

            answer = run(variant, message)
        else:
            path = f"/v1/attention/{variant}"
            answer = _ask(url, path, message, "inputs", "outputs")
        files.write(target, answer, "outputs")
    _report(answer, target)
    timing = answer.fields["timing"]
    click.echo(f"{timing['compute_ms']:.3f} ms on {timing['device']} ({timing['backend']})")


@main.command()
@_IN
@_OUT
@click.option("--from", "layout", required=True, help="The layout SOURCE is in, for instance v2.")
@click.option("--to", "wanted", required=True, help="The layout to write, for instance v1.")
@click.option("--heads", type=int, help="Query heads, where a layout needs them.")
@click.option("--bias", type=click.Choice(["refuse", "augment"]), help="What to do with a bias.")
@_URL
@_LOCAL
def convert(
    source: Path,
    target: Path,
    layout: str,
    wanted: str,
    heads: int | None,
    bias: str | None,
    url: str,
    local: bool,
) -> None:
    """Take the layer's weights in SOURCE from one layout to another, and check them."""
    with _one_line_errors():
        files.check_suffix(target)
        message = files.read(source, "tensors")
        asked = {"from": layout, "to": wanted, "heads": heads, "bias": bias}
        message.fields.update({name: value for name, value in asked.items() if value is not None})
        if local:
            from qkv.local import convert_message

            answer = convert_message(message)
        else:
            answer = _ask(url, "/v1/convert", message, "tensors", "tensors")
        files.write(target, answer, "tensors")
    _report(answer, target)
    check = answer.fields["check"]
    click.echo(
        f"both layers on the same input differ by {check['largest_absolute_difference']:.3g} "
        f"at most, where the largest output is {check['largest_absolute_output']:.3g}"
    )


def _ask(url: str, path: str, message: Message, group: str, answered: str) -> Message:
    with Client(url) as client:
        return client.send(build_message(path, message, group, answered))


def _parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.ClickException(f"parameter {text!r} must be NAME=VALUE")
    try:
        return name, json.load(value)
    except QkvError:
        return name, value  # a bare word, such as query_offset=end


def _report(answer: Message, target: Path) -> None:
    for name, tensor in answer.tensors.items():
        click.echo(f"{name:16} {tensor.dtype:9} {'x'.join(map(str, tensor.shape))}")
    click.echo(f"written to {target}")


def _describe(variant: dict[str, Any]) -> None:
    click.echo(f"{variant['variant']}: {variant['summary']}\n")
    for label in ("formula", "paper", "cost"):
        click.echo(f"  {label:9}{variant[label]}")
    click.echo("\ninputs")
    for name, spec in variant["inputs"].items():
        optional = " (optional)" if spec["optional"] else ""
        click.echo(f"  {name:14}({', '.join(spec['shape'])}){optional}")
    click.echo("\nparameters")
    for name, schema in variant["parameters"]["properties"].items():
        click.echo(
            f"  {name:14}{json.dump(schema.get('default')).decode():7}"
            f"{schema.get('description', '')}"
        )
    click.echo(f"\noutputs\n  {', '.join(variant['outputs'])}")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What can be expected to go wrong is one line, not a traceback."""
    try:
        yield
    except QkvError as error:
        where = f" ({error.pointer})" if error.pointer else ""
        raise click.ClickException(f"{error.detail}{where}") from None
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise click.ClickException(f"the service cannot be reached: {error}") from None
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is missing: the service is installed by `pip install 'qkv[server]'`"
        ) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or ''}: {error.strerror}") from None
