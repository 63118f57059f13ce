"""The commands `qkv attend` and `qkv gradients`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import (
    API_KEY,
    LOCAL,
    PARAMETERS,
    SOURCE,
    TARGET,
    URL,
    drop_unset,
    layer_flags,
    layer_options,
    override,
    override_object,
    parse_parameters,
)
from qkv.cli.service import report, send
from qkv.client.request_builders import build_message, gradients_path, run_path


@click.command(short_help="Runs a variant on the tensors in a file.")
@click.argument("variant")
@SOURCE
@TARGET
@PARAMETERS
@click.option(
    "--return",
    "outputs",
    multiple=True,
    metavar="NAME",
    help="An output to write, instead of output and weights.  Repeatable.",
)
@click.option(
    "--weights",
    metavar="FORM",
    help="The form of the weights: full, none, stats, rows=0,5, top_k=8 or pool=64.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The state of the tokens before, as --save-state wrote it.",
)
@click.option(
    "--save-state",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A .safetensors file for the state of the tokens.  Without --return, no weights are "
    "computed.",
)
@layer_options
@URL
@API_KEY
@LOCAL
def attend(
    variant: str,
    source: Path,
    target: Path,
    outputs: tuple[str, ...],
    weights: str | None,
    state: Path | None,
    save_state: Path | None,
    **options: Any,
) -> None:
    """Runs VARIANT on the tensors in the file SOURCE.

    The tensors are query, key and value, and optionally others that the variant takes, such as
    mask. If the file has a layer's weights too (layer.W_query.weight and so on), query, key and
    value are embeddings. One embedding x may replace all three. The weights may be those of a whole
    model: --prefix selects the layer.

    Files are .safetensors, .npz or .json. A .json file is the body of a request. A .safetensors
    file may have the fields of a request, as JSON under qkv in its metadata. Flags override the
    fields of the file. An .npz file has no bfloat16: it gets float32, which holds the numbers
    exactly. The file - is standard input, or standard output, as JSON.

    \b
    qkv attend softmax in.npz -o out.npz -p causal=true -p 'window=[128,0]'
    qkv attend softmax in.json -o out.json --local --return output
    qkv attend softmax in.npz -o out.npz --weights top_k=8
    qkv attend gated in.npz -o out.npz --state a.safetensors
    """
    form = None if weights is None else _parse_weight_form(weights)
    names = list(outputs)
    if save_state is not None:
        names = [*(names or ["output", *(["weights"] if weights else [])]), "state"]
    flags = drop_unset(outputs=names or None, weights=form)
    states = _States(state, save_state)
    _run_file(run_path(variant), "outputs", variant, source, target, flags, states, **options)


@click.command(short_help="Computes the gradients of a variant at the tensors in a file.")
@click.argument("variant")
@SOURCE
@TARGET
@PARAMETERS
@layer_options
@URL
@API_KEY
@LOCAL
def gradients(variant: str, source: Path, target: Path, **options: Any) -> None:
    """Computes the gradients of VARIANT at the tensors in the file SOURCE.

    The tensors are those of a run, and grad_output, the gradient of its output. The result is the
    gradient of sum(grad_output * output) for each input and each tensor of the layer, by its name.
    Files are as for `qkv attend`.

    \b
    qkv gradients softmax in.npz -o out.npz -p causal=true
    """
    _run_file(
        gradients_path(variant), "gradients", variant, source, target, {}, _States(), **options
    )


class _States(NamedTuple):
    """The files of the state before and behind the tokens; None: no file."""

    before: Path | None = None
    behind: Path | None = None


def _run_file(
    path: str,
    group: str,
    variant: str,
    source: Path,
    target: Path,
    flags: dict[str, Any],
    states: _States,
    *,
    parameters: tuple[str, ...],
    url: str,
    api_key: str | None,
    local: bool,
    **options: Any,
) -> None:
    """Runs a variant or its gradients on a file, and writes the result."""
    layer = layer_flags(options)
    with one_line_errors():
        tensor_files.check_target(target)
        if states.behind is not None:
            tensor_files.check_target(states.behind, [".safetensors"])
        message = tensor_files.read_request(
            source, layer.get("prefix"), has_gradient=group == "gradients"
        )
        if states.before is not None:
            message.tensors |= tensor_files.read_state(states.before)
        override(message.fields, **flags)
        override_object(message.fields, "parameters", parse_parameters(parameters))
        override_object(message.fields, "layer", layer)
        if local:
            from qkv import local as in_process

            run = in_process.attend if group == "outputs" else in_process.gradients
            response = run(variant, message)
        else:
            response = send(url, api_key, build_message(path, message, "inputs", group))
        if states.behind is not None:
            response = tensor_files.write_state(states.behind, response, group)
        tensor_files.write(target, replace(response, encoding=message.encoding), group)
    timing = response.fields["timing"]
    cost = f"{timing['compute_ms']:.3f} ms on {timing['device']} ({timing['backend']})"
    report(response, target, [cost])


def _parse_weight_form(text: str) -> Any:
    """Parses --weights to the form in a request. The service validates it."""
    kind, equals, value = text.partition("=")
    if not equals:
        return text
    try:
        numbers = [int(number) for number in value.split(",")]
    except ValueError:
        raise click.UsageError(
            f"--weights is wrong: got {text!r}, expected whole numbers as in rows=0,5 or top_k=8"
        ) from None
    return {kind: numbers if kind == "rows" or len(numbers) > 1 else numbers[0]}
