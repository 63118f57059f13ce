"""Fields of qkv.toml that an attention call alone shows: heads, mask, scale and softcap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

from qkv.models.attention_call import AttentionCall
from qkv.models.describe.rotary_angles import Unfit
from qkv.models.masks import parts_of

SAME: Final = 1e-6
"""Numbers that differ by less, relative to their size, are one: tables of models are float32."""
_DIGITS: Final = 9


def describe_call(call: AttentionCall, factor: float = 1.0) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of an attention call alone, and its parts that no field holds.

    Args:
        call: of a module.
        factor: of the scores, that the module applied in front of the call.
    """
    missing: list[str] = []
    fields: dict[str, Any] = {
        "heads": call.query.shape[1],
        "kv_heads": call.key.shape[1],
        "causal": bool(call.causal),
    }
    with noting(missing):
        fields |= _mask_fields(call)
    if call.softcap is not None:
        fields["softcap"] = float(call.softcap)
    scale = call.scale if abs(factor - 1) <= SAME else rounded(call.scale * factor)
    if abs(scale * call.query.shape[-1] ** 0.5 - 1) > SAME:
        fields["scale"] = scale
    return fields, missing


@contextlib.contextmanager
def noting(missing: list[str]) -> Iterator[None]:
    """Adds a part that no field holds to a list, and goes on."""
    try:
        yield
    except Unfit as unfit:
        missing.append(str(unfit))


def reach_of(call: AttentionCall) -> tuple[int | None, int | None]:
    """Returns how many keys to the left and to the right a query sees; None: all.

    Raises:
        Unfit: causality and a window do not say what it sees.
    """
    parts = parts_of(call)
    if len(parts) != 1 or not parts[0].is_whole(call):
        raise Unfit("a mask that differs between the sequences of a batch")
    (part,) = parts
    if part.mask is not None:
        is_bias = part.mask.dtype != torch.bool
        raise Unfit(
            "a bias of the scores, such as that of relative positions or of ALiBi"
            if is_bias
            else "a mask that causality and a window do not say, such as that of chunks"
        )
    left, right = part.window or (None, None)
    return left, 0 if part.causal else right


def _mask_fields(call: AttentionCall) -> dict[str, Any]:
    left, right = reach_of(call)
    if left is None and right in (None, 0):
        return {"causal": right == 0}
    if left is None or right is None:
        raise Unfit(f"a window of one side: got {left} and {right}")
    return {"causal": right == 0, "window": [left, right]}


def rounded(number: float) -> float:
    """Returns a number with as many digits as the measurement has."""
    return float(f"{number:.{_DIGITS}g}")
