"""The candidates of a detection: splits into heads, and what positions and scores may be for each.

`list_splits` lists layouts and numbers of heads, from names, shapes and dtypes only, and
`list_variations` rotary embeddings, scales, masks, ALiBi and numbers of QK-norm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_options import MAX_HEADS, LayerOptions
from qkv.attention.layers.layer_reader import read_layer
from qkv.attention.layers.layer_weights import Array
from qkv.attention.layers.layout_catalogue import Layout
from qkv.attention.layers.qk_norm import QKNorm
from qkv.attention.layers.rope import Rope
from qkv.attention.layers.sent_tensors import SentTensors
from qkv.errors import InvalidContent

_BASES: Final = (10000.0, 500000.0, 1000000.0)
_PARTS: Final = (1, 2, 4)  # the divisors of the width of a head that give the rotated channels
_NORMS: Final = tuple(QKNorm(eps=eps, offset=n) for n in (0, 1) for eps in (1e-6, 1e-5))
_MAX_ROTATED: Final = 65536  # the bound of Rope.dims
MAX_TRIED: Final = 4096
"""Most pairs of numbers of query heads and key heads that a detection tries with a layout."""
_HEAD_WIDTHS: Final = range(8, 257)
_SMALL: Final = 64  # a query of so many channels may have narrower heads


class Split(NamedTuple):
    """A layout and the numbers of heads into which its tensors split."""

    layout: str
    heads: int
    kv_heads: int


def list_splits(
    layout: Layout,
    tensors: Mapping[str, Array],
    options: LayerOptions,
    widths: tuple[int, int],
    raise_if_stopped: Callable[[], object],
) -> list[Split]:
    """Returns the numbers of heads into which a layout's tensors may split.

    Args:
        layout: of the tensors.
        tensors: all tensors of the request.
        options: of the layer; heads and kv_heads that it gives are the only ones.
        widths: of the hidden states and of the expected output.
        raise_if_stopped: called before each pair of numbers; may raise.

    Raises:
        InvalidContent: the tensors split in no way, or there are too many numbers to try; the
            message says why.
    """
    prefix = options.prefix or ""
    blank = blanks(layout.select(tensors, prefix), prefix)
    splits: dict[Split, None] = {}
    problem: InvalidContent | None = None
    for heads, kv_heads in _pairs(layout, blank, options, widths[1]):
        raise_if_stopped()
        asked = {"layout": layout.name, "heads": heads, "kv_heads": kv_heads}
        try:
            layer = read_layer(options.model_copy(update=asked), blank, "")
            _check_widths(layer, widths)
        except InvalidContent as error:
            if problem is None or _is_about_check(error) > _is_about_check(problem):
                problem = error
            continue
        if options.heads is not None or _is_plausible(layer):
            splits[Split(layout.name, heads, layer.head_count("key"))] = None
    if not splits:
        raise problem or InvalidContent(
            f"no number of heads fits the tensors of {layout.name}: expected heads",
            pointer="/heads",
        )
    # the other names below the prefix are an error for all numbers of heads, or for none
    read_layer(options.model_copy(update=next(iter(splits))._asdict()), blanks(tensors, prefix), "")
    return list(splits)


def blanks(tensors: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """Returns ones of the same shapes and dtypes that need no memory, below a prefix."""
    return {
        name: np.broadcast_to(array.dtype.type(1), array.shape)
        for name, array in tensors.items()
        if name.startswith(prefix)
    }


def is_fused(layout: Layout, tensors: Mapping[str, Array], prefix: str) -> bool:
    """Returns True if the numbers of heads decide which rows are those of a role."""
    try:
        layout.read(SentTensors(tensors, "", prefix, layout.spellings))
    except InvalidContent as error:
        return error.pointer == "/heads"
    return False


def most_heads(width: int) -> int:
    """Returns the most heads into which queries of a width split if heads is not given."""
    return max(min(width, _SMALL), width // _HEAD_WIDTHS.start)


def _pairs(
    layout: Layout, tensors: Mapping[str, Array], options: LayerOptions, width: int
) -> list[tuple[int, int | None]]:
    """Returns numbers of query heads and key heads to try.

    Raises:
        InvalidContent: there are too many.
    """
    grouped = layout.is_grouped and is_fused(layout, tensors, options.prefix or "")
    every = (
        (heads, kv_heads)
        for heads in _head_counts(tensors, options, width)
        for kv_heads in _kv_head_counts(options, heads, grouped)
    )
    pairs = list(itertools.islice(every, MAX_TRIED + 1))
    if len(pairs) > MAX_TRIED:
        raise InvalidContent(
            f"heads is missing: got more than {MAX_TRIED} possible numbers of heads for "
            f"{layout.name}, expected heads, kv_heads or another layout",
            pointer="/heads",
        )
    return pairs


def _head_counts(tensors: Mapping[str, Array], options: LayerOptions, width: int) -> Iterable[int]:
    """Returns the divisors of the axes that may have all heads side by side."""
    if options.heads is not None:
        return [options.heads]
    sizes = {width}
    for array in tensors.values():
        if array.ndim <= 2 and array.size and array.dtype.kind not in "bi":
            sizes.update(array.shape)
    counts = {size // d for size in sizes for d in (size, *_divisors(size))}
    return sorted(count for count in counts if count <= MAX_HEADS)


def _divisors(size: int) -> Iterator[int]:
    """Yields the divisors of a size that may be the width of a head."""
    widths = range(1, size + 1) if size <= 3 * _SMALL else _HEAD_WIDTHS
    return (d for d in widths if size % d == 0)


def _kv_head_counts(options: LayerOptions, heads: int, grouped: bool) -> Iterable[int | None]:
    """Returns numbers of key heads to try; None: those that the widths of the matrices give.

    Args:
        options: of the layer.
        heads: number of query heads.
        grouped: True if no matrix has the width of the keys, and they may have fewer heads.
    """
    if options.kv_heads is not None:
        return [options.kv_heads]
    if not grouped:
        return [None]
    small = [g for g in range(1, math.isqrt(heads) + 1) if heads % g == 0]
    return [None, *(g for g in sorted({*small, *(heads // g for g in small)}) if g < heads)]


def _is_about_check(error: InvalidContent) -> bool:
    """True if the tensors fit the layout, and x or y does not fit the tensors."""
    return (error.pointer or "").startswith("/check")


def _check_widths(layer: Layer, widths: tuple[int, int]) -> None:
    """Checks that hidden states and output have the widths of the layer.

    Raises:
        InvalidContent: they have not.
    """
    M, out = widths
    inputs = [len(layer.weights[f"{role}.weight"]) for role in ("query", "key", "value")]
    if any(width != M for width in inputs):
        raise InvalidContent(
            f"check.x has the wrong width: got {M}, expected {max(inputs)} as "
            f"{layer.name_of('query.weight')} has",
            pointer="/check/x",
        )
    value = layer.weights["value.weight"].shape[1] // layer.head_count("key")
    expected = layer.output_width or layer.head_count("query") * value
    if out != expected:
        raise InvalidContent(
            f"check.y has the wrong width: got {out}, expected {expected} as "
            f"{layer.name_of('output.weight' if layer.output_width else 'value.weight')} gives",
            pointer="/check/y",
        )


def _is_plausible(layer: Layer) -> bool:
    width = layer.weights["query.weight"].shape[1]
    return layer.options.heads == 1 or layer.head_width in _HEAD_WIDTHS or width <= _SMALL


@dataclass(frozen=True)
class Variation:
    """The numbers of an attention that its tensors do not show.

    Attributes:
        rope: the rotary embedding, with its order; None: there is none.
        norm: the numbers of QK-norm; None: there is none.
        scale: the factor of the scores.
        causal: True if no query attends to later keys.
        alibi: True if ALiBi's biases are added to the scores, "scaled" if before these are scaled.
    """

    rope: Rope | None
    norm: QKNorm | None
    scale: float
    causal: bool
    alibi: bool | Literal["scaled"]


@dataclass(frozen=True)
class Candidate:
    """A way to run a layer, and its error.

    Attributes:
        split: layout and heads.
        variation: all else.
        error: largest absolute difference to the expected output, divided by its largest size.
    """

    split: Split
    variation: Variation
    error: float

    def as_json(self) -> dict[str, Any]:
        """Returns the candidate as the service's response has it."""
        v = self.variation
        return {
            "layout": self.split.layout,
            "heads": self.split.heads,
            "kv_heads": self.split.kv_heads,
            "rotary": v.rope and v.rope.order,
            "scale": v.scale,
            "causal": v.causal,
            "rope": v.rope and v.rope.model_dump(exclude_none=True),
            "alibi": v.alibi,
            "qk_norm": v.norm and v.norm.model_dump(),
            "error": self.error,
        }


def complexity(candidate: Candidate, width: int) -> tuple[Any, ...]:
    """Returns a sort key of candidates with equal errors: the simplest is first.

    It has no or the plainest rotary embedding, is not causal, has no ALiBi, the usual scale and the
    fewest heads. Of several layouts, it is one whose models have such positions and heads.

    Args:
        candidate: to sort.
        width: of its query heads.
    """
    split, v = candidate.split, candidate.variation
    rope = (
        (0,)
        if v.rope is None
        else (1, v.rope.dims is not None, v.rope.order == "interleaved", v.rope.base)
    )
    norm = -1 if v.norm is None else _NORMS.index(v.norm) if v.norm in _NORMS else len(_NORMS)
    unusual = v.scale != width**-0.5
    layout = layout_catalogue.known()[split.layout]
    has_layout_order = layout.rotary_order == (v.rope and v.rope.order)
    general = layout.is_grouped and split.heads == split.kv_heads
    in_layout = not has_layout_order, general, split.layout
    return rope, v.causal, bool(v.alibi), unusual, split.heads, in_layout, norm, split, v.scale


def list_variations(
    layer: Layer, rope: Rope | None, scale: float | None
) -> list[tuple[Rope | None, QKNorm | None, Sequence[Variation]]]:
    """Returns what may be unknown of a layer, grouped by the numbers that queries and keys need.

    Args:
        layer: with its numbers of heads.
        rope: numbers of the rotary embedding that are known.
        scale: one more factor of the scores.
    """
    width = layer.head_width
    scales = dict.fromkeys([*([] if scale is None else [scale]), width**-0.5, 1.0, 1 / width])
    biases = (False, layer.layout.alibi) if layer.layout.alibi else (False,)
    has_norm = not {"query_norm.weight", "key_norm.weight"}.isdisjoint(layer.weights)
    norms: Sequence[QKNorm | None] = _NORMS if has_norm else (None,)
    groups: list[tuple[Rope | None, QKNorm | None, Sequence[Variation]]] = []
    for embedding in (None, *_ropes(rope, width)):
        for norm in norms:
            group = [
                Variation(embedding, norm, factor, causal, alibi)
                for factor in scales
                for causal in (False, True)
                # without later keys, the forms of ALiBi differ by a number for each row only
                for alibi in (biases if causal and embedding is None else (False,))
            ]
            groups.append((embedding, norm, group))
    return groups


def _ropes(given: Rope | None, width: int) -> Iterator[Rope]:
    """Yields rotary embeddings for a width of heads."""
    orders: Sequence[Literal["half", "interleaved"]] = ("half", "interleaved")
    if given is not None and given.order is not None:
        orders = (given.order,)
    if given is not None and given.frequencies is not None:
        yield from (given.model_copy(update={"order": order}) for order in orders)
        return
    bases = _BASES if given is None else (given.base,)
    if given is not None and given.dims is not None:
        dims: Iterable[int | None] = [given.dims] if given.dims <= width else []
    elif width % 2:
        dims = []
    else:
        parts = [width // n for n in _PARTS if width % (2 * n) == 0]
        dims = [
            None if part == width else part
            for part in parts
            if part == width or part <= _MAX_ROTATED
        ]
    for order, base, part in itertools.product(orders, bases, dims):
        known = {"base": base, "order": order, "dims": part}
        yield (given or Rope()).model_copy(update=known)
