"""Rotary position embedding: pairs of channels turn by an angle that grows with the position.

Source: Su et al., RoFormer, arXiv:2104.09864, section 3.2.2. The scalings have the names and
numbers of `rope_scaling` in the configurations of transformers (modeling_rope_utils.py).
"""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal

import numpy as np
import pydantic
import torch
from torch import Tensor

from qkv.attention.layers.layer_weights import Array

_CONFIG: Final = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)
_Positive = Annotated[float, pydantic.Field(ge=1e-6, le=1e12)]


class RopeScaling(pydantic.BaseModel):
    """A change of the frequencies for longer sequences than those of the training."""

    model_config = _CONFIG

    rope_type: Annotated[
        Literal["linear", "llama3", "yarn"],
        pydantic.Field(
            description="linear: all frequencies divided by `factor`. llama3: the low ones only, "
            "as in Llama 3.1. yarn: by a ramp (Peng et al., arXiv:2309.00071)."
        ),
    ]
    factor: Annotated[_Positive, pydantic.Field(description="The divisor of the frequencies.")]
    low_freq_factor: Annotated[
        _Positive,
        pydantic.Field(
            description="llama3: wavelengths above the original length by this divisor are scaled."
        ),
    ] = 1.0
    high_freq_factor: Annotated[
        _Positive,
        pydantic.Field(
            description="llama3: wavelengths below the original length by this divisor are kept."
        ),
    ] = 4.0
    original_max_position_embeddings: Annotated[
        Annotated[int, pydantic.Field(ge=1, lt=2**31)],
        pydantic.Field(description="llama3 and yarn: the length of the training."),
    ] = 8192
    beta_fast: Annotated[
        _Positive,
        pydantic.Field(description="yarn: frequencies with more turns in that length are kept."),
    ] = 32.0
    beta_slow: Annotated[
        _Positive,
        pydantic.Field(description="yarn: frequencies with fewer turns are divided by `factor`."),
    ] = 1.0
    truncate: Annotated[
        bool,
        pydantic.Field(
            description="yarn: rounds the ends of the ramp to whole pairs; false in gpt-oss."
        ),
    ] = True
    attention_factor: Annotated[
        _Positive | None,
        pydantic.Field(
            description="yarn: factor of the rotated channels. By default 0.1 ln(factor) + 1."
        ),
    ] = None

    def scaled(self, frequencies: Array, base: float, dims: int) -> Array:
        """Returns the scaled frequencies, in radians per position."""
        if self.rope_type == "linear":
            return frequencies / self.factor
        length = self.original_max_position_embeddings
        if self.rope_type == "llama3":
            turns = length * frequencies / (2 * math.pi)
            span = self.high_freq_factor - self.low_freq_factor
            kept = np.clip((turns - self.low_freq_factor) / (span or 1e-12), 0, 1)
        else:
            low, high = (
                dims * math.log(length / (beta * 2 * math.pi)) / (2 * math.log(base))
                for beta in (self.beta_fast, self.beta_slow)
            )
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dims - 1)
            span = high - low if high != low else 0.001
            kept = 1 - np.clip((np.arange(dims // 2) - low) / span, 0, 1)
        return frequencies * kept + frequencies / self.factor * (1 - kept)

    @property
    def amplitude(self) -> float:
        """The factor of the rotated channels."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0


class Rope(pydantic.BaseModel):
    """A rotary position embedding of queries and keys."""

    model_config = _CONFIG

    base: Annotated[
        _Positive,
        pydantic.Field(ge=1.0001, description="The base of the wavelengths (rope_theta)."),
    ] = 10000.0
    order: Annotated[
        Literal["half", "interleaved"] | None,
        pydantic.Field(
            description="half: channel i turns with channel i + dims / 2, as in Hugging Face's "
            "models. interleaved: channel 2 i turns with 2 i + 1, as in Meta's. By default that "
            "of the layout, else half."
        ),
    ] = None
    dims: Annotated[
        Annotated[int, pydantic.Field(ge=2, le=65536, multiple_of=2)] | None,
        pydantic.Field(
            description="The number of leading channels of a head that turn. By default all."
        ),
    ] = None
    scaling: RopeScaling | None = None
    frequencies: Annotated[
        Annotated[
            tuple[Annotated[float, pydantic.Field(ge=-1e3, le=1e3)], ...],
            pydantic.Strict(False),  # JSON and TOML have lists
            pydantic.Field(min_length=1, max_length=32768),
        ]
        | None,
        pydantic.Field(
            description="Radians per position of each pair of channels, in place of base, dims and "
            "scaling: any scaling at a fixed length is such a list."
        ),
    ] = None
    amplitude: Annotated[
        _Positive | None,
        pydantic.Field(
            description="Factor of the channels that turn. By default that of the scaling, else 1."
        ),
    ] = None

    def turning_channels(self, width: int) -> int:
        """Returns the number of channels of a head of this width that turn."""
        return self.dims or width if self.frequencies is None else 2 * len(self.frequencies)

    def radians(self, width: int) -> Array:
        """Returns radians per position of each pair: (dims / 2,) in float64.

        Args:
            width: of a head.
        """
        if self.frequencies is not None:
            return np.array(self.frequencies)
        dims = self.turning_channels(width)
        frequencies = self.base ** -(np.arange(0, dims, 2, dtype=np.float64) / dims)
        return (
            frequencies
            if self.scaling is None
            else self.scaling.scaled(frequencies, self.base, dims)
        )

    @property
    def factor(self) -> float:
        """The factor of the rotated channels."""
        of_scaling = 1.0 if self.scaling is None else self.scaling.amplitude
        return of_scaling if self.amplitude is None else self.amplitude


def rotate(
    x_BHND: Tensor,
    frequencies_C: Tensor,
    positions: Tensor,
    order: str,
    amplitude: float = 1.0,
    *,
    inverse: bool = False,
) -> Tensor:
    """Returns x with its first 2 C channels rotated.

    Args:
        x_BHND: queries or keys.
        frequencies_C: radians per position of each pair, float64.
        positions: of the rows, float64: (N) or (B, 1, N).
        order: "half" or "interleaved".
        amplitude: factor of the rotated channels.
        inverse: rotates back by the transposed matrix, as gradients need it.
    """
    dtype = torch.promote_types(x_BHND.dtype, torch.float32)
    angles_NC = positions[..., None] * frequencies_C
    cos_NC, sin_NC = ((f(angles_NC) * amplitude).to(dtype) for f in (torch.cos, torch.sin))
    if inverse:
        sin_NC = -sin_NC
    dims = 2 * frequencies_C.shape[-1]
    turned, rest = x_BHND[..., :dims].to(dtype), x_BHND[..., dims:]
    if order == "half":
        first, second = turned.chunk(2, dim=-1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    parts = first * cos_NC - second * sin_NC, second * cos_NC + first * sin_NC
    result = torch.cat(parts, -1) if order == "half" else torch.stack(parts, -1).flatten(-2)
    return torch.cat([result.to(x_BHND.dtype), rest], dim=-1)


def reordered(array: Array, heads: int, dims: int | None, order: str) -> Array:
    """Returns the columns of a projection's weight, or a bias, in another rotary order.

    Args:
        array: weight (in, heads * D), bias (heads * D), or norm (heads * D).
        heads: the heads in its last axis.
        dims: channels of a head that turn; None: all.
        order: the target order; the array has the other one.
    """
    split = array.reshape(*array.shape[:-1], heads, -1)
    dims = dims or split.shape[-1]
    pairs = np.arange(dims).reshape(2, -1).T.reshape(-1)  # 0, d/2, 1, d/2 + 1, ...
    if order == "half":
        pairs = np.argsort(pairs)
    index = np.concatenate([pairs, np.arange(dims, split.shape[-1])])
    return split[..., index].reshape(array.shape)
