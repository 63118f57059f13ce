"""Weight forms other than the full matrix, computed from blocks of its rows.

The forward pass calls `compute_weight_form`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import pydantic
import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv.attention.common.guards import are_deferred, of_items
from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.visibility import row_blocks
from qkv.attention.variant import Variant
from qkv.engine.item_arguments import Planes, place_planes, slice_arguments
from qkv.jobs import weight_forms
from qkv.jobs.axis_sizes import HEADS
from qkv.jobs.weight_forms import WeightForm

_CPU_BLOCK_ELEMENTS: Final = 1 << 20  # per thread: such a block stays in the thread's cache
_GPU_BLOCK_ELEMENTS: Final = 1 << 25  # larger on a GPU: fewer steps
_MIN_BLOCK_ROWS: Final = 32  # a matrix product with fewer rows costs as much
_MAX_BLOCK_ELEMENTS: Final = 1 << 23  # for a block of so few rows
_MAX_ROW_GAP: Final = 8  # computing so many unused rows costs less than another block
_BINS_PER_CALL: Final = 64  # key bins per call of `attend`: the usual width of a head
_FEW_BINS: Final = 128  # up to here attending to bins costs less than reading every weight
_MAX_POOL_ELEMENTS: Final = 1 << 24  # of the values of such a call, or of its output


class _Matrix(NamedTuple):
    """The attention matrix of some heads of some items.

    Attributes:
        row_block: computes a block of its rows, (..., R, S).
        L: number of rows.
        at_once: number of rows in a block.
        is_stochastic: no weight is negative, and each row sums to 1, or to 0 if it sees no key.
    """

    row_block: Callable[[slice], Tensor]
    L: int
    at_once: int
    is_stochastic: bool

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields all rows: the range of each block, and the block."""
        for start in range(0, self.L, self.at_once):
            rows = slice(start, min(self.L, start + self.at_once))
            yield rows, self.row_block(rows)


def compute_weight_form(
    variant: Variant,
    form: WeightForm,
    arguments: Mapping[str, Any],
    parameters: pydantic.BaseModel,
    sizes: Mapping[str, int],
) -> dict[str, Tensor]:
    """Computes a form of the weights; returns its tensors by name.

    They equal those of the full matrix to within rounding. Memory beyond inputs and outputs does
    not grow with L times S.

    Args:
        variant: computes the weights.
        form: a summary of the weights.
        arguments: keyword arguments of the variant's `attend`, without `outputs`.
        parameters: those of them that are no tensors, in the catalogue's model.
        sizes: of every letter of one request. B is read from the tensors, which several requests
            may share.
    """
    given = [i.name for i in variant.inputs.values() if arguments.get(i.argument) is not None]
    if has_state := variant.state is not None and variant.state.argument in arguments:
        given += variant.tensors.keys() - variant.inputs.keys()
    stochastic = variant.weights_are(parameters, given) == "stochastic"
    weights, arguments = variant.outputs["weights"], variant.random_inputs(arguments)
    first = next(i for i in variant.inputs.values() if "B" in i.letters and not i.is_optional)
    first_tensor = arguments[first.argument]
    sizes = {**sizes, "B": first_tensor.shape[first.letters.index("B")]}
    arguments = place_planes(variant, arguments, sizes, first_tensor.device)
    form_sizes = weight_forms.form_sizes(form, weights, sizes)
    dtype = score_dtype(first_tensor.dtype)
    query, parts = weight_forms.query_axis(weights), weight_forms.form_tensors(form.kind, weights)
    tensors = {
        name: first_tensor.new_zeros(
            [form_sizes[x] for x in part.letters], dtype=torch.int64 if part.is_integer else dtype
        )
        for name, part in parts.items()
    }
    L, S = 1 if query is None else sizes[query], sizes[weights.letters[-1]]
    attends = (
        form.kind == "pool"
        and not has_state  # its values are not those of bins
        and _should_attend(variant, parameters, sizes, L * S, form_sizes["Q"])
    )
    elements = _block_elements(first_tensor.device)
    rows = max(1, min(len(form.rows) or L, _MIN_BLOCK_ROWS, _MAX_BLOCK_ELEMENTS // S))
    planes = elements // (rows * S)
    if attends:
        planes = _MAX_POOL_ELEMENTS // (max(L, S) * _BINS_PER_CALL)
    if not variant.has_row_blocks:  # its `attend` may depend on the number of a head
        planes = max(planes, sizes.get("H", 1))
    for places in _plane_blocks(sizes, weights.letters, max(1, planes)):
        block_arguments = slice_arguments(variant, arguments, sizes, places)
        into = {n: t[_index(places, parts[n].letters)] for n, t in tensors.items()}
        with of_items(places[0]):
            if attends:
                _pool_by_attending(variant, block_arguments, dtype, into["weights"])
                continue
            row_block = variant.row_block_function(block_arguments)
            if query is None:  # each batch item is a matrix of one row
                row_block = partial(_rows_of, row_block(slice(0, _plane_count(places)))[:, None])
                into = {n: t if n == "received" else t.unsqueeze(1) for n, t in into.items()}
            at_once = max(rows, elements // (_plane_count(places) * S))
            _MAKERS[form.kind](_Matrix(row_block, L, at_once, stochastic), form, into)
    return tensors


def _block_elements(device: torch.device) -> int:
    """Returns the number of elements of a block."""
    if device.type != "cpu":
        return _GPU_BLOCK_ELEMENTS
    return min(_CPU_BLOCK_ELEMENTS * torch.get_num_threads(), _MAX_BLOCK_ELEMENTS)


def _rows_of(whole_B1S: Tensor, rows: slice) -> Tensor:
    return whole_B1S[:, rows]


def _plane_count(places: Planes) -> int:
    items, heads = places
    return int((items.stop - items.start) * (heads.stop - heads.start))


def _plane_blocks(
    sizes: Mapping[str, int], letters: tuple[str, ...], at_once: int
) -> Iterator[Planes]:
    """Yields all batch items and heads, at most `at_once` planes at a time.

    A step has whole items if possible; else whole groups of heads that read the same heads of
    keys and values; else some heads of a group.
    """
    B, H = sizes["B"], sizes["H"] if "H" in letters else 1
    groups = {H // sizes[x] for x in HEADS & sizes.keys()} if H > 1 else {1}
    K = math.lcm(*groups)
    if at_once >= H:
        yield from ((items, slice(0, H)) for items in row_blocks(B, H, at_once))
        return
    some = [slice(0, H)] if at_once >= K else [slice(g, g + K) for g in range(0, H, K)]
    for b in range(B):
        for heads in some:
            # heads of one group may be cut anywhere, unless it has groups within it
            step = at_once // K * K or (at_once if groups <= {1, K} else 1)
            for start in range(heads.start, heads.stop, step):
                yield slice(b, b + 1), slice(start, min(heads.stop, start + step))


def _index(places: Planes, letters: tuple[str, ...]) -> tuple[slice, ...]:
    """Returns the index of these items and heads in a tensor with these axes."""
    where = dict(zip("BH", places, strict=True))
    return tuple(where.get(letter, slice(None)) for letter in letters)


def _keep_rows(matrix: _Matrix, form: WeightForm, into: Mapping[str, Tensor]) -> None:
    """Keeps the requested rows, in the requested order; computes close rows in one block."""
    weights = into["weights"]
    for rows in _row_ranges(sorted(set(form.rows)), matrix.at_once):
        at = [i for i, row in enumerate(form.rows) if rows.start <= row < rows.stop]
        at_X = _copy_to(weights.device, at)
        from_X = _copy_to(weights.device, [form.rows[i] - rows.start for i in at])
        weights[..., at_X, :] = matrix.row_block(rows)[..., from_X, :]


def _row_ranges(rows: list[int], max_rows: int) -> Iterator[slice]:
    """Yields few ranges, of at most `max_rows` rows each, that cover these rows and few others."""
    first = last = rows[0]
    for row in rows[1:]:
        if row - last > _MAX_ROW_GAP or row - first >= max_rows:
            yield slice(first, last + 1)
            first = row
        last = row
    yield slice(first, last + 1)


def _keep_largest(matrix: _Matrix, form: WeightForm, into: Mapping[str, Tensor]) -> None:
    """Keeps the k largest weights of each row and their indices; of equal weights the first.

    A weight of 0 has the index -1: no key of the row is behind it.
    """
    for rows, block in matrix.blocks():
        indices = _largest(_seen(matrix, block), form.size)
        weights = block.gather(-1, indices)
        into["indices"][..., rows, :] = indices.masked_fill_(weights == 0, -1)
        into["weights"][..., rows, :] = weights


def _seen(matrix: _Matrix, block: Tensor) -> Tensor:
    """Returns the weights in an order in which a key that a row does not see is below all others.

    Its weight is 0, which would be above the negative weights of other keys.
    """
    return block if matrix.is_stochastic else block.masked_fill(block == 0, -torch.inf)


def _largest(block_XRS: Tensor, k: int) -> Tensor:
    """Returns the indices of the k largest of each row, largest first; of equal ones the first."""
    if are_deferred():  # a whole sort does not need to know how many are equal
        ordered = block_XRS.masked_fill(block_XRS.isnan(), torch.inf)
        return ordered.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    largest, indices = block_XRS.topk(k, sorted=False)
    if largest.isnan().any():  # topk puts NaN first, but NaN is equal to nothing
        block_XRS = block_XRS.masked_fill(block_XRS.isnan(), torch.inf)
        largest, indices = block_XRS.topk(k, sorted=False)
    least = largest.amin(-1, keepdim=True)
    tied = torch.count_nonzero(block_XRS >= least, -1) > k  # topk omitted some equal weights
    indices = indices.sort(-1).values
    if tied.any():
        rows_nS, least_n1 = block_XRS[tied], least[tied]
        equal = rows_nS == least_n1
        room = k - torch.count_nonzero(rows_nS > least_n1, -1)[:, None]
        taken = (rows_nS > least_n1) | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))
        indices[tied] = taken.nonzero()[:, 1].view(-1, k)
    order = block_XRS.gather(-1, indices).sort(dim=-1, descending=True, stable=True).indices
    return indices.gather(-1, order)


def _keep_stats(matrix: _Matrix, form: WeightForm, into: Mapping[str, Tensor]) -> None:
    """Keeps statistics of each row, and the sum of each key's weights."""
    received = torch.zeros_like(into["received"], dtype=torch.float64)
    for rows, block in matrix.blocks():
        index = _seen(matrix, block).argmax(-1)
        largest = block.gather(-1, index[..., None])[..., 0]
        received += block.sum(-2)
        if not matrix.is_stochastic:  # absolute values over the largest: no sum of them overflows
            block = block.abs()
            maximum = block.amax(-1, keepdim=True)
            block = block.div_(maximum.masked_fill_(maximum == 0, 1.0))
        total = block.sum(-1)
        unseen = total == 0
        logs = block.clamp(min=torch.finfo(block.dtype).tiny).log_()  # 0 log 0 is 0
        total = total.masked_fill_(unseen, 1.0)
        entropy = (total.log() - logs.mul_(block).sum(-1) / total).clamp_(min=0)
        into["entropy"][..., rows] = entropy
        into["effective_keys"][..., rows] = entropy.exp().masked_fill_(unseen, 0.0)
        into["largest"][..., rows] = largest
        into["largest_index"][..., rows] = index.masked_fill_(largest == 0, -1)
    into["received"].copy_(received)


def _pool(matrix: _Matrix, form: WeightForm, into: Mapping[str, Tensor]) -> None:
    """Pools the weights: the mean over a bin's queries of the sum over a bin's keys. Sums over
    queries first."""
    weights = into["weights"]
    P, Q = weights.shape[-2:]
    edges = _bin_edges(matrix.L, P)
    p, received_XS = 0, weights.new_zeros((), dtype=torch.float64)
    for rows, block in matrix.blocks():
        start = rows.start
        while start < rows.stop:
            stop = min(rows.stop, edges[p + 1])
            part = block[..., start - rows.start : stop - rows.start, :]
            received_XS = part.sum(-2).double() + received_XS
            if stop == edges[p + 1]:
                weights[..., p, :] = _sum_bins(received_XS, Q) / (stop - edges[p])
                p, received_XS = p + 1, weights.new_zeros((), dtype=torch.float64)
            start = stop


def _should_attend(
    variant: Variant,
    parameters: pydantic.BaseModel,
    sizes: Mapping[str, int],
    pairs: int,
    bins: int,
) -> bool:
    """Returns True if attending to bins in place of values is possible, and faster than reading
    every weight: if the variant never computes all scores, or if the bins are few."""
    weights, value = variant.outputs["weights"], variant.inputs.get("value")
    if value is None or value.letters[-2] != weights.letters[-1] or value.is_optional:
        return False
    if not variant.has_free_value_width:
        return False
    planes = sizes["B"] * sizes.get("H", 1)
    return bins <= _FEW_BINS or variant.score_count(sizes, parameters) < planes * pairs


def _pool_by_attending(
    variant: Variant, arguments: Mapping[str, Any], dtype: torch.dtype, into: Tensor
) -> None:
    """Pools by sum_j A_ij [j is in the bin], the output of `attend` for such values."""
    score_arguments = {
        i.argument: arguments[i.argument].to(dtype)
        for i in variant.inputs.values()
        if (t := arguments.get(i.argument)) is not None
        and t.is_floating_point()
        and not i.broadcasts
    }
    value, (P, Q) = arguments[variant.inputs["value"].argument], into.shape[-2:]
    S = value.shape[-2]
    bin_S = torch.arange(S, device=value.device) * Q // S
    for start in range(0, Q, _BINS_PER_CALL):
        bins = torch.arange(start, min(Q, start + _BINS_PER_CALL), device=value.device)
        inside_SQ = (bin_S[:, None] == bins).to(dtype)
        bins_as_values = inside_SQ.expand(*value.shape[:-1], -1).contiguous()
        bin_arguments = {**arguments, **score_arguments}
        bin_arguments[variant.inputs["value"].argument] = bins_as_values
        output = variant.attend(**bin_arguments, outputs=frozenset({"output"})).output
        L = output.shape[-2]
        counts_P1 = _copy_to(value.device, _bin_edges(L, P)).diff()[:, None]
        into[..., start : start + len(bins)] = _sum_bins(output.double().mT, P).mT / counts_P1


def _copy_to(device: torch.device, numbers: list[int]) -> Tensor:
    """Returns numbers as a tensor of the device; does not wait for it."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def _bin_edges(n: int, bins: int) -> list[int]:
    """Returns the start of each bin, and the end of the last: position i of n is in bin
    i * bins // n."""
    return [-(-b * n // bins) for b in range(bins + 1)]


def _sum_bins(x_XN: Tensor, bins: int) -> Tensor:
    """Sums over the bins of the last axis."""
    n = x_XN.shape[-1]
    if n % bins == 0:
        return torch.sum(x_XN.unflatten(-1, (bins, -1)), -1)
    edges = _copy_to(x_XN.device, _bin_edges(n, bins))
    at = edges[:-1, None] + torch.arange(-(-n // bins), device=x_XN.device)
    at = torch.where(at < edges[1:, None], at, n)  # index n reads the zero of the padding
    return torch.sum(pad(x_XN, (0, 1)).index_select(-1, at.flatten()).unflatten(-1, at.shape), -1)


_MAKERS: Final[Mapping[str, Callable[[_Matrix, WeightForm, Mapping[str, Tensor]], None]]] = {
    "rows": _keep_rows,
    "top_k": _keep_largest,
    "stats": _keep_stats,
    "pool": _pool,
}
