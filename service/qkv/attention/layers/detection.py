"""Detection by running: finds layout, heads, positions and scale from a real module's output.

Each candidate runs on the same hidden states as the module did. First all of them run for a few
rows and columns of the output, in float32; then the best run as a whole, in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import torch

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.detection_candidates import (
    Candidate,
    Split,
    blanks,
    complexity,
    is_fused,
    list_splits,
    list_variations,
)
from qkv.attention.layers.detection_outputs import (
    DetectionSize,
    Projections,
    SplitOutputs,
    check_work,
)
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_options import LayerOptions
from qkv.attention.layers.layer_reader import find_prefix, read_layer
from qkv.attention.layers.layer_weights import Array
from qkv.attention.layers.layout_catalogue import Layout
from qkv.attention.layers.rope import Rope
from qkv.errors import InvalidContent

MAX_DETECTED: Final = 10
"""Most candidates in a result."""
MAX_TOKENS: Final = 256
"""Most hidden states of a check: the numbers of batches times that of positions."""
_SCREENED_SCORES: Final = 512  # of each head: rows times keys
_SCREENED_COLUMNS: Final = 64
_EXACT_RUNS: Final = 16
_TIE: Final = {torch.float32: 1e-6, torch.float64: 1e-12}  # errors that differ less are equal


class Check(NamedTuple):
    """Hidden states x and the real module's output y, each (L, width) or (B, L, width)."""

    x: Array
    y: Array


class Detection(NamedTuple):
    """The result of a detection.

    Attributes:
        candidates: the best, best first; those with equal errors are in the order of `complexity`.
        tied: how many of the first candidates have equal errors.
        prefix: of the layer's names, with its last dot.
        ignored: names of tensors that belong to no part of the best candidate.
    """

    candidates: Sequence[Candidate]
    tied: int
    prefix: str
    ignored: Sequence[str]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Uses one CPU thread: most tensors are small, and the engine's jobs need the others.

    The number is that of this thread. The engine sets its own before each job.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
@_one_thread()
def detect(
    tensors: Mapping[str, Array],
    check: Check,
    options: LayerOptions,
    scale: float | None = None,
    raise_if_stopped: Callable[[], object] = lambda: None,
) -> Detection:
    """Returns the candidates that come next to the module's output.

    Args:
        tensors: all tensors of the request.
        check: one input and output of the module.
        options: of the layer. What they give is not varied: a layout that is not "auto", heads,
            kv_heads, prefix, and the numbers of the rotary embedding.
        scale: one more factor of the scores to try.
        raise_if_stopped: called between pieces of the work; it raises to end the detection.

    Raises:
        InvalidContent: the check is degenerate or too large, or the tensors fit no layout.
    """
    x_BLM, y_BLM = _checked(check)
    shapes = {name: array.shape for name, array in tensors.items()}
    layouts, prefix = _layouts(options, shapes)
    bare = options.model_copy(update={"prefix": prefix, "rope": None})
    search = _Search(tensors, bare, x_BLM, y_BLM, raise_if_stopped)
    splits = search.splits(layouts)
    search.check_work(splits, options.rope, scale)
    screened = search.screen(splits, options.rope, scale)[:_EXACT_RUNS]
    exact = search.run_exactly(screened)
    if not exact:
        raise InvalidContent(
            "check.x gives no finite output: the weights, or the scores that they give, are NaN, "
            "infinite or too large",
            pointer="/check/x",
        )
    tied = sum(c.error - exact[0].error <= _TIE[torch.float64] for c in exact)
    ignored = search.ignored(exact[0].split)
    return Detection(exact[:MAX_DETECTED], tied, prefix, ignored)


def _checked(check: Check) -> tuple[Array, Array]:
    """Returns x and y as (B, L, width) in float64.

    Raises:
        InvalidContent: their shapes or values are not those of a check.
    """
    x, y = check
    if x.ndim not in (2, 3) or 0 in x.shape:
        raise InvalidContent(
            f"check.x has the wrong shape: got {list(x.shape)}, expected hidden states (L, M) or "
            "(B, L, M) without empty axes",
            pointer="/check/x",
        )
    if y.shape[:-1] != x.shape[:-1] or y.ndim != x.ndim or 0 in y.shape:
        raise InvalidContent(
            f"check.y has the wrong shape: got {list(y.shape)}, expected {list(x.shape)} as x has",
            pointer="/check/y",
        )
    tokens = int(np.prod(x.shape[:-1]))
    if tokens > MAX_TOKENS:
        raise InvalidContent(
            f"check.x is too large: got {tokens} hidden states, expected at most {MAX_TOKENS} in "
            "all sequences together",
            pointer="/check/x",
        )
    with np.errstate(invalid="ignore"):  # a signalling NaN warns
        wide = {"x": x.astype(np.float64), "y": y.astype(np.float64)}
    for name, array in wide.items():
        if not np.isfinite(array).all():
            raise InvalidContent(
                f"check.{name} is not finite: got NaN or infinity, expected finite numbers",
                pointer=f"/check/{name}",
            )
        if not array.any():
            raise InvalidContent(
                f"check.{name} is all zeros: expected numbers that tell candidates apart",
                pointer=f"/check/{name}",
            )
    x, y = (array if array.ndim == 3 else array[None] for array in wide.values())
    return x, y


def _layouts(options: LayerOptions, shapes: layout_catalogue.Shapes) -> tuple[list[Layout], str]:
    """Returns the layouts to try, and the prefix of the layer's names."""
    if options.layout != layout_catalogue.AUTO:
        layout = layout_catalogue.find(options.layout, "/from")
        return [layout], find_prefix(options.prefix, layout, shapes, "")
    prefix = find_prefix(options.prefix, None, shapes, "")
    fitting = layout_catalogue.candidates(shapes, prefix)
    # raises with the reason if there is none
    return fitting or [layout_catalogue.recognize(shapes, prefix, "/from")], prefix


class _Search:
    """The two passes of a detection."""

    def __init__(
        self,
        tensors: Mapping[str, Array],
        options: LayerOptions,
        x_BLM: Array,
        y_BLM: Array,
        raise_if_stopped: Callable[[], object],
    ) -> None:
        self._tensors, self._options = tensors, options
        self._x_BLM, self._y_BLM = x_BLM, y_BLM
        self._raise_if_stopped = raise_if_stopped
        self._size = np.abs(y_BLM).max()
        self._widths: dict[Split, int] = {}
        self._selected: dict[str, Mapping[str, Array]] = {}  # what a layout may read, by its name
        is_wide = any(array.dtype == np.float64 for array in tensors.values())
        self._dtype = torch.float64 if is_wide else torch.float32

    def read(self, split: Split, *, blank: bool = False) -> Layer:
        """Returns the layer with a layout and its numbers of heads, with ones if it is blank."""
        self._raise_if_stopped()
        weights = self._selected[split.layout]
        layer = read_layer(self._with(split), blanks(weights, "") if blank else weights, "")
        self._widths[split] = layer.head_width
        return layer

    def ignored(self, split: Split) -> Sequence[str]:
        """Returns the names of the tensors that belong to no part of the layer."""
        every = blanks(self._tensors, self._options.prefix or "")
        return read_layer(self._with(split), every, "").ignored

    def _with(self, split: Split) -> LayerOptions:
        return self._options.model_copy(update=split._asdict())

    def splits(self, layouts: Sequence[Layout]) -> list[Split]:
        """Returns the splits of all layouts.

        Raises:
            InvalidContent: there are none; the reason is that of the first layout.
        """
        splits: list[Split] = []
        problem = None
        widths = self._x_BLM.shape[-1], self._y_BLM.shape[-1]
        for layout in layouts:
            self._selected[layout.name] = layout.select(self._tensors, self._options.prefix or "")
            try:
                splits += list_splits(
                    layout, self._tensors, self._options, widths, self._raise_if_stopped
                )
            except InvalidContent as error:
                problem = problem or error
        if not splits and problem is not None:
            raise problem
        return splits

    def check_work(self, splits: Sequence[Split], rope: Rope | None, scale: float | None) -> None:
        """Checks the work of both passes, from sizes only.

        Raises:
            InvalidContent: it is too much.
        """
        layers, last = [], ""
        for split in splits:
            layer = self.read(split, blank=True)
            is_shared = split.layout == last and not is_fused(
                layer.layout, layer.tensors, layer.options.prefix or ""
            )
            groups = [len(group) for _, _, group in list_variations(layer, rope, scale)]
            layers.append((layer, is_shared, groups))
            last = split.layout
        B, L, _ = self._x_BLM.shape
        columns = self._y_BLM.shape[-1]
        size = DetectionSize(
            B, L, columns, self._screened_rows(), min(columns, _SCREENED_COLUMNS), _EXACT_RUNS
        )
        check_work(layers, size)

    def _screened_rows(self) -> int:
        return min(8, max(2, _SCREENED_SCORES // int(self._y_BLM.shape[1])))

    def screen(
        self, splits: Sequence[Split], rope: Rope | None, scale: float | None
    ) -> list[Candidate]:
        """Returns all candidates, best first, with their errors in a part of the output."""
        largest = int(np.argmax(np.abs(self._y_BLM).max((1, 2))))
        x_LM, y_LM = self._x_BLM[largest], self._y_BLM[largest]
        rows, columns = (
            np.unique(np.linspace(0, size - 1, count).round().astype(int))
            for size, count in zip(
                y_LM.shape, (self._screened_rows(), _SCREENED_COLUMNS), strict=True
            )
        )
        projections = Projections(torch.from_numpy(x_LM).to(self._dtype), self._raise_if_stopped)
        expected = torch.from_numpy(y_LM[np.ix_(rows, columns)])
        candidates = []
        for split in splits:
            layer = self.read(split)
            outputs = SplitOutputs(layer, projections, slice(None), columns)
            for embedding, norm, variations in list_variations(layer, rope, scale):
                positioned = outputs.positioned(embedding, norm)
                result = outputs.run(positioned, variations, torch.from_numpy(rows))
                errors = ((result.double() - expected).abs().amax((1, 2)) / self._size).tolist()
                candidates += [
                    Candidate(split, v, error) for v, error in zip(variations, errors, strict=True)
                ]
        return self._ranked(candidates, self._dtype)

    def run_exactly(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Returns those of the candidates with a finite output, best first, with exact errors."""
        B, L, M = self._x_BLM.shape
        x_NM = torch.from_numpy(self._x_BLM.reshape(B * L, M))
        projections = Projections(x_NM, self._raise_if_stopped)
        expected_BLM, rows = torch.from_numpy(self._y_BLM), torch.arange(L)
        exact = []
        by_split = sorted(candidates, key=lambda c: c.split)
        for split, group in itertools.groupby(by_split, key=lambda c: c.split):
            layer, members = self.read(split), list(group)
            errors = [0.0] * len(members)
            for b in range(B):
                outputs = SplitOutputs(layer, projections, slice(b * L, (b + 1) * L))
                for i, candidate in enumerate(members):
                    v = candidate.variation
                    (result,) = outputs.run(outputs.positioned(v.rope, v.norm), [v], rows)
                    error = float((result - expected_BLM[b]).abs().max() / self._size)
                    errors[i] = max(errors[i], error) if math.isfinite(error) else math.inf
            exact += [replace(c, error=e) for c, e in zip(members, errors, strict=True)]
        return self._ranked([c for c in exact if np.isfinite(c.error)], torch.float64)

    def _ranked(self, candidates: Iterable[Candidate], dtype: torch.dtype) -> list[Candidate]:
        """Returns candidates by their errors; where these are equal, the simplest first."""
        in_order = sorted(candidates, key=lambda c: (not np.isfinite(c.error), c.error))
        ranked: list[Candidate] = []
        for _, tied in itertools.groupby(in_order, key=_tie_grouper(_TIE[dtype])):
            ranked += sorted(tied, key=lambda c: complexity(c, self._widths[c.split]))
        return ranked


def _tie_grouper(tolerance: float) -> Callable[[Candidate], float]:
    """Returns a key for `groupby`: the first error of a group of equal errors."""
    first = -np.inf

    def key(candidate: Candidate) -> float:
        nonlocal first
        if not candidate.error - first <= tolerance:
            first = candidate.error if np.isfinite(candidate.error) else np.inf
        return first

    return key
