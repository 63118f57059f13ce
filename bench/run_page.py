"""Tables of docs/performance.md from the figures of bench/run.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from load import Answer, Load
from service import Memory

PAGE: Final = Path(__file__).parent.parent / "docs/performance.md"
BEGIN: Final = "<!-- {} -->\n"
END: Final = "<!-- end -->\n"
_RESIDENT: Final = ["resident, MiB: before", "at most", "after"]
BARE: Final = "bare torch"
LEAST: Final = 0.6  # target, as a fraction of the rate of explicit attention


class Bare(NamedTuple):
    """Milliseconds of the requests of one client in one format, or of the bare call."""

    shape: str
    who: str
    ms: list[float]


class Clients(NamedTuple):
    """Requests in one format from several clients, and resident bytes of the service afterwards."""

    shape: str
    form: str
    callers: int
    load: Load
    resident: int


class Explicit(NamedTuple):
    """Calls per second of explicit attention, without a service."""

    processes: int
    threads: int
    rate: float


class Weights(NamedTuple):
    """Requests for output and weights in one format from several clients."""

    form: str
    callers: int
    load: Load


class Connections(NamedTuple):
    """Requests over open connections: one at a time, and all at once."""

    opened: int
    in_turn: Load
    at_once: Load
    memory: Memory


class Size(NamedTuple):
    """Requests with a body of `size` bytes."""

    size: int
    load: Load
    memory: Memory


class Figures(NamedTuple):
    """All figures of one run."""

    bare: list[Bare]
    clients: list[Clients]
    weights: list[Weights | Explicit]
    connections: list[Connections]
    sizes: list[Size]


def write(made: Mapping[str, str]) -> None:
    """Writes each text between its marks; the hand-written text around them stays."""
    page = PAGE.read_text()
    for name, text in made.items():
        begin = BEGIN.format(name)
        before, rest = page.split(begin)
        page = before + begin + text.rstrip("\n") + "\n" + END + rest.split(END, 1)[1]
    PAGE.write_text(page)


def tables(about: str, figures: Figures) -> dict[str, str]:
    """Returns the texts by the names of their marks."""
    made = {
        "about": about,
        "bare": _bare(figures.bare),
        "clients": _clients(figures.clients),
        "weights": _weights(figures.weights),
        "connections": _connections(figures.connections),
        "sizes": _sizes(figures.sizes),
    }
    return {f"made by `make bench`: {name}": text for name, text in made.items()}


def _bare(rows: list[Bare]) -> str:
    times = {(row.shape, row.who): statistics.median(row.ms) for row in rows}
    spread = {(row.shape, row.who): quartiles(row.ms) for row in rows}
    shapes = list(dict.fromkeys(row.shape for row in rows))
    cells = []
    for who in dict.fromkeys(row.who for row in rows):
        cells.append([who])
        for shape in shapes:
            bare = min(ms for key, ms in times.items() if key[0] == shape and BARE in key[1])
            cells[-1] += [spread[shape, who], digits(times[shape, who] / bare)]
    columns = [column for s in shapes for column in (f"{s}, ms (quartiles)", "× bare")]
    return table(["one client", *columns], cells)


def _clients(rows: list[Clients]) -> str:
    counts = sorted({row.callers for row in rows})
    head = ["", ""]
    for count in counts:
        each = f"{count} client{'s' * (count > 1)}"
        head += [f"{each}, requests/s", "p50 / p99, ms"]
    cells, over = [], []
    for shape, form in dict.fromkeys((row.shape, row.form) for row in rows):
        own = {row.callers: row for row in rows if (row.shape, row.form) == (shape, form)}
        cells.append([shape, form])
        for count in counts:
            came = own[count].load if count in own else None
            cells[-1] += [digits(came.rate), _percentiles(came.answers)] if came else ["", ""]
        cells[-1].append(_mebibytes(list(own.values())[-1].resident))
        p50, p99 = _p(own[1].load.answers)
        if p99 > 2 * p50 + 1:
            over.append(f"{shape} in {form}")
    rows_below = f"All rows but {'; '.join(over)}" if over else "All rows"
    made = table([*head, "resident after, MiB"], cells, labels=2)
    target = "Target for one client: p99 is at most twice p50 plus 1 ms."
    return f"{made}\n\n{target} {rows_below} meet it."


def _weights(rows: list[Weights | Explicit]) -> str:
    plain = [row for row in rows if isinstance(row, Explicit)]
    best = max(row.rate for row in plain)
    one = next(row.rate for row in plain if row.processes == row.threads == 1)
    head = ["", "clients", "requests/s", "of explicit", "ms: median", "attention"]
    head += ["queue and transfer", "rest in the service", "outside it"]
    cells, reached = [], []
    for row in rows:
        if isinstance(row, Explicit):
            who = f"explicit, {row.processes} × {row.threads} thread{'s' * (row.threads > 1)}"
            cells.append([who, "", digits(row.rate), f"{row.rate / best:.2f}", *[""] * 5])
            continue
        answers, ratio = row.load.answers, row.load.rate / best
        reached.append(ratio)
        stages = [
            [a.ms for a in answers],
            [a.compute for a in answers],
            [a.queue + a.transfer for a in answers],
            [a.total - a.compute - a.queue - a.transfer for a in answers],
            [a.ms - a.total for a in answers],
        ]
        times = [digits(statistics.median(stage)) for stage in stages]
        cells.append([row.form, str(row.callers), digits(row.load.rate), f"{ratio:.2f}", *times])
    most = (
        f"The best row reaches {max(reached):.2f} of explicit attention's rate on all CPUs, and "
        f"{max(reached) * best / one:.2f} of the rate of one process with one thread. The target "
        f"is {LEAST}."
    )
    return f"{table(head, cells)}\n\n{most}"


def _connections(rows: list[Connections]) -> str:
    head = ["connections", "in turn, ms added (quartiles)", "p99", "all at once, requests/s"]
    head += ["p50 / p99, ms", *_RESIDENT]
    cells = []
    for row in rows:
        added = [a.added for a in row.in_turn.answers]
        cells.append([
            str(row.opened),
            quartiles(added),
            digits(percentile(added, 99)),
            digits(row.at_once.rate),
            _percentiles(row.at_once.answers),
            *_resident(row.memory),
        ])  # fmt: skip
    return table(head, cells)


def _sizes(rows: list[Size]) -> str:
    head = ["body", "requests", "ms: median", "attention", "added (quartiles)", "added for a MiB"]
    head += _RESIDENT
    cells, seen = [], set()
    for row in rows:
        answers = row.load.answers
        added = [a.added for a in answers]
        cells.append([
            _size(row.size) + (", again" if row.size in seen else ""),
            f"{len(answers):,}",
            digits(statistics.median(a.ms for a in answers)),
            digits(statistics.median(a.compute for a in answers)),
            quartiles(added),
            digits(statistics.median(added) * 2**20 / row.size) if row.size >= 2**20 else "",
            *_resident(row.memory),
        ])  # fmt: skip
        seen.add(row.size)
    return table(head, cells)


def table(head: list[str], rows: Iterable[list[str]], labels: int = 1) -> str:
    """Returns a table in Markdown; all columns after the first `labels` are right-aligned."""
    ruler = ["---"] * labels + ["---:"] * (len(head) - labels)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ruler, *rows))


def digits(x: float) -> str:
    """Formats a number with three digits."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:#.3g}"


def quartiles(values: list[float]) -> str:
    """Formats the median, and the quartiles in brackets."""
    low, median, high = statistics.quantiles(values, n=4)
    return f"{digits(median)} ({digits(low)}–{digits(high)})"


def percentile(values: list[float], per_cent: int) -> float:
    """Returns a percentile of the values."""
    return statistics.quantiles(values, n=100, method="inclusive")[per_cent - 1]


def _p(answers: list[Answer]) -> tuple[float, float]:
    values = [a.ms for a in answers]
    return percentile(values, 50), percentile(values, 99)


def _percentiles(answers: list[Answer]) -> str:
    return " / ".join(map(digits, _p(answers)))


def _resident(memory: Memory) -> list[str]:
    return [_mebibytes(held) for held in (memory.before, memory.most, memory.after)]


def _mebibytes(held: int) -> str:
    return f"{held / 2**20:,.0f}"


def _size(size: int) -> str:
    for unit, one in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= one:
            return f"{size // one} {unit}"
    return f"{size} bytes"
