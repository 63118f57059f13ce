"""`qkv sweep`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import click
import orjson

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import API_KEY, LOCAL, PARAMETERS, REPEATS, URL, parse_parameter, parse_variant
from qkv.cli.service import line_width, open_client
from qkv.client.event_parser import Event
from qkv.client.request_builders import build_choices, build_sweep
from qkv.client.sweep import Sweep
from qkv.client.sweep_cells import SweepResults
from qkv.tensors import FLOATING

__all__ = ["sweep"]

_PLOTS: Final = (".svg", ".png", ".pdf")


def _parse_lengths(context: click.Context, option: click.Parameter, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r} must be whole numbers with commas between them."
        ) from None


@click.command(short_help="Time variants at many lengths, and find where they cross.")
@click.argument("variants", nargs=-1, required=True, metavar="VARIANT...")
@click.option(
    "--lengths",
    callback=_parse_lengths,
    default="64,128,256,512,1024,2048,4096",
    show_default=True,
    metavar="N,N,...",
    help="Of queries and keys.",
)
@click.option("--batch", type=int, metavar="N", help="Of the inputs.  [default: the service's]")
@click.option("--heads", type=int, metavar="N", help="The same.")
@click.option("--width", type=int, metavar="N", help="The same: of queries, keys and values.")
@click.option("--dtype", type=click.Choice(FLOATING), help="The same.")
@click.option("--seed", type=int, metavar="N", help="The same: what they are drawn from.")
@PARAMETERS
@REPEATS
@click.option(
    "--csv", "csv", type=click.Path(path_type=Path), metavar="FILE", help="Write every cell there."
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw them there: .svg, .png or .pdf.  Needs qkv[plot].",
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
    """Time each VARIANT at each length, on inputs that the service draws.

    A bar says how far it is. Then come a table of medians, and the lengths from which on another
    variant is the faster one. Ctrl-C ends it (with --local, after the run under way) and keeps what
    was measured. Parameters go to every variant, and one may be JSON with parameters of its own.

    \b
    qkv sweep softmax linear --lengths 256,512,1024 --csv out.csv --plot out.svg
    """
    with one_line_errors():
        _check_targets(csv, plot)
        shared = dict(map(parse_parameter, parameters))
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
        finally:  # also when it was interrupted, or the service ended
            if results.cells:
                _write_results(results, csv, plot)


def _sweep_locally(chosen: Sequence[Any], lengths: list[int], options: Mapping[str, Any]) -> Sweep:
    """Runs a sweep without a service, on the events that one would send."""
    from qkv.engine.local import sweep as sweep_locally

    def events() -> Generator[Event]:
        body = orjson.loads(build_sweep(chosen, lengths, options, {}).content)
        with closing(sweep_locally(body)) as local_events:
            for name, data in local_events:
                yield Event(name, orjson.dumps(data).decode())

    return Sweep(events(), progress=True)


def _check_targets(csv: Path | None, plot: Path | None) -> None:
    """Raises before the work is done what would be raised after it."""
    if csv is not None:
        tensor_files.check_target(csv, [".csv"])
    if plot is not None:
        tensor_files.check_target(plot, _PLOTS)
        import qkv.client.sweep_plot  # noqa: F401 - matplotlib may be missing


def _write_results(results: SweepResults, csv: Path | None, plot: Path | None) -> None:
    click.echo(results.table(line_width()))
    if csv is not None:
        tensor_files.replace_file(csv, [results.csv().encode()])
        click.echo(f"written to {csv}")
    if plot is not None:
        from qkv.client.sweep_plot import draw_sweep

        image = BytesIO()
        draw_sweep(results).savefig(image, format=plot.suffix.removeprefix("."))
        tensor_files.replace_file(plot, [image.getvalue()])
        click.echo(f"written to {plot}")
