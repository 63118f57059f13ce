"""The commands that ask a service, or run right here: variants, attend, gradients, convert."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import httpx

from qkv import files
from qkv.calls import Call, build_message, build_variants, gradients_path, run_path
from qkv.client import Client
from qkv.errors import InvalidContent, QkvError, shown
from qkv.message import Message
from qkv.oneline import one_line_errors
from qkv.wire import json

__all__ = ["attend", "convert", "gradients", "variants"]

_T = TypeVar("_T")

_IN: Final = click.argument("source", type=click.Path(path_type=Path))
_OUT: Final = click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(path_type=Path),
    metavar="FILE",
    required=True,
    help="Where the answer goes; its suffix says in which format.",
)
_URL: Final = click.option(
    "--url",
    envvar="QKV_URL",
    default="http://127.0.0.1:8000",
    show_default=True,
    show_envvar=True,
    metavar="URL",
    help="The service to ask.",
)
_KEY: Final = click.option(
    "--api-key",
    envvar="QKV_API_KEY",
    show_envvar=True,
    metavar="KEY",
    help="One of the service's keys.  Other users see it in a list of processes: better set it.",
)
_LOCAL: Final = click.option(
    "--local", is_flag=True, help="Ask no service: run here, on the CPU.  Needs qkv[server]."
)
_PARAMETERS: Final = click.option(
    "-p",
    "--parameter",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter; its value is JSON, or a bare word.  Repeatable.",
)
_LAYOUT: Final = click.option(
    "--layout", metavar="NAME", help="The layout of the file's layer: v1 or v2."
)
_HEADS: Final = click.option("--heads", type=int, help="The heads of the file's layer.")


@click.command(short_help="List the variants, or describe one.")
@click.argument("name", required=False)
@_URL
@_KEY
@_LOCAL
def variants(name: str | None, url: str, api_key: str | None, local: bool) -> None:
    """List the variants, or describe the one called NAME."""
    with one_line_errors():
        if local:
            from qkv.local import variants as ask

            catalogue = ask()
        else:
            catalogue = _send(url, api_key, build_variants())
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


@click.command(short_help="Run a variant on the tensors in a file.")
@click.argument("variant")
@_IN
@_OUT
@_PARAMETERS
@click.option(
    "--return",
    "outputs",
    multiple=True,
    metavar="NAME",
    help="An output to return, instead of output and weights.  Repeatable.",
)
@click.option(
    "--weights",
    metavar="FORM",
    help="In what form the weights are returned: full, none, stats, rows=0,5, top_k=8 or pool=64.",
)
@_LAYOUT
@_HEADS
@_URL
@_KEY
@_LOCAL
def attend(
    variant: str,
    source: Path,
    target: Path,
    outputs: tuple[str, ...],
    weights: str | None,
    **how: Any,
) -> None:
    """Run VARIANT on the tensors in the file SOURCE.

    They are query, key and value, and maybe mask and key_lengths. With a layer's weights beside
    them (layer.W_query.weight and so on), query, key and value are embeddings, or x stands for
    all three.

    Files are .safetensors, .npz or .json. A .json is a request's body; a .safetensors may hold
    its fields too, as JSON under qkv in the metadata. Flags go before what the file says. An .npz
    knows no bfloat16: it is written as float32, which holds it exactly.

    \b
    qkv attend softmax in.npz -o out.npz -p causal=true -p 'window=[128,0]'
    qkv attend softmax in.json -o out.json --local --return output
    qkv attend softmax in.npz -o out.npz --weights top_k=8
    """
    form = None if weights is None else _form(weights)
    flags = _given(outputs=list(outputs) or None, weights=form)
    _pass(run_path(variant), "outputs", variant, source, target, flags, **how)


@click.command(short_help="The gradients of a variant at the tensors in a file.")
@click.argument("variant")
@_IN
@_OUT
@_PARAMETERS
@_LAYOUT
@_HEADS
@_URL
@_KEY
@_LOCAL
def gradients(variant: str, source: Path, target: Path, **how: Any) -> None:
    """Write the gradients of VARIANT at the tensors in the file SOURCE.

    They are those of a run, and grad_output, the gradient of its output. What is written are the
    gradients of sum(grad_output * output), by the names of what they are the gradients of: the
    inputs, and the layer's tensors. Files are as for `qkv attend`.

    \b
    qkv gradients softmax in.npz -o out.npz -p causal=true
    """
    _pass(gradients_path(variant), "gradients", variant, source, target, {}, **how)


def _pass(
    path: str,
    group: str,
    variant: str,
    source: Path,
    target: Path,
    flags: dict[str, Any],
    *,
    parameters: tuple[str, ...],
    layout: str | None,
    heads: int | None,
    url: str,
    api_key: str | None,
    local: bool,
) -> None:
    """Sends a file forward or backward through a variant, and writes what is made."""
    with one_line_errors():
        files.check_target(target)
        message = files.read(source, "inputs")
        _override(message.fields, **flags)
        _override_inside(message.fields, "parameters", dict(map(_parameter, parameters)))
        _override_inside(message.fields, "layer", _given(layout=layout, heads=heads))
        if local:
            from qkv import local as here

            run = here.attend if group == "outputs" else here.gradients
            answer = run(variant, message)
        else:
            answer = _send(url, api_key, build_message(path, message, "inputs", group))
        files.write(target, replace(answer, encoding=message.encoding), group)
    _report(answer, target)
    timing = answer.fields["timing"]
    click.echo(f"{timing['compute_ms']:.3f} ms on {timing['device']} ({timing['backend']})")


@click.command(short_help="Take a layer's weights from one layout to another.")
@_IN
@_OUT
@click.option(
    "--from", "layout", metavar="NAME", required=True, help="The layout SOURCE is in: v1 or v2."
)
@click.option("--to", "wanted", metavar="NAME", required=True, help="The layout to write.")
@click.option("--heads", type=int, help="Query heads, where a layout needs them.")
@click.option(
    "--bias",
    type=click.Choice(["refuse", "augment"]),
    help="What to do with a bias that the layout has no place for: refuse it, or take the exact "
    "form with a column of ones.  [default: refuse]",
)
@_URL
@_KEY
@_LOCAL
def convert(
    source: Path,
    target: Path,
    layout: str,
    wanted: str,
    heads: int | None,
    bias: str | None,
    url: str,
    api_key: str | None,
    local: bool,
) -> None:
    """Take the layer's weights in the file SOURCE from one layout to another.

    Not a bit is lost, and both are run on the same input to check it. Files are .safetensors, .npz
    or .json.

    \b
    qkv convert in.safetensors --from v2 --to v1 -o out.safetensors
    """
    with one_line_errors():
        files.check_target(target)
        message = files.read(source, "tensors")
        message.fields.pop("check", None)  # that of the conversion which wrote this file
        _override(message.fields, heads=heads, bias=bias, **{"from": layout, "to": wanted})
        if local:
            from qkv.local import convert_message

            answer = convert_message(message)
        else:
            answer = _send(
                url, api_key, build_message("/v1/convert", message, "tensors", "tensors")
            )
        # lists keep no dtype, and are float32 when they are read again
        exact = all(tensor.dtype == "float32" for tensor in answer.tensors.values())
        encoding = "lists" if exact and message.encoding == "lists" else "base64"
        files.write(target, replace(answer, encoding=encoding), "tensors")
    _report(answer, target)
    check = answer.fields["check"]
    click.echo(
        f"both layers on the same input differ by {check['largest_absolute_difference']:.3g} "
        f"at most, where the largest output is {check['largest_absolute_output']:.3g}"
    )


def _send(url: str, api_key: str | None, call: Call[_T]) -> _T:
    try:
        with Client(url, api_key=api_key) as client:
            return client.send(call)
    # the last two: what httpx makes of a URL, or of a proxy in the environment, that is none
    except (httpx.RequestError, httpx.InvalidURL, ValueError, ImportError) as error:
        reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
        raise click.ClickException(f"no answer from {url!r}: {reason}") from None


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _override(fields: dict[str, Any], **flags: Any) -> None:
    """Flags go before what a file says."""
    fields.update(_given(**flags))


def _override_inside(fields: dict[str, Any], name: str, flags: dict[str, Any]) -> None:
    """The same in a field that is an object."""
    if not flags:
        return  # and what the file says is judged where it is used
    there = fields.get(name, {})
    if not isinstance(there, dict):
        raise InvalidContent(
            f"{name} came as {shown(there)}; it must be an object", pointer=f"/{name}"
        )
    fields[name] = there | flags


def _parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.ClickException(f"parameter {text!r} must be NAME=VALUE")
    try:
        return name, json.load(value)
    except QkvError:
        return name, value  # a bare word, such as query_offset=end


def _form(text: str) -> Any:
    """A form of the weights, as a request has it, where it is judged."""
    kind, equals, value = text.partition("=")
    if not equals:
        return text
    try:
        numbers = [int(number) for number in value.split(",")]
    except ValueError:
        raise click.UsageError(
            f"--weights {text!r} must hold whole numbers, such as rows=0,5 or top_k=8"
        ) from None
    return {kind: numbers if kind == "rows" or len(numbers) > 1 else numbers[0]}


def _report(answer: Message, target: Path) -> None:
    for name, tensor in answer.tensors.items():
        click.echo(f"{name:16} {tensor.dtype:9} {'x'.join(map(str, tensor.shape))}")
    narrow = any(tensor.dtype == "bfloat16" for tensor in answer.tensors.values())
    note = " (bfloat16 as float32)" if narrow and target.suffix == ".npz" else ""
    click.echo(f"written to {target}{note}")


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
