"""Truths of the cases of the oracle, which all tests of a process share: most verify the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
import torch

from qkv.testing import verification
from qkv.testing.call import Call

_CASES: Final = 256  # of about 17 families in 4 dtypes, with gradients or without


def shared(function: Callable[..., Any]) -> Callable[[Call, bool], Any]:
    """Returns a function of a call and of whether its gradients count that remembers its results.

    Calls are the same if all their numbers, their variant and their parameters are.
    """
    asked: dict[Any, Call] = {}

    @functools.lru_cache(_CASES)
    def found(key: Any) -> Any:
        return function(asked[key], key[0])

    def remembered(call: Call, gradients: bool = False) -> Any:
        described = call.variant.name, call.dtype, repr(call.parsed), call.flags
        key = (gradients, *described, *_numbers(call))
        asked[key] = call
        try:
            return found(key)
        finally:
            del asked[key]

    return remembered


def _numbers(call: Call) -> Iterator[Any]:
    tensors = {**call.inputs, "grad_output": call.grad_output}
    for name, x in tensors.items():
        if x is not None:
            bits = x.contiguous().view(torch.uint8) if x.numel() else x
            yield name, x.dtype, x.shape, np.asarray(bits).tobytes()


_SHARED: Final = {
    name: shared(getattr(verification, name)) for name in ("find_truth", "run_torch_kernel")
}


@pytest.fixture(autouse=True, scope="module")
def shared_truths() -> Iterator[None]:
    """Computes the truth of each case once for all files of a process that import this."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in _SHARED.items():
            patch.setattr(verification, name, function)
        yield
