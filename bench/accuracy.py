"""How far every variant lies from its float64 reference, over lengths and kinds of inputs.

Prints the tables of docs/accuracy.md, and with --write puts them there.

    python bench/accuracy.py [--seed 0] [--threads 2] [--write]
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from families import DTYPES, LENGTHS, LONG, Case, cases, inputs
from torch import Tensor

import qkv
from qkv.attention.catalogue import variants

PAGE: Final = Path(__file__).parent.parent / "docs/accuracy.md"
MARK: Final = "<!-- what follows is written by make accuracy -->\n"
_ROWS: Final = 16  # in each of three blocks, where not all are held against the reference


class Figure(NamedTuple):
    """Largest errors of one answer: in units, as docs/accuracy.md has them, and absolute."""

    output: float
    weights: float
    absolute: float
    unjudged: int


class Found(NamedTuple):
    """Errors of all entries of an answer, the units that they are measured in, and how many rows
    the reference could not judge."""

    case: Case
    errors: dict[str, Tensor]
    units: dict[str, Tensor]
    unjudged: int

    @property
    def figure(self) -> Figure:
        """The largest; 0 where no truth fits the dtype."""
        most = {n: float((e / self.units[n]).max()) for n, e in self.errors.items()}
        absolute = float(self.errors["output"].max())
        return Figure(most["output"], most["weights"], absolute, self.unjudged)


def exact(dtype: torch.dtype) -> torch.dtype:
    """What weights are answered in, and sums held in at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def measure(case: Case, seed: int) -> Found:
    """Errors of `attend`, entry by entry."""
    tensors = inputs(case, seed)
    outputs = frozenset({"output", "weights"})
    answer = case.variant.attend(**tensors, **case.parameters, outputs=outputs)
    errors: dict[str, list[Tensor]] = {"output": [], "weights": []}
    units: dict[str, list[Tensor]] = {"output": [], "weights": []}
    unjudged = 0
    for rows in _blocks(case):
        truth = reference(case, tensors, rows)
        lost = _underflowed(case, answer.weights[:, :, rows] if rows else answer.weights, truth)
        unjudged += int(lost.sum())
        for name, scale in _scales(case, tensors, truth).items():
            made, right = getattr(answer, name), getattr(truth, name)
            made = made[:, :, rows] if rows else made
            info = torch.finfo(made.dtype)
            off = _errors(made, right)
            errors[name].append(off.masked_fill(lost & made.isfinite(), 0.0).flatten())
            units[name].append(info.eps * scale.clamp(min=info.smallest_normal).flatten())
    return Found(
        case,
        {name: torch.cat(parts) for name, parts in errors.items()},
        {name: torch.cat(parts) for name, parts in units.items()},
        unjudged,
    )


def _underflowed(case: Case, weights: Tensor, truth: Any) -> Tensor:
    """The rows of huge inputs that see keys, but whose weights the plain reference has lost: all
    of them were products of features below the least that float64 holds."""
    if not case.family.startswith("huge"):
        return torch.zeros_like(weights[..., :1], dtype=torch.bool)
    lost: Tensor = (truth.weights == 0).all(-1, keepdim=True)
    return lost & (weights != 0).any(-1, keepdim=True)


def moved(case: Case, seed: int) -> dict[str, Tensor]:
    """How far the reference's own answer moves when each number of the inputs does by an eps of
    what sums are held in, up or down: what no way to compute in that dtype can be blamed for."""
    tensors = inputs(case, seed)
    eps = torch.finfo(exact(case.dtype)).eps
    generator = torch.Generator().manual_seed(seed)

    def shaken(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        up = torch.randint(0, 2, x.shape, generator=generator).double() * 2 - 1
        return x.double() * (1 + eps * up)

    others = {name: shaken(x) for name, x in tensors.items()}
    moves: dict[str, list[Tensor]] = {"output": [], "weights": []}
    for rows in _blocks(case):
        one, other = (reference(case, given, rows) for given in (tensors, others))
        for name, parts in moves.items():
            move = (getattr(one, name) - getattr(other, name)).abs().nan_to_num(0.0)
            parts.append(move.amax(-1, keepdim=True).expand_as(move).flatten())
    return {name: torch.cat(parts) for name, parts in moves.items()}


def _blocks(case: Case) -> list[slice | None]:
    """Query rows that are held against the reference; None: all."""
    if case.N < LONG or "query" not in case.variant.inputs:
        return [None]
    starts = (0, case.N // 2 - _ROWS // 2, case.N - _ROWS)
    return [slice(start, start + _ROWS) for start in starts]


def reference(case: Case, tensors: dict[str, Tensor], rows: slice | None) -> Any:
    """The reference's answer, or these rows of it."""
    given, parameters = dict(tensors), case.parameters
    if rows is not None:
        query = case.variant.inputs["query"].argument
        given[query] = given[query][:, :, rows]
        if case.causal:
            parameters["query_offset"] = rows.start
    with np.errstate(over="ignore", invalid="ignore"):
        answer: Any = case.variant.module.reference(**given, **parameters)
    return answer


def _scales(case: Case, tensors: dict[str, Tensor], truth: Any) -> dict[str, Tensor]:
    """Mass of each entry of the output, and the largest weight of each row."""
    A = truth.weights.abs()
    if (value := getattr(truth, "value", None)) is None:  # else it is made, not sent
        value = tensors[case.variant.inputs["value"].argument].double().nan_to_num(0.0)
        value = value.repeat_interleave(A.shape[1] // value.shape[1], 1)
    rows = A if A.ndim == value.ndim else A[:, None]  # each item is one row, without an axis
    mass: Tensor = (rows @ value.abs()).view(truth.output.shape)
    return {"output": mass, "weights": A.amax(-1, keepdim=True).expand_as(A)}


def _errors(made: Tensor, right: Tensor) -> Tensor:
    """|made - right|; inf for NaN, and for inf where the truth fits the dtype; else 0 where it
    does not fit, or where the reference itself has overflowed."""
    fits = right.to(made.dtype).isfinite()
    off = (made.double() - right).abs()
    off = off.masked_fill(~made.isfinite(), torch.inf).masked_fill(~fits, 0.0)
    return off.masked_fill(made.isnan() & ~right.isnan(), torch.inf)


def number(x: float) -> str:
    """Two digits, as a table has room for."""
    if x == 0:
        return "0"
    if 10 <= x < 1000:
        return f"{float(f'{x:.2g}'):.0f}"
    return f"{x:.2g}" if 0.01 <= x < 1000 else f"{x:.0e}".replace("e-0", "e-").replace("e+0", "e")


def tables(figures: dict[Case, Figure], seed: int) -> str:
    """What docs/accuracy.md ends with."""
    lines = [
        "| variant | dtype | output | where | an eps of the inputs | random: output | absolute "
        "| weights | where | an eps of the inputs |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for name in variants():
        for dtype in DTYPES:
            own = {c: f for c, f in figures.items() if (c.variant.name, c.dtype) == (name, dtype)}
            plain = [f for c, f in own.items() if c.family == "random"]
            worst = [
                (most, number(getattr(own[most], what)), str(most), _moved(most, what, seed))
                for what in ("output", "weights")
                for most in [max(own, key=lambda c: getattr(own[c], what))]
            ]
            (_, out, at, shift), (_, weights, where, turn) = worst
            usual = number(max(f.output for f in plain))
            lines.append(
                f"| `{name}` | {str(dtype)[6:]} | {out} | {at} | {shift} | {usual} | "
                f"{number(max(f.absolute for f in plain))} | {weights} | {where} | {turn} |"
            )
    families = list(dict.fromkeys(c.family for c in figures))
    for what in ("output", "weights"):
        lines += ["", f"float32, {what}, by family:", "", "| variant | " + " | ".join(families)]
        lines[-1] += " |"
        lines.append("| --- |" + " ---: |" * len(families))
        for name in variants():
            row = []
            for family in families:
                one = [
                    getattr(f, what)
                    for c, f in figures.items()
                    if (c.variant.name, c.dtype, c.family) == (name, torch.float32, family)
                ]
                row.append(number(max(one)) if one else "")
            lines.append(f"| `{name}` | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _moved(case: Case, what: str, seed: int) -> str:
    found = measure(case, seed)
    at = (found.errors[what] / found.units[what]).argmax()
    return number(float(moved(case, seed)[what][at] / found.units[what][at]))


def main() -> None:
    """Measures all cases, and prints or writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="leave out what is longer")
    parser.add_argument("--write", action="store_true", help=f"into docs/{PAGE.name}")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    started = time.monotonic()
    lengths = [N for N in LENGTHS if N <= given.longest]
    figures = {case: measure(case, given.seed).figure for case in cases(lengths=lengths)}
    unjudged = sum(figure.unjudged for figure in figures.values())
    text = (
        f"qkv {qkv.__version__}, torch {torch.__version__}, numpy {np.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()}, cpu, {given.threads} threads; seed "
        f"{given.seed}; {len(figures)} requests; {unjudged} rows not judged.\n\n"
        + tables(figures, given.seed)
    )
    print(text + f"\n{time.monotonic() - started:.0f} s")
    if given.write:
        prose = PAGE.read_text().partition(MARK)[0]
        PAGE.write_text(prose + MARK + "\n" + text)


if __name__ == "__main__":
    main()
