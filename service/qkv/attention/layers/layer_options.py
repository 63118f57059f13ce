"""The fields of a layer in a request that are not tensors."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import pydantic

from qkv.attention.layers.qk_norm import QKNorm
from qkv.attention.layers.rope import Rope, RopeScaling

MAX_HEADS: Final = 65536
"""Most query heads of a layer."""

NESTED_FIELDS: Final = frozenset(
    name for model in (Rope, RopeScaling, QKNorm) for name in model.model_fields
)
"""The names of the fields of objects in a layer."""

_Heads = Annotated[int, pydantic.Field(ge=1, le=MAX_HEADS)]


class LayerOptions(pydantic.BaseModel):
    """A layer's layout, heads and positions."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    layout: Annotated[
        str,
        pydantic.Field(
            description='The weight layout. "auto" is the one that names and shapes show.'
        ),
    ]
    heads: Annotated[
        _Heads | None,
        pydantic.Field(
            description="The number of query heads. By default one head, and no head axis in the "
            "response."
        ),
    ] = None
    kv_heads: Annotated[
        _Heads | None,
        pydantic.Field(
            description="The number of key heads, a divisor of `heads`. By default that which the "
            "widths of the matrices give, else `heads`."
        ),
    ] = None
    prefix: Annotated[
        str | None,
        pydantic.Field(
            max_length=1024,
            description="The part of the names before those of the layout, such as "
            "`model.layers.0.self_attn`. By default that of the only layer among the tensors.",
        ),
    ] = None
    rope: Annotated[
        Rope | None,
        pydantic.Field(description="A rotary embedding of queries and keys. By default none."),
    ] = None
    qk_norm: Annotated[
        QKNorm,
        pydantic.Field(
            description="Numbers of the norm whose weights are the tensors `q_norm.weight` and "
            "`k_norm.weight`."
        ),
    ] = QKNorm()
    input: Annotated[
        Literal["attention", "residual"],
        pydantic.Field(
            description='"residual" applies the norm of a loaded layer\'s checkpoint to `x` first. '
            'With "attention", x is what the attention module receives.'
        ),
    ] = "attention"
    alibi: Annotated[
        bool | Literal["scaled"],
        pydantic.Field(
            description="Adds ALiBi's biases to the scores, with the slopes of its paper. "
            '"scaled" adds them before the scores are divided by sqrt(D), as Falcon does.'
        ),
    ] = False
    softcap: Annotated[
        Any, pydantic.Field(description="The parameter `softcap` of the variant.")
    ] = None
    window: Annotated[Any, pydantic.Field(description="The parameter `window` of the variant.")] = (
        None
    )

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the variant that belong to the layer."""
        options = {"softcap": self.softcap, "window": self.window}
        return {name: value for name, value in options.items() if value is not None}
