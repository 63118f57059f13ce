"""Measures the error of every variant against its float64 reference, by length and inputs.

Prints the tables of docs/accuracy.md; `--write` writes them there.

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
_ROWS: Final = 16  # rows in each of three blocks, if not all rows are compared with the reference


class Figure(NamedTuple):
    """Largest errors of one result: in the units of docs/accuracy.md, and absolute."""

    output: float
    weights: float
    absolute: float
    unjudged: int


class Found(NamedTuple):
    """Errors of all entries of a result, their units, and the count of rows that are not judged."""

    case: Case
    errors: dict[str, Tensor]
    units: dict[str, Tensor]
    unjudged: int

    @property
    def figure(self) -> Figure:
        """The largest errors; 0 if no exact value fits the dtype."""
        most = {n: float((e / self.units[n]).max()) for n, e in self.errors.items()}
        absolute = float(self.errors["output"].max())
        return Figure(most["output"], most["weights"], absolute, self.unjudged)


def exact(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the weights, which is also the narrowest dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def measure(case: Case, seed: int) -> Found:
    """Returns the errors of `attend`, entry by entry."""
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
    """Marks rows of huge inputs that see keys, but whose weights underflow to 0 in the reference.

    All their products of features are below the smallest float64.
    """
    if not case.family.startswith("huge"):
        return torch.zeros_like(weights[..., :1], dtype=torch.bool)
    lost: Tensor = (truth.weights == 0).all(-1, keepdim=True)
    return lost & (weights != 0).any(-1, keepdim=True)


def moved(case: Case, seed: int) -> dict[str, Tensor]:
    """Returns the change of the reference if each input changes by one eps of the dtype of sums.

    Each number moves up or down. No computation in that dtype can have a smaller error.
    """
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
    """Returns the query rows to compare with the reference; None: all."""
    if case.N < LONG or "query" not in case.variant.inputs:
        return [None]
    starts = (0, case.N // 2 - _ROWS // 2, case.N - _ROWS)
    return [slice(start, start + _ROWS) for start in starts]


def reference(case: Case, tensors: dict[str, Tensor], rows: slice | None) -> Any:
    """Returns the result of the reference, or some rows of it."""
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
    """Returns the mass of each entry of the output, and the largest weight of each row."""
    A = truth.weights.abs()
    if (value := getattr(truth, "value", None)) is None:  # otherwise the variant computes it
        value = tensors[case.variant.inputs["value"].argument].double().nan_to_num(0.0)
        value = value.repeat_interleave(A.shape[1] // value.shape[1], 1)
    rows = A if A.ndim == value.ndim else A[:, None]  # each item is one row, without an axis for it
    mass: Tensor = (rows @ value.abs()).view(truth.output.shape)
    return {"output": mass, "weights": A.amax(-1, keepdim=True).expand_as(A)}


def _errors(made: Tensor, right: Tensor) -> Tensor:
    """Returns |made - right|.

    NaN gives inf, and so does inf if the exact value fits the dtype. If it does not fit, or if the
    reference has overflowed, the error is 0.
    """
    fits = right.to(made.dtype).isfinite()
    off = (made.double() - right).abs()
    off = off.masked_fill(~made.isfinite(), torch.inf).masked_fill(~fits, 0.0)
    return off.masked_fill(made.isnan() & ~right.isnan(), torch.inf)


def number(x: float) -> str:
    """Formats a number with two digits, for a table."""
    if x == 0:
        return "0"
    if 10 <= x < 1000:
        return f"{float(f'{x:.2g}'):.0f}"
    return f"{x:.2g}" if 0.01 <= x < 1000 else f"{x:.0e}".replace("e-0", "e-").replace("e+0", "e")


def tables(figures: dict[Case, Figure], seed: int) -> str:
    """Returns the tables at the end of docs/accuracy.md."""
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
    """Measures all cases; prints the tables and writes them on request."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="skip greater lengths")
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
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
