"""Planted bugs of bench/oracle_gallery.py: bugs that authors of attention kernels make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from support.flash_gradients import flash_with_backward
from support.flash_kernel import Attention, flash_kernel

__all__ = ["BUGS", "RIGHT", "Bug"]


class Bug(NamedTuple):
    """A planted bug.

    Attributes:
        text: the bug in words.
        switch: its name in tests/support.
        options: parameters of softmax, of the typical test and of the oracle.
        inputs: `mask` or `key_lengths` if the typical test sends them, else "".
        sizes: of the typical test, that differ from the usual ones.
        is_strict: True if the oracle runs its strict families.
        is_backward: True if the bug is in the backward pass.
        dtype: of the typical test and of the oracle.
        sums: dtype of the sums; None: float32.
        name: the name that a right diagnosis states; "": no known bug is this one.
    """

    text: str
    switch: str
    name: str = ""
    options: Mapping[str, Any] = {}
    inputs: str = ""
    sizes: Mapping[str, int] = {}
    is_strict: bool = False
    is_backward: bool = False
    dtype: torch.dtype = torch.float16
    sums: torch.dtype | None = None

    @property
    def planted(self) -> tuple[str, ...]:
        """The switches of the kernel: none for a dtype of the sums, and for the right kernel."""
        return () if self.sums is not None or not self.switch else (self.switch,)

    def kernel(self, block: int) -> Attention:
        """Returns the kernel with the bug; `block` is the number of keys in a block."""
        if self.is_backward:
            return flash_with_backward(*self.planted)
        return flash_kernel(*self.planted, block=block, sums=self.sums)


CAUSAL: Final = {"causal": True}
DECODING: Final = {"causal": True, "query_offset": "end"}
WINDOW: Final = {"window": (15, 0)}
CAP: Final = {"softcap": 50.0}
LOW: Final = "low-precision-accumulation"

RIGHT: Final = (
    Bug("none: the right kernel", ""),
    Bug("none: the right kernel with its backward pass", "", is_backward=True),
)
"""The kernels without a bug."""

BUGS: Final = (
    Bug("output not rescaled when the maximum grows", "output-not-rescaled"),
    Bug("sum not rescaled when the maximum grows", "sum-not-rescaled"),
    Bug("no maximum subtracted", "max-not-subtracted", "max-not-subtracted"),
    Bug("running maximum starts at 0", "max-starts-at-0", options=CAUSAL),
    Bug("maximum over hidden keys too", "mask-after-max", options=CAUSAL),
    Bug("last block of keys dropped if it is not full", "last-block-dropped"),
    Bug("zero keys that fill the last block counted", "zero-keys-counted"),
    Bug("last block of queries not written if it is not full", "last-rows-not-written"),
    Bug("NaN from a block whose keys are all hidden", "nan-from-hidden-block", options=WINDOW),
    Bug("NaN from a row whose keys are all hidden", "nan-from-masked-row", "nan-from-masked-row",
        inputs="mask", is_strict=True),
    Bug("not divided by the sum", "normalizer-missing", "normalizer-missing"),
    Bug("scale missing", "scale-missing", "scale-missing"),
    Bug("scale applied twice", "scale-1/D", "scale-wrong"),
    Bug("exp2 of scores without the factor log2(e)", "exp2-of-natural-scores"),
    Bug("softcap missing", "softcap-missing", "softcap-missing", CAP),
    Bug("softcap after the mask", "softcap-after-mask", "softcap-after-mask", {**CAP, **CAUSAL}),
    Bug("causal: one key too many", "causal-one-more", "causal-off-by-one", CAUSAL),
    Bug("causal: aligned to the wrong corner", "causal-top-left", "causal-top-left", DECODING,
        sizes={"L": 256}),
    Bug("window one key wider", "window-left-wider", "window-off-by-one", WINDOW),
    Bug("mask inverted", "mask-inverted", "mask-inverted", inputs="mask"),
    Bug("mask of the first item used for all items", "first-mask-for-all", inputs="mask"),
    Bug("key_lengths ignored", "padding-attended", "padding-attended", inputs="key_lengths"),
    Bug("sums in float16", "sums=torch.float16", LOW, sums=torch.float16),
    Bug("sums in bfloat16", "sums=torch.bfloat16", LOW, dtype=torch.bfloat16,
        sums=torch.bfloat16),
    Bug("sums in float16, float32 inputs", "sums=torch.float16", LOW, dtype=torch.float32,
        sums=torch.float16),
    Bug("weights rounded to bfloat16, float32 inputs", "weights-bfloat16", dtype=torch.float32),
    Bug("products in TF32, float32 inputs", "products-tf32", dtype=torch.float32),
    Bug("weights rounded to 8 bits", "weights-8-bit"),
    Bug("query head h reads key head h mod G", "gqa-tiled", "gqa-tiled", sizes={"G": 2}),
    Bug("values read transposed", "value-transposed", "value-transposed"),
    Bug("heads and positions exchanged", "heads-swapped", "heads-swapped"),
    Bug("strides of the inputs ignored", "strides-ignored"),
    Bug("one row has the result of the row before it", "row-stale"),
    Bug("backward: dQ not scaled", "dq-scale-missing", is_backward=True),
    Bug("backward: rowsum(dO O) not subtracted", "delta-missing", is_backward=True),
    Bug("backward: slope of the softcap missing", "softcap-slope-missing", options=CAP,
        is_backward=True),
    Bug("backward: dK and dV of the last head of a group only", "last-head-of-group-only",
        sizes={"G": 2}, is_backward=True),
)  # fmt: skip
"""The planted bugs."""
