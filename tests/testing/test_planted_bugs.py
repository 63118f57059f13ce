"""The oracle fails every bug that is planted in a flash-style kernel, and names those it knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pytest
import torch
from torch import Tensor

from qkv.testing import Report, verify
from support.flash_kernel import Attention, capped_scores, flash_kernel, hidden_pairs
from support.shared_truths import shared_truths as shared_truths

pytestmark = pytest.mark.slow


class Bug(NamedTuple):
    """A planted bug.

    Attributes:
        switch: its name in the kernels; "": none.
        name: the name that a right diagnosis states; "": no known bug is this one.
        options: parameters of softmax.
        is_strict: True if the oracle runs its strict families.
        is_backward: True if the bug is in the backward pass.
        dtype: of the inputs.
    """

    switch: str
    name: str = ""
    options: Mapping[str, Any] = {}
    is_strict: bool = False
    is_backward: bool = False
    dtype: torch.dtype = torch.float16

    def __str__(self) -> str:
        return self.switch

    def examine(self) -> Report:
        """Returns the oracle's report on the kernel with the bug."""
        switches = (self.switch,) if self.switch else ()
        return verify(
            flash_with_backward(*switches) if self.is_backward else flash_kernel(*switches),
            "softmax",
            dtype=self.dtype,
            gradients=self.is_backward,
            strict=self.is_strict,
            **self.options,
        )


CAUSAL: Final = {"causal": True}
DECODING: Final = {"causal": True, "query_offset": "end"}
WINDOW: Final = {"window": (15, 0)}
CAP: Final = {"softcap": 50.0}

RIGHT: Final = (Bug(""), Bug("", is_backward=True))
"""The kernels without a bug."""

BUGS: Final = (
    Bug("output-not-rescaled", "online-not-rescaled"),
    Bug("sum-not-rescaled", "online-not-rescaled"),
    Bug("max-not-subtracted", "max-not-subtracted"),
    Bug("max-starts-at-0", options=CAUSAL),
    Bug("mask-after-max", options=CAUSAL),
    Bug("last-block-dropped"),
    Bug("zero-keys-counted"),
    Bug("last-rows-not-written"),
    Bug("nan-from-hidden-block", options=WINDOW),
    Bug("nan-from-masked-row", "nan-from-masked-row", is_strict=True),
    Bug("normalizer-missing", "normalizer-missing"),
    Bug("scale-missing", "scale-missing"),
    Bug("scale-missing", "scale-missing", CAUSAL),
    Bug("scale-1/D", "scale-wrong"),
    Bug("scale-sqrt(D)", "scale-wrong"),
    Bug("scale-1/sqrt(E)", "scale-wrong", {"sizes": {"E": 8}}),
    Bug("scale-ignored", "scale-wrong", {"scale": 0.4}),
    Bug("exp2-of-natural-scores"),
    Bug("softcap-missing", "softcap-missing", CAP),
    Bug("softcap-after-mask", "softcap-after-mask", {**CAP, **CAUSAL}),
    Bug("causal-one-more", "causal-off-by-one", CAUSAL),
    Bug("causal-one-fewer", "causal-off-by-one", CAUSAL),
    Bug("causal-missing", "causal-missing", CAUSAL),
    Bug("causal-top-left", "causal-top-left", DECODING),
    Bug("causal-bottom-right", "causal-bottom-right", CAUSAL),
    Bug("window-left-wider", "window-off-by-one", WINDOW),
    Bug("window-<", "window-off-by-one", {"window": (4, 4), "skip": ["more queries"]}),
    Bug("window-right-wider", "window-off-by-one", {"window": (None, 2)}),
    Bug("mask-inverted", "mask-inverted"),
    Bug("mask-inverted", "mask-inverted", CAUSAL),
    Bug("mask-ignored", "mask-ignored"),
    Bug("first-mask-for-all"),
    Bug("padding-attended", "padding-attended"),
    Bug("weights-bfloat16", dtype=torch.float32),
    Bug("products-tf32", dtype=torch.float32),
    Bug("weights-8-bit"),
    Bug("gqa-tiled", "gqa-tiled"),
    Bug("gqa-tiled", "gqa-tiled", CAP),
    Bug("value-transposed", "value-transposed"),
    Bug("heads-swapped", "heads-swapped"),
    Bug("strides-ignored"),
    Bug("row-stale"),
    Bug("dq-scale-missing", is_backward=True),
    Bug("delta-missing", is_backward=True),
    Bug("softcap-slope-missing", options=CAP, is_backward=True),
    Bug("last-head-of-group-only", is_backward=True),
)
"""The planted bugs, of authors of attention kernels."""


@pytest.mark.representative
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bug_fails_and_has_its_name(bug: Bug) -> None:
    report = bug.examine()
    assert not report.passed
    assert list(report.diagnosis)[:1] == ([bug.name] if bug.name else [])


@pytest.mark.parametrize("kernel", RIGHT)
def test_kernel_without_a_bug_passes(kernel: Bug) -> None:
    assert kernel.examine().passed


# ---------------------------------------------------------------- the backward pass


def flash_with_backward(*bugs: str) -> Attention:
    """Returns an attention function whose forward pass is right.

    Args:
        *bugs: planted bugs, by the names in `_backward`.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
        output: Tensor = _Flash.apply(query, key, value, bugs, keywords)  # type: ignore[no-untyped-call]
        return output

    return attend


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bugs: tuple[str, ...], keywords: dict[str, Any]
    ) -> Tensor:
        output = flash_kernel()(q, k, v, **keywords)
        ctx.save_for_backward(q, k, v, output)
        ctx.bugs, ctx.keywords = bugs, keywords
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, output = ctx.saved_tensors
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        wide = [x.to(exact) for x in (q, k, v, output, grads[0])]
        found = _backward(ctx.bugs, *wide, **ctx.keywords)
        return *(x.to(q.dtype) for x in found), None, None


def _backward(
    bugs: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, output: Tensor, grad: Tensor,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: bool = False,
    query_offset: Any = 0,
    scale: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of query, key and value."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = capped_scores((), q, keys, v.shape[-1], scale, softcap)
    hidden = hidden_pairs((), scores.shape, mask, key_lengths, causal, query_offset, window)
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
    delta = (grad * output).sum(-1, keepdim=True)
    if "delta-missing" in bugs:
        delta = torch.zeros_like(delta)
    ds = p * (grad @ values.mT - delta)
    if softcap is not None and "softcap-slope-missing" not in bugs:
        ds = ds * (1 - (scores / softcap) ** 2)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    dq = ds @ keys * (1.0 if "dq-scale-missing" in bugs else factor)
    per_head = (ds.mT @ q * factor, p.mT @ grad)
    dk, dv = (x.unflatten(1, (-1, group)) for x in per_head)
    if "last-head-of-group-only" in bugs:
        return dq, dk[:, :, -1], dv[:, :, -1]
    return dq, dk.sum(2), dv.sum(2)
