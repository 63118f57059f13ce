"""Linformer: exact attention to a few mixtures of the keys, computed by two projections.

Formula: P = softmax(scale Q (E K)^T); output = P (F V) = A V, A = P F.
Paper: Wang et al., Linformer, arXiv:2006.04768, section 4.
Cost: O((L + S) R (D + E)) time; O(R (S + D + E)) memory beside the inputs, O(L R) if the map is
requested, O(L S) if the weights are requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from pydantic import Field
from torch import Tensor

from qkv.attention.common.guards import are_wide
from qkv.attention.common.key_mixtures import Path, average_mixtures
from qkv.attention.common.row_masks import mask_padding, padding_mask
from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.score_steps import input_steps, per_query_head, zero_padding
from qkv.attention.common.visibility import row_blocks
from qkv.attention.step import Step
from qkv.attention.variants import softmax
from qkv.errors import InvalidContent, PayloadTooLarge

WEIGHTS: Final = "signed; rows do not sum to 1"
_MIXED: Final = "the projections mix positions: "
REFUSES: Final[Mapping[str, str]] = {
    "causal": _MIXED + "a mixture of all keys cannot hide a single key from a query",
    "query_offset": _MIXED + "the keys that a query sees do not depend on its position",
    "window": _MIXED + "a mixture of all keys is neither inside nor outside a window",
    "softcap": "the paper's scores are not capped",
    "dropout": "the single weights that dropout needs are never computed",
    "normalize": "the map is a softmax; A = P F is signed, and its row sums may be 0",
}

STACKABLE_BELOW: Final = 1e4  # a product of three with scale, D and S is in float32's range

STEPS: Final = (
    *input_steps("Q", "K", "V"),
    Step("key_projection", "B R S", "E", "One row for each mixture of keys; padding is zeros."),
    Step("value_projection", "B R S", "F", "The same for mixtures of values."),
    Step("mixed_key", "B G R D", "E K", "The sum of the keys times each row of key_projection."),
    Step("mixed_value", "B G R E", "F V", "The same of the values and value_projection."),
    Step(
        "scores", "B H L R", "Q (E K)^T", "The product of each query with each mixed key.",
        rows="L",
    ),
    Step("scaled", "B H L R", "scale Q (E K)^T", "The scores times scale.", rows="L"),
    Step(
        "map", "B H L R", "softmax(scale Q (E K)^T)", "The softmax of each row of scaled scores.",
        rows="L",
    ),
    Step("weights", "B H L S", "P F", "The map times value_projection.", rows="L"),
    Step(
        "output", "B H L E", "P (F V)", "The average of mixed_value, weighted by the map.",
        rows="L",
    ),
)  # fmt: skip

_MAX_DEFAULT_RANK = 256  # of a request without projections and rank
_PAIRS_PER_DRAW = 32  # a random number takes at least as long as so many pairs
_ELEMENTS = 1 << 22  # of a block of rows of the map, or of A
_MAX_NUMBERS = 1 << 26  # held beside inputs and outputs; drawing them takes about a second


class Linformer(NamedTuple):
    """The outputs of Linformer; None for an output that was not requested."""

    output: Float[Tensor, "B H L E"] | None = None
    weights: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None
    map: Float32[Tensor, "B H L R"] | Float64[Tensor, "B H L R"] | None = None
    backend: str = "explicit"


def flops(sizes: Mapping[str, int]) -> int:
    """Returns the operations of both projections and of attention to the mixtures."""
    B, H, G, L, S, D, E, R = (sizes[letter] for letter in "BHGLSDER")
    return 2 * B * R * (D + E) * (G * S + H * L)


def score_count(sizes: Mapping[str, int], parameters: Any) -> int:
    """Returns the number of scores, one per query and mixture, and the cost of random projections.

    A random number takes as long as _PAIRS_PER_DRAW scores. If the sizes have N, the request has at
    least one projection.
    """
    B, H, L, S, R = (sizes[letter] for letter in "BHLSR")
    return B * H * L * R + _PAIRS_PER_DRAW * R * S * (1 if "N" in sizes else 2)


def infer_sizes(sizes: Mapping[str, int], parameters: Any) -> Mapping[str, int]:
    """Returns R, and checks the sizes of the projections.

    Raises:
        InvalidContent: a projection is for fewer keys, or has another rank than the parameter.
        PayloadTooLarge: the projections and mixtures would have too many numbers.
    """
    B, H, G, S, D, E = (sizes[letter] for letter in "BHGSDE")
    if sizes.get("N", S) < S:
        raise InvalidContent(
            f"key_projection or value_projection has too few columns: got N={sizes['N']}, "
            f"expected at least S={S}, one for each key",
            pointer="/inputs",
        )
    R = sizes.get("R") or parameters.rank or min(S, _MAX_DEFAULT_RANK)
    if parameters.rank not in (None, R):
        raise InvalidContent(
            f"parameter 'rank' does not fit the projections: got {parameters.rank}, expected "
            f"R={R}; omit rank, or both projections",
            pointer="/parameters/rank",
        )
    # the projections, the mixtures of keys and values, and one row of the map of all heads
    count = R * (2 * S + B * G * (D + E) + B * H)
    if count > _MAX_NUMBERS:
        raise PayloadTooLarge(
            f"rank R={R} over S={S} keys is too large: got {count} numbers beside the inputs, "
            f"expected at most {_MAX_NUMBERS}",
            limit=_MAX_NUMBERS,
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
    """Returns both projections of `attend`: those of the request, or random ones."""
    E_RS, F_RS = _projections(key_BGSD, key_projection_RN, value_projection_RN, rank, seed)
    return {"key_projection_RN": E_RS, "value_projection_RN": F_RS}


@dataclass(frozen=True, eq=False)
class Call:
    """A request for Linformer attention.

    Attributes:
        query_BHLD, key_BGSD, value_BGSE: query head h reads key head h // (H / G).
        key_projection_RN, value_projection_RN: E and F for at most N keys; a shorter sequence takes
            the first S columns.
        key_lengths_B: keys at and after this position are padding, and enter no mixture.
        scale, rank, seed: see their descriptions.
    """

    query_BHLD: Float[Tensor, "B H L D"]
    key_BGSD: Float[Tensor, "B G S D"]
    value_BGSE: Float[Tensor, "B G S E"]
    key_projection_RN: Float[Tensor, "R N"] | None = None
    value_projection_RN: Float[Tensor, "R N"] | None = None
    key_lengths_B: Int64[Tensor, "B"] | None = None
    _: KW_ONLY
    scale: Annotated[
        Annotated[float, Field(ge=-1e9, le=1e9)] | None,
        Field(description="Factor of the scores. By default 1/sqrt(D)."),
    ] = None
    rank: Annotated[
        Annotated[int, Field(ge=1, le=65536)] | None,
        Field(
            description="The number of key mixtures of a random projection. By default the rank "
            "of the other projection. Without one, S but at most 256."
        ),
    ] = None
    seed: Annotated[
        int, Field(ge=0, lt=2**64, description="Seed of projections that the request omits.")
    ] = 0


def attend(call: Call, outputs: frozenset[str]) -> Linformer:
    """Computes Linformer attention.

    A projection that the request omits is random: normal with variance 1/R, rounded to the dtype of
    the request. For equal rank and seed, the projection of a shorter sequence is the first columns
    of that of a longer one.

    `outputs` are the names of the outputs to return: "output", "weights", "map" (P).
    """
    (B, H, L, _), S, query = call.query_BHLD.shape, call.key_BGSD.shape[2], call.query_BHLD
    dtype, scale = query.dtype, _scale(call)
    exact, padding = score_dtype(dtype), padding_mask(S, call.key_lengths_B)
    key, value = mask_padding(padding, call.key_BGSD), mask_padding(padding, call.value_BGSE)
    E_RS, F_RS = _projections_of(call)
    if outputs == {"output"} and not are_wide():
        # an overflow here is inf or NaN in a mixture, for which the fused kernel does not run
        mixed = (E_RS.to(exact) @ key.to(exact), F_RS.to(exact) @ value.to(exact))
        fused = softmax.attend(softmax.Call(query.to(exact), *mixed, scale=scale), outputs)
        if fused.backend == "sdpa":
            assert fused.output is not None
            return Linformer(fused.output.to(dtype), backend=fused.backend)
    path = Path.of(query, key, value, E_RS, F_RS, scale)
    scores = path.scores(query, key, E_RS, scale)
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


def weights(call: Call) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A from a slice of L: (B, H, rows, S).

    It takes memory O(rows S) beside the projections.
    """
    padding = padding_mask(call.key_BGSD.shape[2], call.key_lengths_B)
    key, exact = mask_padding(padding, call.key_BGSD), score_dtype(call.query_BHLD.dtype)
    E_RS, F_RS = _projections_of(call)
    scale = _scale(call)
    path = Path.of(call.query_BHLD, key, None, E_RS, F_RS, scale)
    scores, F_RS = path.scores(call.query_BHLD, key, E_RS, scale), F_RS.to(path.dtype)

    def row_block(rows: slice) -> Float32[Tensor, "B H rows S"] | Float64[Tensor, "B H rows S"]:
        return path.weights(scores.block(rows).weights, F_RS, padding).to(exact)

    return row_block


def _scale(call: Call) -> float:
    return call.query_BHLD.shape[-1] ** -0.5 if call.scale is None else call.scale


def _projections_of(call: Call) -> tuple[Tensor, Tensor]:
    """Returns E and F of a request, both (R, S)."""
    return _projections(
        call.key_BGSD, call.key_projection_RN, call.value_projection_RN, call.rank, call.seed
    )


def _projections(
    key_BGSD: Tensor,
    key_projection_RN: Tensor | None,
    value_projection_RN: Tensor | None,
    rank: int | None,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Returns E and F, both (R, S); random ones have the dtype of the keys."""
    S, sent = key_BGSD.shape[2], (key_projection_RN, value_projection_RN)
    R = next((len(p) for p in sent if p is not None), rank or min(S, _MAX_DEFAULT_RANK))
    E_RS, F_RS = (
        _random_projection(stream, R, seed, key_BGSD) if p is None else p[:, :S].contiguous()
        for stream, p in enumerate(sent)
    )
    return E_RS, F_RS


def _random_projection(stream: int, R: int, seed: int, key_BGSD: Tensor) -> Tensor:
    """Draws (R, S) key by key, so that fewer keys get the first columns."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))
    S = key_BGSD.shape[2]
    projection_RS = torch.empty(R, S, dtype=key_BGSD.dtype)
    for keys in row_blocks(S, R, _ELEMENTS):
        part_SR = generator.standard_normal((keys.stop - keys.start, R)) / math.sqrt(R)
        projection_RS[:, keys] = torch.from_numpy(part_SR).mT.to(projection_RS.dtype)
    return projection_RS.to(key_BGSD.device, non_blocking=True)


def steps(call: Call) -> dict[str, Tensor]:
    """Returns the steps by name, from float64 tensors, with both projections."""
    key, value = (zero_padding(x, call.key_lengths_B) for x in (call.key_BGSD, call.value_BGSE))
    B, S = len(key), key.shape[2]
    assert call.key_projection_RN is not None
    assert call.value_projection_RN is not None
    E_BRS, F_BRS = (
        zero_padding(p[:, :S].mT.expand(B, 1, S, -1), call.key_lengths_B)[:, 0].mT
        for p in (call.key_projection_RN, call.value_projection_RN)
    )
    mixed_key, mixed_value = E_BRS[:, None] @ key, F_BRS[:, None] @ value
    scores = call.query_BHLD @ per_query_head(mixed_key, call.query_BHLD).mT
    scaled = scores * (call.query_BHLD.shape[-1] ** -0.5 if call.scale is None else call.scale)
    averages = scaled.softmax(-1)
    return {
        "query": call.query_BHLD, "key": key, "value": value, "key_projection": E_BRS,
        "value_projection": F_BRS, "mixed_key": mixed_key, "mixed_value": mixed_value,
        "scores": scores, "scaled": scaled, "map": averages, "weights": averages @ F_BRS[:, None],
        "output": averages @ per_query_head(mixed_value, call.query_BHLD),
    }  # fmt: skip


def backward(
    call: Call, grad_output_BHLE: Float[Tensor, "B H L E"]
) -> dict[str, Float64[Tensor, "..."]]:
    """Returns the gradients of sum(grad_output * output), in float64, by the names of the inputs.

    There is one for query, key, value and each projection of the request, in its shape. Padding and
    columns beyond S get zeros. Products are plain: float64 inputs near the end of the range may
    overflow.
    """
    L, S = call.query_BHLD.shape[2], call.key_BGSD.shape[2]
    padding = padding_mask(S, call.key_lengths_B)
    E_RS, F_RS = (p.double() for p in _projections_of(call))
    query = call.query_BHLD.double()
    key, value = (
        mask_padding(padding, call.key_BGSD).double(),
        mask_padding(padding, call.value_BGSE).double(),
    )
    scale = _scale(call)
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
    for name, projection, mixed_grad, tensor in (
        ("key_projection", call.key_projection_RN, key_grad, key),
        ("value_projection", call.value_projection_RN, value_grad, value),
    ):
        if projection is not None:
            grads[name] = torch.zeros_like(projection, dtype=torch.float64)
            grads[name][:, :S] = torch.einsum("bgrx,bgsx->rs", mixed_grad, tensor)
    return grads
