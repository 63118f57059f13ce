"""Bugs that authors of attention kernels make, planted in the kernels of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from qkv.testing import Report, verify
from support.flash_gradients import flash_with_backward
from support.flash_kernel import flash_kernel


class Bug(NamedTuple):
    """A planted bug.

    Attributes:
        switch: its name in the kernels; "": none.
        name: the name that a right diagnosis states; "": no known bug is this one.
        options: parameters of softmax.
        is_strict: True if the oracle runs its strict families.
        is_backward: True if the bug is in the backward pass.
        dtype: of the inputs.
        sums: dtype of the sums; None: float32.
    """

    switch: str
    name: str = ""
    options: Mapping[str, Any] = {}
    is_strict: bool = False
    is_backward: bool = False
    dtype: torch.dtype = torch.float16
    sums: torch.dtype | None = None

    def __str__(self) -> str:
        return self.switch or f"sums in {self.sums}, {self.dtype}"

    def examine(self) -> Report:
        """Returns the oracle's report on the kernel with the bug."""
        switches = (self.switch,) if self.switch else ()
        return verify(
            flash_with_backward(*switches)
            if self.is_backward
            else flash_kernel(*switches, sums=self.sums),
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
LOW: Final = "low-precision-accumulation"

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
    Bug("scale-1/D", "scale-wrong"),
    Bug("exp2-of-natural-scores"),
    Bug("softcap-missing", "softcap-missing", CAP),
    Bug("softcap-after-mask", "softcap-after-mask", {**CAP, **CAUSAL}),
    Bug("causal-one-more", "causal-off-by-one", CAUSAL),
    Bug("causal-top-left", "causal-top-left", DECODING),
    Bug("window-left-wider", "window-off-by-one", WINDOW),
    Bug("mask-inverted", "mask-inverted"),
    Bug("first-mask-for-all"),
    Bug("padding-attended", "padding-attended"),
    Bug("", LOW, sums=torch.float16),
    Bug("", LOW, dtype=torch.bfloat16,
        sums=torch.bfloat16),
    Bug("", LOW, dtype=torch.float32,
        sums=torch.float16),
    Bug("weights-bfloat16", dtype=torch.float32),
    Bug("products-tf32", dtype=torch.float32),
    Bug("weights-8-bit"),
    Bug("gqa-tiled", "gqa-tiled"),
    Bug("value-transposed", "value-transposed"),
    Bug("heads-swapped", "heads-swapped"),
    Bug("strides-ignored"),
    Bug("row-stale"),
    Bug("dq-scale-missing", is_backward=True),
    Bug("delta-missing", is_backward=True),
    Bug("softcap-slope-missing", options=CAP,
        is_backward=True),
    Bug("last-head-of-group-only", is_backward=True),
)  # fmt: skip
"""The planted bugs."""
