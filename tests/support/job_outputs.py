"""Comparisons of the outputs of jobs on two devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qkv.jobs.result import Result
from support.known_requests import EPS


def assert_close(got: Sequence[Result], expected: Sequence[Result]) -> None:
    """Asserts equal names, dtypes and shapes, and numbers up to roundings of the largest.

    The same number of jobs must have shared the call.
    """
    for one, other in zip(got, expected, strict=True):
        assert one.outputs.keys() == other.outputs.keys()
        assert one.times.stacked_count == other.times.stacked_count
        for name, raw in one.outputs.items():
            assert (raw.dtype, raw.shape) == (other.outputs[name].dtype, other.outputs[name].shape)
            a, b = (np.asarray(r.numpy(), np.float64) for r in (raw, other.outputs[name]))
            if raw.dtype not in EPS or not a.size:
                assert np.array_equal(a, b), name
                continue
            largest = np.abs(b[np.isfinite(b)]).max(initial=1.0)
            bound = 256 * EPS[raw.dtype] * largest
            np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=name)
