"""`qkv sweep`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import click
import orjson

from qkv.cli import tensor_files as files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import KEY, LOCAL, PARAMETERS, REPEATS, URL, named, parameter
from qkv.cli.service import asking, room
from qkv.client.event_parser import Event
from qkv.client.request_builders import build_sweep, choices
from qkv.client.sweep import Sweep
from qkv.client.sweep_cells import Cells
from qkv.tensors import FLOATING

__all__ = ["sweep"]

_PLOTS: Final = (".svg", ".png", ".pdf")


def _lengths(context: click.Context, option: click.Parameter, text: str) -> list[int]:
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
    callback=_lengths,
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
@KEY
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
    **how: Any,
) -> None:
    """Time each VARIANT at each length, on inputs that the service draws.

    A bar says how far it is. Then come a table of medians, and the lengths from which on another
    variant is the faster one. Ctrl-C ends it (with --local, after the run under way) and keeps what
    was measured. Parameters go to every variant, and one may be JSON with parameters of its own.

    \b
    qkv sweep softmax linear --lengths 256,512,1024 --csv out.csv --plot out.svg
    """
    with one_line_errors():
        _check(csv, plot)
        chosen = choices([named(word) for word in variants], dict(map(parameter, parameters)))
        measured = Cells()
        try:
            with ExitStack() as stack:
                if local:
                    measured = stack.enter_context(_here(chosen, lengths, how))
                else:
                    client = stack.enter_context(asking(url, api_key))
                    measured = stack.enter_context(client.sweep(chosen, lengths, **how))
                for _ in measured:
                    pass
        finally:  # also when it was interrupted, or the service ended
            if measured.cells:
                _write(measured, csv, plot)


def _here(chosen: Sequence[Any], lengths: list[int], how: Mapping[str, Any]) -> Sweep:
    """Without a service: what one would be asked, and would say."""
    from qkv.engine.local import sweep as here

    def events() -> Generator[Event]:
        asked = orjson.loads(build_sweep(chosen, lengths, how, {}).content)
        with closing(here(asked)) as said:
            for name, data in said:
                yield Event(name, orjson.dumps(data).decode())

    return Sweep(events(), progress=True)


def _check(csv: Path | None, plot: Path | None) -> None:
    """Raises before the work is done what would be raised after it."""
    if csv is not None:
        files.check_target(csv, [".csv"])
    if plot is not None:
        files.check_target(plot, _PLOTS)
        import qkv.client.sweep_plot  # noqa: F401 - matplotlib may be missing


def _write(measured: Cells, csv: Path | None, plot: Path | None) -> None:
    click.echo(measured.table(room()))
    if csv is not None:
        files.replace(csv, [measured.csv().encode()])
        click.echo(f"written to {csv}")
    if plot is not None:
        from qkv.client.sweep_plot import draw

        drawn = BytesIO()
        draw(measured).savefig(drawn, format=plot.suffix.removeprefix("."))
        files.replace(plot, [drawn.getvalue()])
        click.echo(f"written to {plot}")
