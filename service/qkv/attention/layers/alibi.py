"""ALiBi: attention with linear biases.

Source: Press et al., Train Short, Test Long, arXiv:2108.12409, section 3; the slopes for a number
of heads that is no power of two are those of the authors' code.
"""

from __future__ import annotations

import numpy as np

from qkv.attention.layers.layer_weights import Array


def slopes(heads: int) -> Array:
    """Returns the slope of each head: (H,) in float64, a geometric sequence for powers of two.

    For other numbers, the slopes of the next lower power of two are followed by every second
    slope of the next higher one.
    """
    power = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * (heads - power), 2))
    return np.concatenate([first, between])
