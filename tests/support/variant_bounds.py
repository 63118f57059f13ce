"""Bounds of the error of each variant's outputs, from the number of roundings of its formula.

eps is twice a rounding, so that half of each bound is for the reference, which rounds in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from qkv.attention.variants import gated, mean, taylor
from support.dtypes import exact_dtype
from support.head_terms import alibi
from support.linformer_reference import random_projection
from support.references import reference_of
from support.tolerances import bounds as softmax_bounds

Tensors = Mapping[str, Tensor]
Parameters = Mapping[str, Any]
EPS: Final = torch.finfo(torch.float64).eps
NARROW_EPS: Final = torch.finfo(torch.float32).eps


def bounds_of(name: str, tensors: Tensors, parameters: Parameters, truth: Any) -> dict[str, Tensor]:
    """Returns the largest error of the outputs by name, for finite tensors.

    A variant without an entry gets the bound of `qkv check-variant`: a sum of n products is off
    by n roundings of its largest term at most.
    """
    if name in BOUNDS:
        return BOUNDS[name](tensors, parameters, truth)
    floating = [t for t in tensors.values() if t.is_floating_point()]
    terms = sum(size for t in floating for size in t.shape[2:])
    largest = max(float(t.abs().max()) for t in (truth.output, *floating))
    bound = terms * torch.finfo(floating[0].dtype).eps * largest
    return {"output": torch.full_like(truth.output, bound, dtype=torch.float64)}


def is_near(found: Tensor, truth: Tensor, bound: Tensor) -> bool:
    """Returns True if no element is NaN, and each is equal to the truth or within the bound.

    Where the truth is close to the largest number of the dtype, or beyond it, any size is right.
    """
    one, other = found.double(), truth.double()
    within = (one - other).abs() <= bound
    if bool(within.all()):
        return True
    beyond = ~other.isinf() & (other.abs() >= 0.99 * torch.finfo(found.dtype).max)
    right = (one == other) | within | beyond
    return bool((right & ~one.isnan()).all())


def mean_roundings(S: int, causal: bool = True, method: str = "cumsum") -> int:
    """Returns the largest number of roundings of the scores' dtype in an average.

    Causal: the sum within a chunk, the sum before it, their sum, and the quotient. Not causal: 16
    rows of a block are added, then 16 such sums and so on, beside 3 others; then the sum of blocks
    and the quotient.
    """
    if method != "cumsum":
        return 1
    rows = min(S, mean._BLOCK)  # a private name: the order of a sum is no promise, its bound is
    levels = max(1, math.ceil(math.log(rows, 16)))
    return 4 if causal else min(rows - 1, 16 * levels + 3) + 2


def efficient_roundings(query: Tensor, key: Tensor) -> float:
    """Returns the bound of a weight's error in eps.

    The e^x of query and of key each have an error of |x| eps, where x is the largest relevant
    difference of numbers. The sums over D and S add as many roundings as they have terms.
    """
    D, S = query.shape[-1], key.shape[2]

    def apart(x: Tensor, dim: int) -> float:
        # numbers further below the largest are 0 in float32, or e^-700 in float64
        end = 700.0 if x.dtype == torch.float64 else 100.0
        x = x.double().clamp(-1e300, 1e300)
        return min(end, float((x.amax(dim) - x.amin(dim)).max()))

    return 8 + 2 * D + 2 * S + apart(query, -1) + 2 * apart(key, 2)


def _mean(tensors: Tensors, parameters: Parameters, truth: Any) -> dict[str, Tensor]:
    value = tensors["value_BHSE"]
    narrow, exact = torch.finfo(value.dtype), torch.finfo(exact_dtype(value.dtype))
    mass = truth.weights @ value.double().abs()
    own = {name: parameters[name] for name in ("causal", "method") if name in parameters}
    roundings = mean_roundings(value.shape[2], **own) * exact.eps / 2 + (value.shape[2] + 2) * EPS
    output = narrow.eps / 2 * truth.output.abs() + narrow.smallest_normal * narrow.eps
    return {"output": output + roundings * mass, "weights": exact.eps * truth.weights}


def _linear(tensors: Tensors, parameters: Parameters, truth: Any) -> dict[str, Tensor]:
    """The features of both, the product, the sum over keys and the division are rounded.

    So is the exponent of a weight, in float64, where the features are powers of differences of
    logarithms: its rounding is in proportion to its size.
    """
    query, key, value = _query_key_value(tensors)
    narrow, exact = (torch.finfo(d) for d in (query.dtype, exact_dtype(query.dtype)))
    close = (8 + 2 * query.shape[3] + key.shape[2]) * exact.eps
    exponent = truth.weights.double().log().abs().nan_to_num(posinf=0.0)  # of a weight of 0: none
    weights = (close + 2 * EPS * exponent) * truth.weights
    output = weights.double() @ value.double().abs()
    return {
        "output": output + narrow.eps * truth.output.abs() + narrow.smallest_normal,
        "weights": weights + exact.smallest_normal,
    }


def _efficient(tensors: Tensors, parameters: Parameters, truth: Any) -> dict[str, Tensor]:
    query, key, value = _query_key_value(tensors)
    narrow, exact = (torch.finfo(d) for d in (query.dtype, exact_dtype(query.dtype)))
    close = efficient_roundings(query, key) * exact.eps
    mass = truth.weights @ value.double().abs()
    # in float64, a shift of up to 300 raises the smallest number that does not underflow
    lost = math.exp(300.0) if query.dtype == torch.float64 else 1.0
    return {
        "output": close * mass + narrow.eps * truth.output.abs() + narrow.smallest_normal,
        "weights": close * truth.weights + exact.smallest_normal * query.shape[-1] * lost,
    }


def _taylor(tensors: Tensors, parameters: Parameters, truth: Any) -> dict[str, Tensor]:
    """Roundings grow by n over the denominator d.

    They are those of float64 in weights. In outputs of narrower inputs they are those of float32,
    except for items with a row of d < n / 8.
    """
    query, key, value = _query_key_value(tensors)
    narrow, exact = (torch.finfo(d) for d in (query.dtype, exact_dtype(query.dtype)))
    seen = _visible(truth.weights.shape, tensors, parameters)
    n = seen.sum(-1, keepdim=True)
    q, k = (torch.nn.functional.normalize(x.double(), dim=-1, eps=0) for x in (query, key))
    cosines = q.nan_to_num(0.0) @ k.nan_to_num(0.0).mT
    d = torch.where(seen, 1 + cosines, 0).sum(-1, keepdim=True)
    roundings = 8 + 2 * query.shape[3] + key.shape[2]
    grown = roundings * EPS / d.clamp(min=EPS)
    output = grown * (seen.double() @ value.double().abs() + n * truth.output.abs())
    if value.dtype != torch.float64:
        # where the denominator is close to n / 8, its rounding decides; a private name, because
        # this limit is no promise
        wide = (d < (taylor._NARROW - roundings * NARROW_EPS) * n).flatten(1).any(1)
        output = output * torch.where(wide, 1.0, NARROW_EPS / EPS)[:, None, None, None]
    return {
        "output": output + narrow.eps * truth.output.abs() + narrow.smallest_normal,
        "weights": grown * (1 + n * truth.weights) + exact.eps * truth.weights,
    }


def _sigmoid(tensors: Tensors, parameters: Parameters, truth: Any) -> dict[str, Tensor]:
    """A score has D + 8 roundings of its products, and 4 of each of its terms.

    The sigmoid's slope is below the weight A and below 1 - A, so a weight has these errors relative
    to the smaller one, and 8 roundings. An output has S more, and is rounded to its dtype.
    """
    query, key, value = _query_key_value(tensors)
    narrow, exact = (torch.finfo(d) for d in (query.dtype, exact_dtype(query.dtype)))
    (L, D), S, value = query.shape[2:], key.shape[2], value.double().abs()
    scale = parameters.get("scale")
    scale = D**-0.5 if scale is None else scale
    score = (D + 8) * exact.eps * abs(scale) * query.double().abs() @ key.double().abs().mT
    terms = [torch.tensor(parameters.get("bias") or 0.0, dtype=torch.float64)]
    if (mask := tensors.get("mask_BHLS")) is not None and mask.is_floating_point():
        terms.append(mask.double().nan_to_num(neginf=0.0))
    if (slopes := tensors.get("alibi_slopes_H")) is not None:
        offset = parameters.get("query_offset", 0)
        terms += 2 * [alibi(slopes, L, S, offset, tensors.get("key_lengths_B"))]
    for term in terms:
        score = score + 2 * exact.eps * term.abs()
    size = truth.scores.nan_to_num(neginf=0.0).abs() + math.log(S + 1)
    score = score + (8 if parameters.get("softcap") else 4) * exact.eps * size
    least = torch.minimum(truth.weights, torch.sigmoid(-truth.scores))
    weight = least * (torch.expm1(score) + score).clamp(max=1e300)  # an infinity times 0 is NaN
    weight = (weight + 8 * exact.eps * truth.weights + exact.tiny).clamp(max=1.0)
    output = weight @ value + S * exact.eps * truth.weights @ value
    output = output + narrow.eps * truth.output.abs() + narrow.tiny
    return {"scores": score, "weights": weight, "output": output}


def _linformer(tensors: Tensors, parameters: Parameters, truth: Any) -> dict[str, Tensor]:
    """A score sums S D products, each rounded (S + D + 8 times in a row at most): delta.

    Its weight in the map has an error factor of e^(2 delta), and so has the sum of the row. R + 64
    roundings of the sum and of exp come on top. Averages of mixtures of S add R + S roundings of
    the mass of the sum, and the output is rounded to its dtype. Underflow loses at most the
    smallest normal number.
    """
    query, key, value = _query_key_value(tensors)
    dtype, (S, D), R = query.dtype, key.shape[2:], truth.map.shape[-1]
    given = (tensors.get("key_projection_RN"), tensors.get("value_projection_RN"))
    seed = parameters.get("seed", 0)
    E, F = (
        (random_projection(i, R, S, seed).to(dtype) if p is None else p).double()[:, :S].abs()
        for i, p in enumerate(given)
    )
    k, v = key.double().abs(), value.double().abs()
    scale = parameters.get("scale")
    scale = D**-0.5 if scale is None else scale
    eps, tiny = (getattr(torch.finfo(exact_dtype(dtype)), n) for n in ("eps", "tiny"))
    size = abs(scale) * (query.double().abs() @ (E @ k).mT)
    delta = (eps * (S + D + 10) * size + tiny * (S + D) * max(1, abs(scale))).amax(-1, keepdim=True)
    relative = torch.expm1(2 * delta) + (R + 64) * eps
    return {
        "map": truth.map * relative + tiny,
        "weights": (relative + (R + 2) * eps) * (truth.map @ F) + R * tiny,
        "output": (relative + (R + S + 8) * eps) * (truth.map @ (F @ v))
        + torch.finfo(dtype).eps * truth.output.abs()
        + (R + S) * torch.finfo(dtype).tiny,
    }


def _gated(tensors: Tensors, parameters: Parameters, truth: Any) -> dict[str, Tensor]:
    """Each term of the recurrence is rounded once per sum that it is in.

    All of them together are the outputs of the recurrence on absolute values, without any
    cancellation. The exponent of a decay is rounded too: up to 104 it matters in float32.
    """
    query, value = tensors["query_BJSD"], tensors["value_BVSE"]
    narrow, exact = (torch.finfo(d) for d in (query.dtype, exact_dtype(query.dtype)))
    sizes: dict[str, Any] = {n: x.abs() if x.is_floating_point() else x for n, x in tensors.items()}
    state_heads = max(tensors["key_BGSD"].shape[1], value.shape[1])
    beta = sizes.get("beta_BTS", torch.ones(len(query), state_heads, query.shape[2]))
    sizes |= {"value_BVSE": -sizes["value_BVSE"], "beta_BTS": -beta}
    close = 16.0 + 4 * query.shape[3] + 4 * query.shape[2]
    if (decay := tensors.get("log_decay_BTSZ")) is not None:
        sizes["log_decay_BTSZ"] = decay
        close += min(104.0, float(decay.double().abs().sum(2).max()))
    mass = reference_of(gated.Call(**sizes, **parameters))
    least = exact.tiny * (1 + float(value.abs().max())) * query.shape[2] * query.shape[3]
    found = {
        n: close * exact.eps * getattr(mass, n).abs() + least
        for n in ("output", "weights", "state_weights")
    }
    found["output"] = found["output"] + narrow.eps * truth.output.abs() + narrow.tiny
    return found


def _linear_layer(tensors: Tensors, parameters: Parameters, truth: Any) -> dict[str, Tensor]:
    x, weight = tensors["x_BI"], tensors["weight_OI"]
    narrow, eps, I = torch.finfo(x.dtype), torch.finfo(exact_dtype(x.dtype)).eps, x.shape[1]  # noqa: E741
    mass = x.double().abs() @ weight.double().abs().mT
    output = (I + 2) * (eps + 2 * EPS) * mass + narrow.eps / 2 * truth.output.abs()
    close = 2 * eps + 2 * (I + 4) * EPS
    found: dict[str, Tensor] = {
        n: close * getattr(truth, n).abs() for n in ("weights", "value", "query", "key")
    }
    finite = truth.scores.masked_fill(truth.scores.isinf(), 0.0).abs()
    scores = close * (1 + finite + finite.amax())  # a difference of logarithms
    return found | {"output": output + narrow.smallest_normal * narrow.eps, "scores": scores}


def _softmax(tensors: Tensors, parameters: Parameters, truth: Any) -> dict[str, Tensor]:
    query, key, value = (tensors[n] for n in ("query_BHLD", "key_BGSD", "value_BGSE"))
    slopes, added = tensors.get("alibi_slopes_H"), None
    if slopes is not None:
        offset, lengths = parameters.get("query_offset", 0), tensors.get("key_lengths_B")
        added = alibi(slopes, query.shape[2], key.shape[2], offset, lengths)
    mask, sinks = tensors.get("mask_BHLS"), tensors.get("sinks_H")
    return softmax_bounds(query, key, value, mask, parameters, truth, added, sinks)._asdict()


BOUNDS: Final[Mapping[str, Callable[[Tensors, Parameters, Any], dict[str, Tensor]]]] = {
    "efficient": _efficient,
    "gated": _gated,
    "linear": _linear,
    "linear_layer": _linear_layer,
    "linformer": _linformer,
    "mean": _mean,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    "taylor": _taylor,
}


def _query_key_value(tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the three, with keys and values repeated for the heads that share them."""
    query, key, value = (tensors[n] for n in ("query_BHLD", "key_BGSD", "value_BGSE"))
    K = query.shape[1] // key.shape[1]
    return query, key.repeat_interleave(K, 1), value.repeat_interleave(K, 1)


def _visible(shape: tuple[int, ...], tensors: Tensors, parameters: Parameters) -> Tensor:
    """Returns True for each key that a query sees, also for opposed keys of weight 0."""
    B, _, L, S = shape
    length = tensors.get("key_lengths_B", torch.full((B,), S)).view(-1, 1, 1, 1)
    seen = torch.arange(S) < length
    if parameters.get("causal"):
        offset = parameters.get("query_offset", 0)
        offset = length - L if offset == "end" else int(offset)
        seen = seen & (torch.arange(S) <= torch.arange(L)[:, None] + offset)
    return seen.expand(shape)
