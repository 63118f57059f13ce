"""Finds the description of an attention layer: fields of qkv.toml, from one run of its module.

Whatever lies between the projections and the captured attention call is measured. What is found is
only a candidate: `layer_proof` compares it with the module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from qkv.attention.layers import projection
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import SINKS
from qkv.attention.layers.qk_norm import QKNorm, normalize
from qkv.models.attention_call import AttentionCall
from qkv.models.describe.layer_record import LayerRecord
from qkv.models.describe.rotary_angles import TOLERANCE, Turning, Unfit, measure
from qkv.models.masks import parts_of

_EPS: Final = ("variance_epsilon", "eps", "epsilon")
_SAME: Final = 1e-6  # relative: float32 of the model's tables
_DIGITS: Final = 9
_OFFSETS: Final = (0, 1)


class Run(NamedTuple):
    """A run of a layer's module.

    Attributes:
        record: what was recorded.
        positions: of its tokens.
    """

    record: LayerRecord
    positions: Sequence[int]

    @property
    def call(self) -> AttentionCall:
        """The captured attention call.

        Raises:
            Unfit: there is none.
        """
        if self.record.call is None:
            raise Unfit(f"no attention call that was captured: {self.record.missed}")
        return self.record.call

    @property
    def x(self) -> Tensor:
        """The embeddings (B, L, M) that the module receives.

        Raises:
            Unfit: it receives no such tensor.
        """
        x, call = self.record.x, self.call
        shape = (len(call.query), call.query.shape[2])
        if x is not None and x.dim() == 2 and shape[0] == 1:
            x = x[None]
        if x is None or x.dim() != 3 or tuple(x.shape[:2]) != shape:
            got = "nothing" if x is None else list(x.shape)
            raise Unfit(f"an input of other axes than (B, L, M): got {got}")
        return x


def find_fields(
    layer: Layer,
    names: Mapping[str, str],
    module: nn.Module,
    near: Run,
    far: Run | None,
    tables: Sequence[Tensor],
) -> dict[str, Any]:
    """Returns the fields of a layer.

    Args:
        layer: with the numbers of the module, its heads, and no positions.
        names: of its tensors inside the module.
        module: the real one.
        near: a run with tokens at positions 0, 1, 2, ...
        far: one whose positions double, for the rotary embedding; None: the model takes none.
        tables: numbers of the model that may be the exact frequencies.

    Raises:
        Unfit: the layer has a part that no description holds.
    """
    _check_inputs(layer, names, near)
    call = near.call
    _check_values(layer, near)
    norm, turnings = _turnings(layer, module, far or near)
    fields: dict[str, Any] = {
        "layout": layer.layout.name,
        "heads": layer.heads.query,
        "kv_heads": layer.heads.key,
        **_mask_fields(call),
        **_positions(turnings, layer.head_width, tables),
    }
    if norm is not None:
        fields["qk_norm"] = {"eps": norm.eps, "offset": norm.offset}
    if call.softcap is not None:
        fields["softcap"] = float(call.softcap)
    if call.sinks is not None and SINKS not in layer.weights:
        raise Unfit("attention sinks that no layout reads")
    query, key = turnings
    factor = query.rest * key.rest
    scale = call.scale if abs(factor - 1) <= _SAME else _rounded(call.scale * factor)
    if abs(scale * layer.head_width**0.5 - 1) > _SAME:
        fields["scale"] = scale
    return fields


def window_of(call: AttentionCall) -> tuple[int | None, int | None]:
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
    left, right = window_of(call)
    fields: dict[str, Any] = {"causal": right == 0}
    if left is not None or right not in (None, 0):
        if left is None or right is None:
            raise Unfit(f"a window of one side: got {left} and {right}")
        fields["window"] = [left, right]
    return fields


def _check_inputs(layer: Layer, names: Mapping[str, str], run: Run) -> None:
    """Checks that the projections receive what the module receives."""
    whole = run.x
    others = [t for t in (*run.record.args, *run.record.kwargs.values()) if t is not run.record.x]
    output = names[layer.name_of("output.weight")] if "output.weight" in layer.weights else ""
    for name, x in run.record.inputs.items():
        if output.startswith(f"{name}.") or "norm" in name or not isinstance(x, Tensor):
            continue
        if x.numel() != whole.numel() or any(x is other for other in others):
            raise Unfit(f"keys of other embeddings than those of the queries, at {name}")
        if not _are_near(x.reshape(whole.shape), whole):
            raise Unfit(f"a norm or another function in front of the projection {name}")


def _projected(layer: Layer, role: str, x_BNM: Tensor) -> Tensor:
    weight = torch.from_numpy(layer.weights[f"{role}.weight"].copy())
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
    if called.shape[1] != heads and called.shape[1] % heads == 0:  # the model has repeated them
        called = called[:, :: called.shape[1] // heads]
    if called.shape[1] != heads:
        raise Unfit(f"{called.shape[1]} heads of {role} where the projection has {heads}")
    return called


def _check_values(layer: Layer, run: Run) -> None:
    projected, called = _projected(layer, "value", run.x), _called(layer, "value", run.call)
    if projected.shape != called.shape or not _are_near(projected, called):
        raise Unfit("a norm or another function of values after their projection")


def _turnings(
    layer: Layer, module: nn.Module, run: Run
) -> tuple[QKNorm | None, tuple[Turning, Turning]]:
    """Returns the norm of queries and keys, and what turns both.

    Raises:
        Unfit: they are none.
    """
    call, problem = run.call, Unfit("")
    found: list[tuple[float, QKNorm | None, tuple[Turning, Turning]]] = []
    projected = {role: _projected(layer, role, run.x) for role in ("query", "key")}
    for norm in _norms(layer, module):
        turnings = []
        try:
            for role, x_BHND in projected.items():
                weight = layer.weights.get(f"{role}_norm.weight")
                if weight is not None and norm is not None:
                    x_BHND = normalize(x_BHND, torch.from_numpy(weight.copy()), norm)
                called_BHND = _called(layer, role, call)
                if called_BHND.shape != x_BHND.shape:
                    raise Unfit(
                        f"{role} of the shape {list(called_BHND.shape)} where the projection gives "
                        f"{list(x_BHND.shape)}, such as in latent attention"
                    )
                turnings.append(measure(x_BHND, called_BHND, run.positions))
        except Unfit as error:
            problem = error
            continue
        query, key = turnings
        found.append((query.error + key.error, norm, (query, key)))
    if not found:
        raise problem
    _, norm, turned = min(found, key=lambda each: each[0])
    return norm, turned


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
    exact = _exact(of_query, tables)
    rope: dict[str, Any] = {"order": query.order}
    base = _base_of(exact)
    if base is None:
        rope["frequencies"] = [_rounded(float(each)) for each in exact]
    else:
        rope["base"] = base
        if query.dims != width:
            rope["dims"] = query.dims
    amplitude = (query.turned * key.turned / (query.rest * key.rest)) ** 0.5
    if abs(amplitude - 1) > _SAME:
        rope["amplitude"] = _rounded(amplitude)
    return {"positions": "rotary", "rope": rope}


def _exact(frequencies_C: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """Returns a table of the model that has these frequencies, or they themselves."""
    for table in tables:
        if table.shape == frequencies_C.shape and _are_same(table, frequencies_C):
            return table.double()
    return frequencies_C


def _base_of(frequencies_C: Tensor) -> float | None:
    """Returns the base whose powers these frequencies are; None: they are none."""
    C, last = len(frequencies_C), float(frequencies_C[-1])
    if C < 2 or not 0 < last < 1:
        return None
    base = float(f"{last ** (-C / (C - 1)):.6g}")
    powers_C = base ** -(torch.arange(C, dtype=torch.float64) / C)
    ratio_C = frequencies_C / powers_C
    return base if bool(((ratio_C - 1).abs() <= _SAME).all()) and base >= 1.0001 else None


def _are_same(one_C: Tensor, other_C: Tensor) -> bool:
    """Returns True if measured frequencies are the same."""
    off_C = (one_C.double() - other_C).abs()
    return bool((off_C <= 1e-8 + 2 * _SAME * other_C.abs()).all())


def _are_near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * other.abs().max())


def _rounded(number: float) -> float:
    """Returns a number with as many digits as the measurement has."""
    return float(f"{number:.{_DIGITS}g}")
