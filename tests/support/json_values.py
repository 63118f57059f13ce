"""Hypothesis strategies for arrays and JSON values."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from support.known_requests import DTYPES, Array

SPECIAL = [0.0, -0.0, 1.0, -1.5, 0.1, np.inf, -np.inf, np.nan, 1e-8, 5e-324, 65504.0, 3e38, 1e308]
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@st.composite
def arrays(draw: st.DrawFn, dtype: str | None = None) -> Array:
    """Draws any bits of any dtype on the wire in any shape, and common numbers."""
    kind = DTYPES[dtype or draw(st.sampled_from(list(DTYPES)))]
    shape = draw(array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))
    shape = shape if int(np.prod(shape)) <= 64 else shape[:3]
    size = int(np.prod(shape))
    if kind == np.dtype(bool):
        return np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool).reshape(
            shape
        )
    if kind != np.dtype("<i8") and draw(st.booleans()):
        numbers = draw(st.lists(st.sampled_from(SPECIAL), min_size=size, max_size=size))
        with np.errstate(over="ignore"):
            return np.array(numbers, np.float64).astype(kind).reshape(shape)
    data = draw(st.binary(min_size=size * kind.itemsize, max_size=size * kind.itemsize))
    return np.frombuffer(data, kind).reshape(shape)


def same_values(one: Array, other: Array) -> bool:
    """Returns True if both are equal, with the signs of zeros; all NaN count as equal."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide, wider = (x if x.dtype.kind in "bi" else x.astype(np.float64) for x in (one, other))
    signs = np.signbit(wide) == np.signbit(wider) if wide.dtype.kind == "f" else np.True_
    return np.array_equal(wide, wider, equal_nan=wide.dtype.kind == "f") and bool(
        np.all(signs | (wide != wide))
    )


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
