"""Linformer: exact attention to few mixtures of the keys, which two projections make.

Formula: P = softmax(scale Q (E K)^T), output = P (F V) = A V with A = P F; E and F are (R, S).
Paper: Wang et al., Linformer (arXiv:2006.04768), section 4.
Cost: O((L + S) R (D + E)) time; memory O(R (S + D + E)) beside the inputs, O(L R) where the map is
asked for, O(L S) where the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from pydantic import Field
from torch import Tensor

from qkv.attention.common.key_mixtures import Path, average_mixtures
from qkv.attention.common.row_masks import mask_padding, padding_mask
from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.visibility import row_blocks
from qkv.attention.variants import softmax
from qkv.errors import InvalidContent, PayloadTooLarge

FORMULA: Final = "P = softmax(scale Q (E K)^T); output = P (F V) = A V, A = P F"
PAPER: Final = "Wang et al., Linformer, arXiv:2006.04768, section 4"
COST: Final = (
    "O((L + S) R (D + E)) time; O(R (S + D + E)) memory beside the inputs, O(L R) where the map is "
    "asked for, O(L S) where the weights are"
)
WEIGHTS: Final = "signed; rows do not sum to 1"
_MIXED: Final = "the projections mix positions: "
REFUSES: Final[Mapping[str, str]] = {
    "causal": _MIXED + "a mixture of all keys has none that a query could be kept from seeing",
    "query_offset": _MIXED + "what a query sees does not depend on its own",
    "window": _MIXED + "a mixture of all keys lies neither inside a window nor outside",
    "softcap": "the paper's scores are not capped",
    "dropout": "no weight of one query and one key is ever made alone, that could be dropped",
    "normalize": "the map is a softmax; A = P F is signed, and its row sums may be 0",
}

STACKABLE_BELOW: Final = 1e4  # three such numbers times scale, D and S are within float32's range

_RANK = 256  # at most, where neither a projection nor a parameter says
_DRAWN = 32  # pairs that a drawn number takes as long as, or longer
_ELEMENTS = 1 << 22  # of a block of rows of the map, or of A
_HELD = 1 << 26  # numbers held beside inputs and answer; drawing them takes about a second


class Linformer(NamedTuple):
    """What Linformer answers; None where it was not asked for."""

    output: Float[Tensor, "B H L E"] | None = None
    weights: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None
    map: Float32[Tensor, "B H L R"] | Float64[Tensor, "B H L R"] | None = None
    backend: str = "explicit"


def flops(sizes: Mapping[str, int]) -> int:
    """Both projections, and attention to what they make."""
    B, H, G, L, S, D, E, R = (sizes[letter] for letter in "BHGLSDER")
    return 2 * B * R * (D + E) * (G * S + H * L)


def score_count(sizes: Mapping[str, int], parameters: Any) -> int:
    """Each query meets each of the R mixtures, however many keys there are. To draw a number of a
    projection takes as long as many a pair; with N one came, and maybe both."""
    B, H, L, S, R = (sizes[letter] for letter in "BHLSR")
    return B * H * L * R + _DRAWN * R * S * (1 if "N" in sizes else 2)


def infer_sizes(sizes: Mapping[str, int], parameters: Any) -> Mapping[str, int]:
    """R where no projection came; projections that do not fit are found here."""
    B, H, G, S, D, E = (sizes[letter] for letter in "BHGSDE")
    if sizes.get("N", S) < S:
        raise InvalidContent(
            f"the projections are made for at most N={sizes['N']} keys; S={S} came",
            pointer="/inputs",
        )
    R = sizes.get("R") or parameters.rank or min(S, _RANK)
    if parameters.rank not in (None, R):
        raise InvalidContent(
            f"parameter 'rank' is {parameters.rank} where a projection has R={R}; leave it out, "
            "or both projections",
            pointer="/parameters/rank",
        )
    # the projections, what they make of keys and values, and one row of the map of all heads
    held = R * (2 * S + B * G * (D + E) + B * H)
    if held > _HELD:
        raise PayloadTooLarge(
            f"rank R={R} over S={S} keys would hold {held} numbers beside the inputs; at most "
            f"{_HELD} are held",
            limit=_HELD,
        )
    return {"R": R}


def random_inputs(
    key_BGSD: Float[Tensor, "B G S D"],
    key_projection_RN: Float[Tensor, "R N"] | None = None,
    value_projection_RN: Float[Tensor, "R N"] | None = None,
    *,
    rank: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Both projections as `attend` has them: those that came, or else those that are drawn."""
    E_RS, F_RS = _projections(key_BGSD, key_projection_RN, value_projection_RN, rank, seed)
    return {"key_projection_RN": E_RS, "value_projection_RN": F_RS}


def attend(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    value_BGSE: Float[Tensor, "B G S E"],
    key_projection_RN: Float[Tensor, "R N"] | None = None,
    value_projection_RN: Float[Tensor, "R N"] | None = None,
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    scale: Annotated[
        Annotated[float, Field(ge=-1e9, le=1e9)] | None,
        Field(description="Factor of the scores; null: 1/sqrt(D)."),
    ] = None,
    rank: Annotated[
        Annotated[int, Field(ge=1, le=65536)] | None,
        Field(
            description="How many mixtures of keys a drawn projection makes; null: as many as the "
            "projection that came has, or else S, at most 256."
        ),
    ] = None,
    seed: Annotated[
        int, Field(ge=0, lt=2**64, description="What a projection that did not come is drawn from.")
    ] = 0,
    outputs: frozenset[str],
) -> Linformer:
    """Attends to mixtures of keys.

    A projection that does not come is drawn: normal with variance 1/R, rounded to the request's
    dtype. With the same rank and seed, a shorter sequence's is the first columns of a longer one's.

    Args:
        query_BHLD, key_BGSD, value_BGSE: query head h reads key head h // (H / G).
        key_projection_RN, value_projection_RN: E and F, made for N keys at most, of which a shorter
            sequence takes the first S columns.
        key_lengths_B: keys at and past it are padding, and enter no mixture.
        outputs: which of "output", "weights" and "map" (P) to return.
    """
    (B, H, L, D), S, dtype = query_BHLD.shape, key_BGSD.shape[2], query_BHLD.dtype
    exact, padding = score_dtype(dtype), padding_mask(S, key_lengths_B)
    key, value = mask_padding(padding, key_BGSD), mask_padding(padding, value_BGSE)
    E_RS, F_RS = _projections(key, key_projection_RN, value_projection_RN, rank, seed)
    scale = D**-0.5 if scale is None else scale
    if outputs == {"output"}:
        # what overflows here is inf or NaN in a mixture, of which the kernel takes neither
        found = softmax.attend(
            query_BHLD.to(exact),
            E_RS.to(exact) @ key.to(exact),
            F_RS.to(exact) @ value.to(exact),
            scale=scale,
            outputs=outputs,
        )
        if found.backend == "sdpa":
            assert found.output is not None
            return Linformer(found.output.to(dtype), backend=found.backend)
    path = Path.of(query_BHLD, key, value, E_RS, F_RS, scale)
    scores = path.scores(query_BHLD, key, E_RS, scale)
    mixed_value, exponents = path.mixed(F_RS, value) if "output" in outputs else (value, None)
    R = len(E_RS)
    output = value.new_zeros(B, H, L, value.shape[-1], dtype=dtype) if "output" in outputs else None
    weights = value.new_zeros(B, H, L, S, dtype=exact) if "weights" in outputs else None
    whole_map = value.new_zeros(B, H, L, R, dtype=exact) if "map" in outputs else None
    for rows in row_blocks(L, B * H * max(R, 0 if weights is None else S), _ELEMENTS):
        part = scores.block(rows).weights
        if output is not None:
            output[:, :, rows] = average_mixtures(part, mixed_value, exponents)
        if weights is not None:
            weights[:, :, rows] = path.weights(part, F_RS, padding)
        if whole_map is not None:
            whole_map[:, :, rows] = part
    return Linformer(output, weights, whole_map)


def weights(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    key_projection_RN: Float[Tensor, "R N"] | None = None,
    value_projection_RN: Float[Tensor, "R N"] | None = None,
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    scale: float | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> Callable[[slice], Tensor]:
    """What makes blocks of rows of A: from a slice of L to (B, H, rows, S), in memory O(rows S)
    beside the projections. The arguments are `attend`'s."""
    padding = padding_mask(key_BGSD.shape[2], key_lengths_B)
    key, exact = mask_padding(padding, key_BGSD), score_dtype(query_BHLD.dtype)
    E_RS, F_RS = _projections(key, key_projection_RN, value_projection_RN, rank, seed)
    scale = query_BHLD.shape[-1] ** -0.5 if scale is None else scale
    path = Path.of(query_BHLD, key, None, E_RS, F_RS, scale)
    scores, F_RS = path.scores(query_BHLD, key, E_RS, scale), F_RS.to(path.dtype)

    def row_block(rows: slice) -> Float32[Tensor, "B H rows S"] | Float64[Tensor, "B H rows S"]:
        return path.weights(scores.block(rows).weights, F_RS, padding).to(exact)

    return row_block


def _projections(
    key_BGSD: Tensor,
    key_projection_RN: Tensor | None,
    value_projection_RN: Tensor | None,
    rank: int | None,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """E and F, (R, S) both, in the dtype they came in or else in the keys'."""
    S, came = key_BGSD.shape[2], (key_projection_RN, value_projection_RN)
    R = next((len(p) for p in came if p is not None), rank or min(S, _RANK))
    E_RS, F_RS = (
        _drawn(stream, R, seed, key_BGSD) if p is None else p[:, :S].contiguous()
        for stream, p in enumerate(came)
    )
    return E_RS, F_RS


def _drawn(stream: int, R: int, seed: int, key_BGSD: Tensor) -> Tensor:
    """(R, S), filled key by key, so that fewer keys have the first columns."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))
    S = key_BGSD.shape[2]
    drawn_RS = torch.empty(R, S, dtype=key_BGSD.dtype)
    for keys in row_blocks(S, R, _ELEMENTS):
        part_SR = generator.standard_normal((keys.stop - keys.start, R)) / math.sqrt(R)
        drawn_RS[:, keys] = torch.from_numpy(part_SR).mT.to(drawn_RS.dtype)
    return drawn_RS.to(key_BGSD.device)


def reference(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    key_projection_RN: Tensor | None = None,
    value_projection_RN: Tensor | None = None,
    key_lengths_B: Tensor | None = None,
    *,
    scale: float | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> Linformer:
    """The same in plain float64 numpy, one head at a time, as the paper writes it."""
    query, key, value = (x.double().numpy() for x in (query_BHLD, key_BGSD, value_BGSE))
    (B, H, L, D), (_, G, S, _) = query.shape, key.shape
    given = [p for p in (key_projection_RN, value_projection_RN) if p is not None]
    r = len(given[0]) if given else rank or min(S, 256)

    def projection(came: Tensor | None, stream: int) -> np.ndarray:
        if came is not None:
            return came.double().numpy()[:, :S]
        bits = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))
        drawn = np.random.Generator(bits).normal(0, 1, (S, r)).T / np.sqrt(r)
        return np.asarray(torch.from_numpy(drawn).to(query_BHLD.dtype).double())

    E, F = projection(key_projection_RN, 0), projection(value_projection_RN, 1)
    output = np.zeros((B, H, L, value.shape[-1]))
    weights, maps = np.zeros((B, H, L, S)), np.zeros((B, H, L, r))
    for b, h in np.ndindex(B, H):
        valid = S if key_lengths_B is None else int(key_lengths_B[b])
        k, v = key[b, h * G // H, :valid], value[b, h * G // H, :valid]
        s = query[b, h] @ (E[:, :valid] @ k).T * (1 / np.sqrt(D) if scale is None else scale)
        p = np.exp(s - s.max(-1, keepdims=True))
        maps[b, h] = p = p / p.sum(-1, keepdims=True)
        weights[b, h, :, :valid] = p @ F[:, :valid]
        output[b, h] = p @ (F[:, :valid] @ v)
    output_BHLE, weights_BHLS, map_BHLR = map(torch.from_numpy, (output, weights, maps))
    return Linformer(output_BHLE, weights_BHLS, map_BHLR, backend="reference")


def backward(
    grad_output_BHLE: Float[Tensor, "B H L E"],
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    value_BGSE: Float[Tensor, "B G S E"],
    key_projection_RN: Float[Tensor, "R N"] | None = None,
    value_projection_RN: Float[Tensor, "R N"] | None = None,
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    scale: float | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> dict[str, Float64[Tensor, "..."]]:
    """Gradients of sum(grad_output * output), in float64, by the names that tensors come by.

    For query, key, value and each projection that came, in the shapes they came in; padding, and
    columns past S, get zeros. Products are plain: float64 inputs near the end of the range may
    pass it. The other arguments are `attend`'s.
    """
    (L, D), S = query_BHLD.shape[2:], key_BGSD.shape[2]
    padding = padding_mask(S, key_lengths_B)
    E_RS, F_RS = (
        p.double()
        for p in _projections(key_BGSD, key_projection_RN, value_projection_RN, rank, seed)
    )
    query = query_BHLD.double()
    key, value = (
        mask_padding(padding, key_BGSD).double(),
        mask_padding(padding, value_BGSE).double(),
    )
    scale = D**-0.5 if scale is None else scale
    scores = Path.of(query, key, value, E_RS, F_RS, scale).scores(query, key, E_RS, scale)
    mixed_key, mixed_value = E_RS @ key, F_RS @ value
    query_grad = torch.zeros_like(query)
    key_grad, value_grad = torch.zeros_like(mixed_key), torch.zeros_like(mixed_value)
    heads = (key.shape[1], -1)
    for rows in row_blocks(L, query.shape[0] * query.shape[1] * len(E_RS), _ELEMENTS):
        p = scores.block(rows).weights.unflatten(1, heads)
        grad = grad_output_BHLE[:, :, rows].double().unflatten(1, heads)
        p_grad = torch.einsum("bgkle,bgre->bgklr", grad, mixed_value)
        s_grad = scale * p * (p_grad - (p * p_grad).sum(-1, keepdim=True))
        query_grad[:, :, rows] = torch.einsum("bgklr,bgrd->bgkld", s_grad, mixed_key).flatten(1, 2)
        key_grad += torch.einsum("bgklr,bgkld->bgrd", s_grad, query[:, :, rows].unflatten(1, heads))
        value_grad += torch.einsum("bgklr,bgkle->bgre", p, grad)
    grads = {
        "query": query_grad,
        "key": mask_padding(padding, E_RS.mT @ key_grad),
        "value": mask_padding(padding, F_RS.mT @ value_grad),
    }
    for name, came, mixed_grad, tensor in (
        ("key_projection", key_projection_RN, key_grad, key),
        ("value_projection", value_projection_RN, value_grad, value),
    ):
        if came is not None:
            grads[name] = torch.zeros_like(came, dtype=torch.float64)
            grads[name][:, :S] = torch.einsum("bgrx,bgsx->rs", mixed_grad, tensor)
    return grads
