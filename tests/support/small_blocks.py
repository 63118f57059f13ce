"""Small blocks: the largest number of elements that the variants hold at once, made smaller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from qkv.attention.common import (
    explicit_outputs,
    fused_kernel,
    gradients,
    summed_calls,
    token_inputs,
)
from qkv.attention.variants import linformer, sigmoid, taylor

# Private names, because a block is no promise: it only bounds the memory. With the real sizes a
# test of several blocks needs tensors of gigabytes. No test sets these names elsewhere.
_SIZES: Final = (
    (explicit_outputs, "_SCORE_ELEMENTS"),
    (fused_kernel, "BIAS_ELEMENTS"),
    (gradients, "_SCORE_ELEMENTS"),
    (gradients, "_WORTH_IT"),
    (token_inputs, "_ELEMENTS"),
    (summed_calls, "_ELEMENTS"),
    (linformer, "_ELEMENTS"),
    (sigmoid, "_SCORE_ELEMENTS"),
    (sigmoid, "_ROW_ELEMENTS"),
    (taylor, "_ELEMENTS"),
)


@contextmanager
def small_blocks(elements: int | None) -> Iterator[None]:
    """Limits each block to this number of elements; None changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in _SIZES if elements is not None else ():
            patch.setattr(module, name, elements)
        yield
