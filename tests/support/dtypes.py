"""The dtypes that every variant takes."""

from __future__ import annotations

from typing import Final

import pytest
import torch

DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of scores, weights and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32
