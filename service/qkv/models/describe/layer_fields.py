"""Finds the nearest description of an attention layer: fields of qkv.toml, from runs of its module.

An attention call alone shows heads, mask, scale and softcap. Whatever lies between the projections
and the call is measured. The result is only a candidate: `layer_proof` compares it with the module.

The search of `attention.layers.detection` has no part in it: from an output alone it chooses among
usual numbers, such as three bases of a rotary embedding, while frequencies, windows and softcaps of
a model may be any. It is for modules without a visible call: see `nearest_description`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from qkv.attention.layers import projection
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import SINKS
from qkv.attention.layers.qk_norm import QKNorm, normalize
from qkv.models.attention_call import AttentionCall
from qkv.models.describe.attention_run import AttentionRun
from qkv.models.describe.rotary_angles import Turning, Unfit, are_near, measure
from qkv.models.masks import parts_of

SAME: Final = 1e-6
"""Numbers that differ by less, relative to their size, are one: tables of models are float32."""
_DIGITS: Final = 9
_EPS: Final = ("variance_epsilon", "eps", "epsilon")
_OFFSETS: Final = (0, 1)


def find_nearest(
    layer: Layer, run: AttentionRun, turned: AttentionRun, tables: Sequence[Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of the nearest description of a layer, and its parts that no field holds.

    Args:
        layer: with the numbers of the module, its heads, and no positions.
        run: with tokens at positions 0, 1, 2, ...
        turned: the same one, or one whose positions double, for the rotary embedding.
        tables: numbers of the model that may be the exact frequencies.
    """
    missing: list[str] = []
    fields: dict[str, Any] = {"positions": "none"}
    factor = 1.0
    with noting(missing):
        _check_values(layer, run)
    with noting(missing):
        norm, turnings = _turnings(layer, turned)
        fields |= _positions(turnings, layer.head_width, tables)
        if norm is not None:
            fields["qk_norm"] = {"eps": norm.eps, "offset": norm.offset}
        factor = turnings[0].rest * turnings[1].rest
    if run.call.sinks is not None and SINKS not in layer.weights:
        missing.append("attention sinks that no layout reads")
    of_call, in_call = describe_call(run.call, factor)
    heads = {"heads": layer.heads.query, "kv_heads": layer.heads.key}
    # nothing fits if the projections get others
    missing = list(run.unlike.values())[:1] or [*missing, *in_call]
    return {"layout": layer.layout.name, **of_call, **heads, **fields}, missing


def _projected(layer: Layer, role: str, x_BNM: Tensor) -> Tensor:
    weight = torch.from_numpy(layer.weights[f"{role}.weight"])
    bias = layer.weights.get(f"{role}.bias")
    return projection.split_heads(
        projection.apply(x_BNM, weight, None if bias is None else torch.from_numpy(bias)),
        layer.head_count(role),
    )


def _called(layer: Layer, role: str, call: AttentionCall) -> Tensor:
    """Returns a tensor of a call; its heads are those of the layer.

    Raises:
        Unfit: they are not.
    """
    called: Tensor = getattr(call, role)
    heads = layer.head_count(role)
    if called.shape[1] % heads:
        raise Unfit(f"{called.shape[1]} heads of {role} where the projection has {heads}")
    return called[:, :: called.shape[1] // heads]  # the model may have repeated them


def _check_values(layer: Layer, run: AttentionRun) -> None:
    projected, called = _projected(layer, "value", run.x_BLM), _called(layer, "value", run.call)
    if projected.shape != called.shape or not are_near(projected, called):
        raise Unfit("a norm or another function of values after their projection")


def _turnings(layer: Layer, run: AttentionRun) -> tuple[QKNorm | None, tuple[Turning, Turning]]:
    """Returns the norm of queries and keys, and what turns both.

    Raises:
        Unfit: they are none.
    """
    found: list[tuple[QKNorm | None, tuple[Turning, Turning]]] = []
    problem = Unfit("")
    for norm in _norms(layer, run.module):
        try:
            query, key = (_turning(layer, run, role, norm) for role in ("query", "key"))
        except Unfit as unfit:
            problem = unfit
            continue
        found.append((norm, (query, key)))
    if not found:
        raise problem
    return min(found, key=lambda each: sum(turning.error for turning in each[1]))


def _turning(layer: Layer, run: AttentionRun, role: str, norm: QKNorm | None) -> Turning:
    """Returns what turns queries or keys after their norm.

    Raises:
        Unfit: it is no rotary embedding.
    """
    x_BHND, called_BHND = _projected(layer, role, run.x_BLM), _called(layer, role, run.call)
    weight = layer.weights.get(f"{role}_norm.weight")
    if weight is not None and norm is not None:
        x_BHND = normalize(x_BHND, torch.from_numpy(weight), norm)
    if called_BHND.shape != x_BHND.shape:
        raise Unfit(
            f"{role} of the shape {list(called_BHND.shape)} where the projection gives "
            f"{list(x_BHND.shape)}, such as in latent attention"
        )
    return measure(x_BHND, called_BHND, run.positions)


def _norms(layer: Layer, module: nn.Module) -> Iterator[QKNorm | None]:
    """Yields numbers that the norms of queries and keys may have; None if there is no norm."""
    if not {"query_norm.weight", "key_norm.weight"} & layer.weights.keys():
        yield None
        return
    numbers = (getattr(part, name, None) for part in module.modules() for name in _EPS)
    eps = dict.fromkeys([n for n in numbers if isinstance(n, float) and 0 <= n <= 1] or [1e-6])
    for each, offset in itertools.product(eps, _OFFSETS):
        yield QKNorm(eps=each, offset=1 if offset else 0)


def _positions(
    turnings: tuple[Turning, Turning], width: int, tables: Sequence[Tensor]
) -> dict[str, Any]:
    """Returns the fields of the rotary embedding that turns queries and keys.

    Raises:
        Unfit: they turn differently.
    """
    query, key = turnings
    if query.order is None and key.order is None:
        return {"positions": "none"}
    of_query, of_key = (torch.tensor(t.frequencies, dtype=torch.float64) for t in turnings)
    if (query.order, query.dims) != (key.order, key.dims) or not _are_same(of_query, of_key):
        raise Unfit("different positions of queries and keys")
    same = (t for t in tables if t.shape == of_query.shape and _are_same(t, of_query))
    exact = next(same, of_query).double()
    rope: dict[str, Any] = {"order": query.order}
    if (base := _base_of(exact)) is None:
        rope["frequencies"] = [rounded(float(each)) for each in exact]
    else:
        rope["base"] = base
        if query.dims != width:
            rope["dims"] = query.dims
    amplitude = (query.turned * key.turned / (query.rest * key.rest)) ** 0.5
    if abs(amplitude - 1) > SAME:
        rope["amplitude"] = rounded(amplitude)
    return {"positions": "rotary", "rope": rope}


def _base_of(frequencies_C: Tensor) -> float | None:
    """Returns the base whose powers these frequencies are; None: they are none."""
    C, last = len(frequencies_C), float(frequencies_C[-1])
    if C < 2 or not 0 < last < 1:
        return None
    base = float(f"{last ** (-C / (C - 1)):.6g}")
    powers_C = base ** -(torch.arange(C, dtype=torch.float64) / C)
    ratio_C = frequencies_C / powers_C
    return base if bool(((ratio_C - 1).abs() <= SAME).all()) and base >= 1.0001 else None


def _are_same(one_C: Tensor, other_C: Tensor) -> bool:
    """Returns True if measured frequencies are the same."""
    off_C = (one_C.double() - other_C).abs()
    return bool((off_C <= 1e-8 + 2 * SAME * other_C.abs()).all())


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
