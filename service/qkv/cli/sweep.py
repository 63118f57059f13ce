"""The command `qkv sweep`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import click

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import (
    API_KEY,
    LOCAL,
    PARAMETERS,
    REPEATS,
    URL,
    parse_parameters,
    parse_variant,
)
from qkv.cli.output import echo
from qkv.cli.service import line_width, open_client
from qkv.client.event_source import ServerSentEvent
from qkv.client.request_builders import build_choices, build_sweep
from qkv.client.sweep import Sweep
from qkv.client.sweep_cells import SweepResults
from qkv.tensors import FLOATING
from qkv.wire import json

_PLOTS: Final = (".svg", ".png", ".pdf")


def _parse_lengths(context: click.Context, option: click.Parameter, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"got {text!r}, expected whole numbers with commas between them."
        ) from None


@click.command(short_help="Times variants at many lengths, and finds crossovers.")
@click.argument("variants", nargs=-1, required=True, metavar="VARIANT...")
@click.option(
    "--lengths",
    callback=_parse_lengths,
    default="64,128,256,512,1024,2048,4096",
    show_default=True,
    metavar="N,N,...",
    help="Lengths of queries and keys, or of the tokens before the next one.",
)
@click.option(
    "--batch", type=int, metavar="N", help="Batch size of the inputs.  [default: the service's]"
)
@click.option("--heads", type=int, metavar="N", help="Heads of the inputs.")
@click.option("--width", type=int, metavar="N", help="Width of queries, keys and values.")
@click.option("--dtype", type=click.Choice(FLOATING), help="Dtype of the inputs.")
@click.option("--seed", type=int, metavar="N", help="Seed of the inputs.")
@click.option(
    "--mode",
    type=click.Choice(["whole", "decode"]),
    help="decode times the next token after each length: from a state, or from a cache and by "
    "computing all tokens again.  [default: whole]",
)
@PARAMETERS
@REPEATS
@click.option(
    "--csv", "csv", type=click.Path(path_type=Path), metavar="FILE", help="Write the cells to FILE."
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the times to FILE: .svg, .png or .pdf.  Needs pip install '.[plot]'.",
)
@URL
@API_KEY
@LOCAL
def sweep(
    variants: tuple[str, ...],
    lengths: list[int],
    parameters: tuple[str, ...],
    csv: Path | None,
    plot: Path | None,
    url: str,
    api_key: str | None,
    local: bool,
    **options: Any,
) -> None:
    """Times each VARIANT at each length, on random inputs that the service generates.

    A bar shows the progress. A table has the medians, and the lengths between which another
    variant becomes faster. Ctrl-C ends the sweep (with --local after the current run) and prints
    the measured cells. Parameters are for all variants; a variant may be JSON with parameters of
    its own.

    \b
    qkv sweep softmax linear --lengths 256,512,1024 --csv out.csv --plot out.svg
    qkv sweep softmax linear gated --mode decode
    """
    with one_line_errors():
        _check_targets(csv, plot)
        shared = parse_parameters(parameters)
        chosen = build_choices([parse_variant(word) for word in variants], shared)
        results = SweepResults()
        try:
            with ExitStack() as stack:
                if local:
                    results = stack.enter_context(_sweep_locally(chosen, lengths, options))
                else:
                    client = stack.enter_context(open_client(url, api_key))
                    results = stack.enter_context(client.sweep(chosen, lengths, **options))
                for _ in results:
                    pass
        finally:  # also after Ctrl-C or an error of the service
            if results.cells:
                _write_results(results, csv, plot)


def _sweep_locally(chosen: Sequence[Any], lengths: list[int], options: Mapping[str, Any]) -> Sweep:
    """Runs a sweep without a service, from the events that a service would send."""
    from qkv.local import sweep as sweep_locally

    def events() -> Generator[ServerSentEvent]:
        body = json.load(build_sweep(chosen, lengths, options, {}).content)
        with closing(sweep_locally(body)) as local_events:
            for name, data in local_events:
                yield ServerSentEvent(name, data.to_json().decode())

    return Sweep(events(), progress=True)


def _check_targets(csv: Path | None, plot: Path | None) -> None:
    """Raises before the sweep the errors that writing the files would raise after it."""
    if csv is not None:
        tensor_files.check_target(csv, [".csv"])
    if plot is not None:
        tensor_files.check_target(plot, _PLOTS)
        import qkv.client.figures.sweep_plot  # noqa: F401 - matplotlib may be missing


def _write_results(results: SweepResults, csv: Path | None, plot: Path | None) -> None:
    echo(results.table(line_width()))
    if csv is not None:
        tensor_files.replace_file(csv, [results.csv().encode()])
        echo(f"written to {csv}")
    if plot is not None:
        from qkv.client.figures.sweep_plot import draw_sweep

        image = BytesIO()
        draw_sweep(results).savefig(image, format=plot.suffix.removeprefix("."))
        tensor_files.replace_file(plot, [image.getvalue()])
        echo(f"written to {plot}")
