"""The effect of a substitution on a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from qkv.client.tables import Table, format_number
from qkv.errors import InvalidContent


@dataclass(frozen=True, slots=True)
class SubstitutedLayer:
    """The effect of a substitution on one layer.

    Attributes:
        layer: qualified name of the module.
        variant: the variant that ran.
        heads: numbers of the substituted heads.
        calls: number of attention calls.
        relative_change: Frobenius norm of the change of these heads' output, divided by that of
            the output that the model's own attention has for the same inputs; None: it is zero.
    """

    layer: str
    variant: str
    heads: tuple[int, ...]
    calls: int
    relative_change: float | None


class SubstitutionReport:
    """The effect of a substitution: `rows`, a table, and the divergence of a model's outputs."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, tuple[int, ...]], tuple[int, float, float]] = {}

    def add(
        self, layer: str, variant: str, heads: tuple[int, ...], changed: float, total: float
    ) -> None:
        """Adds a call: the sums of squares of the change, and of the model's own output."""
        key = layer, variant, heads
        calls, before, whole = self._sums.get(key, (0, 0.0, 0.0))
        self._sums[key] = calls + 1, before + changed, whole + total

    @property
    def rows(self) -> list[SubstitutedLayer]:
        """The substituted layers, in the order of their first calls."""
        return [
            SubstitutedLayer(*key, calls, math.sqrt(changed / total) if total else None)
            for key, (calls, changed, total) in self._sums.items()
        ]

    @staticmethod
    def kl(before: Tensor, after: Tensor, mask: Tensor | None = None) -> float:
        """Returns the mean KL divergence of a model's predictions, in nats.

        Args:
            before: logits (..., V) of the model.
            after: logits of the same shape, with the substitution.
            mask: positions (...) to count, such as the model's `attention_mask`; None: all.

        Raises:
            InvalidContent: the shapes differ.
        """
        if before.shape != after.shape:
            raise InvalidContent(
                f"the logits differ in shape: got {list(after.shape)}, expected "
                f"{list(before.shape)}"
            )
        if mask is not None and mask.shape != before.shape[:-1]:
            raise InvalidContent(
                f"mask is invalid: got shape {list(mask.shape)}, expected {list(before.shape[:-1])}"
            )
        if mask is not None:
            before, after = before[mask.bool()], after[mask.bool()]
        log_p, log_q = (x.detach().double().log_softmax(-1) for x in (before, after))
        terms = log_p.exp() * (log_p - log_q)
        terms = terms.masked_fill(log_p.isneginf(), 0.0)  # 0 log 0 is 0
        return float(terms.sum(-1).mean().clamp(min=0.0))

    def table(self, width: int | None = None) -> str:
        """Returns the rows as text.

        Args:
            width: characters a line; None: no limit.
        """
        return self._table().text(width)

    def __repr__(self) -> str:
        """Returns one line: the number of layers, and the largest change."""
        changes = [r.relative_change for r in self.rows if r.relative_change is not None]
        largest = format_number(max(changes)) if changes else "–"
        return f"SubstitutionReport({len(self.rows)} layers, largest relative change {largest})"

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        lines = [
            [
                row.layer,
                row.variant,
                _list_heads(row.heads),
                str(row.calls),
                format_number(row.relative_change),
            ]
            for row in self.rows
        ]
        header = ["layer", "variant", "heads", "calls", "relative change"]
        return Table(header, [("substituted heads", lines)])


def _list_heads(heads: tuple[int, ...]) -> str:
    is_range = heads == tuple(range(heads[0], heads[0] + len(heads))) and len(heads) > 2
    return f"{heads[0]}–{heads[-1]}" if is_range else ", ".join(map(str, heads))
