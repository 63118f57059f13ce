"""The forms of the weights other than the whole matrix, made of it a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import pydantic
import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv.attention.catalogue import Variant
from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.visibility import row_blocks
from qkv.jobs import weight_forms as forms
from qkv.jobs.weight_forms import Form

__all__ = ["made"]

_ON_CPU: Final = 1 << 20  # elements of a block, for each thread: what stays in its cache
_ELSEWHERE: Final = 1 << 25  # on what works on its own: fewer, larger steps
_ROWS: Final = 32  # of a block, at least: products of fewer cost as much
_MOST: Final = 1 << 23  # elements of a block of so few rows
_GAP: Final = 8  # rows that are made and left cost less than another block
_BINS: Final = 64  # of keys, that one call attends to: a head's usual width
_FEW: Final = 128  # bins, up to which attending to them costs less than looking at every weight
_HELD: Final = 1 << 24  # numbers of such a call's values, or of its output


class _Matrix(NamedTuple):
    """The attention matrix of some heads of some items.

    Attributes:
        rows_of: makes a block of its rows, (..., R, S).
        L: how many rows it has.
        at_once: how many of them make a block.
        is_stochastic: no weight is negative, and a row's sum is 1, or 0 where it sees nothing.
    """

    rows_of: Callable[[slice], Tensor]
    L: int
    at_once: int
    is_stochastic: bool

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All of it: which rows, and they."""
        for start in range(0, self.L, self.at_once):
            rows = slice(start, min(self.L, start + self.at_once))
            yield rows, self.rows_of(rows)


def made(
    variant: Variant,
    form: Form,
    arguments: Mapping[str, Any],
    parameters: pydantic.BaseModel,
    sizes: Mapping[str, int],
) -> dict[str, Tensor]:
    """A form of the weights, by the names of its parts.

    Each is what the whole matrix gives, to within rounding; memory beside inputs and answer does
    not grow with L times S.

    Args:
        variant: whose weights.
        form: which; a digest.
        arguments: what the variant's `attend` takes, but for `outputs`.
        parameters: those of them that are no tensors, as the catalogue has them.
        sizes: of every letter of one request; B is read from the tensors, which may be several's.
    """
    weights, arguments = variant.outputs["weights"], variant.drawn(arguments)
    first = next(i for i in variant.inputs.values() if "B" in i.letters and not i.optional)
    came = arguments[first.argument]
    sizes = {**sizes, "B": came.shape[first.letters.index("B")]}
    if variant.takes_place and arguments.get("place_BH") is None:
        place = torch.arange(sizes["B"] * sizes["H"], device=came.device)
        arguments["place_BH"] = place.view(sizes["B"], sizes["H"])
    extents, dtype = forms.extents(form, weights, sizes), score_dtype(came.dtype)
    query, parts = forms.query_axis(weights), forms.parts(form.kind, weights)
    answer = {
        name: came.new_zeros(
            [extents[x] for x in part.letters], dtype=torch.int64 if part.is_whole else dtype
        )
        for name, part in parts.items()
    }
    L, S = 1 if query is None else sizes[query], sizes[weights.letters[-1]]
    attends = form.kind == "pool" and _attends(variant, parameters, sizes, L * S, extents["Q"])
    elements = _elements(came.device)
    rows = max(1, min(len(form.rows) or L, _ROWS, _MOST // S))
    planes = _HELD // (max(L, S) * _BINS) if attends else elements // (rows * S)
    for places in _planes(sizes, weights.letters, max(1, planes)):
        own = _sliced(variant, arguments, sizes, places)
        into = {n: t[_at(places, parts[n].letters)] for n, t in answer.items()}
        if attends:
            _pool_by_attending(variant, own, dtype, into["weights"])
            continue
        rows_of = variant.rows_of(own)
        if query is None:  # each item is a matrix of one row
            rows_of = partial(_rows_of, rows_of(slice(0, _count(places)))[:, None])
            into = {n: t if n == "received" else t.unsqueeze(1) for n, t in into.items()}
        at_once = max(rows, elements // (_count(places) * S))
        stochastic = variant.weights_are(parameters) == "stochastic"
        _MAKERS[form.kind](_Matrix(rows_of, L, at_once, stochastic), form, into)
    return answer


def _elements(device: torch.device) -> int:
    """Of a block."""
    if device.type != "cpu":
        return _ELSEWHERE
    return min(_ON_CPU * torch.get_num_threads(), _MOST)


def _rows_of(whole_B1S: Tensor, rows: slice) -> Tensor:
    return whole_B1S[:, rows]


_Places = tuple[slice, slice]  # items, heads


def _count(places: _Places) -> int:
    items, heads = places
    return int((items.stop - items.start) * (heads.stop - heads.start))


def _planes(sizes: Mapping[str, int], letters: tuple[str, ...], at_once: int) -> Iterator[_Places]:
    """All items and heads, so many at a time: whole items, else whole key heads with the query
    heads that read them, else some of those."""
    B, H = sizes["B"], sizes["H"] if "H" in letters else 1
    K = H // sizes.get("G", H)
    if at_once >= H:
        yield from ((items, slice(0, H)) for items in row_blocks(B, H, at_once))
        return
    some = [slice(0, H)] if at_once >= K else [slice(g, g + K) for g in range(0, H, K)]
    for b in range(B):
        for heads in some:
            step = at_once // K * K or at_once
            for start in range(heads.start, heads.stop, step):
                yield slice(b, b + 1), slice(start, min(heads.stop, start + step))


def _at(places: _Places, letters: tuple[str, ...]) -> tuple[slice, ...]:
    """Where they are in a tensor of these axes."""
    where = dict(zip("BH", places, strict=True))
    return tuple(where.get(letter, slice(None)) for letter in letters)


def _sliced(
    variant: Variant, arguments: Mapping[str, Any], sizes: Mapping[str, int], places: _Places
) -> dict[str, Any]:
    """The arguments of these items and heads alone."""
    items, heads = places
    K = sizes.get("H", 1) // sizes.get("G", sizes.get("H", 1))
    where = {"B": items, "H": heads, "G": slice(heads.start // K, -(-heads.stop // K))}
    own = dict(arguments)
    for spec in variant.inputs.values():
        if (tensor := arguments.get(spec.argument)) is not None:
            axes = zip(spec.letters, tensor.shape, strict=True)
            own[spec.argument] = tensor[
                tuple(
                    slice(None) if size == 1 else where.get(letter, slice(None))
                    for letter, size in axes
                )
            ]
    if variant.takes_place:
        own["place_BH"] = arguments["place_BH"][items, heads]
    return own


def _keep_rows(matrix: _Matrix, form: Form, into: Mapping[str, Tensor]) -> None:
    """Those asked for, in that order: neighbours together."""
    wanted_R, weights = torch.tensor(form.rows, device=into["weights"].device), into["weights"]
    for rows in _runs(sorted(set(form.rows)), matrix.at_once):
        (at_X,) = torch.where((wanted_R >= rows.start) & (wanted_R < rows.stop))
        weights[..., at_X, :] = matrix.rows_of(rows)[..., wanted_R[at_X] - rows.start, :]


def _runs(rows: list[int], most: int) -> Iterator[slice]:
    """Few ranges, of at most so many rows each, that hold all these rows, and few others."""
    first = last = rows[0]
    for row in rows[1:]:
        if row - last > _GAP or row - first >= most:
            yield slice(first, last + 1)
            first = row
        last = row
    yield slice(first, last + 1)


def _keep_largest(matrix: _Matrix, form: Form, into: Mapping[str, Tensor]) -> None:
    """The k largest of each row, and where they are; of equal ones the first."""
    for rows, block in matrix.blocks():
        indices = _largest(block, form.size)
        into["indices"][..., rows, :] = indices
        into["weights"][..., rows, :] = block.gather(-1, indices)


def _largest(block_XRS: Tensor, k: int) -> Tensor:
    """Where the k largest of each row are: the largest first, and of equal ones the first."""
    found, indices = block_XRS.topk(k, sorted=False)
    if found.isnan().any():  # counts as largest, but is equal to nothing
        block_XRS = block_XRS.masked_fill(block_XRS.isnan(), torch.inf)
        found, indices = block_XRS.topk(k, sorted=False)
    least = found.amin(-1, keepdim=True)
    tied = torch.count_nonzero(block_XRS >= least, -1) > k  # some that are as large were left out
    indices = indices.sort(-1).values
    if tied.any():
        rows_nS, least_n1 = block_XRS[tied], least[tied]
        equal = rows_nS == least_n1
        room = k - torch.count_nonzero(rows_nS > least_n1, -1)[:, None]
        taken = (rows_nS > least_n1) | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))
        indices[tied] = taken.nonzero()[:, 1].view(-1, k)
    order = block_XRS.gather(-1, indices).sort(dim=-1, descending=True, stable=True).indices
    return indices.gather(-1, order)


def _keep_stats(matrix: _Matrix, form: Form, into: Mapping[str, Tensor]) -> None:
    """Statistics of each row, and each key's sum."""
    received = torch.zeros_like(into["received"], dtype=torch.float64)
    for rows, block in matrix.blocks():
        largest, index = block.max(-1)
        received += block.sum(-2)
        if not matrix.is_stochastic:  # of sizes, over the largest: no sum of them overflows
            block = block.abs()
            most = block.amax(-1, keepdim=True)
            block = block.div_(most.masked_fill_(most == 0, 1.0))
        total = block.sum(-1)
        unseen = total == 0
        logs = block.clamp(min=torch.finfo(block.dtype).tiny).log_()  # 0 log 0 is 0
        total = total.masked_fill_(unseen, 1.0)
        entropy = (total.log() - logs.mul_(block).sum(-1) / total).clamp_(min=0)
        into["entropy"][..., rows] = entropy
        into["effective_keys"][..., rows] = entropy.exp().masked_fill_(unseen, 0.0)
        into["largest"][..., rows] = largest
        into["largest_index"][..., rows] = index.masked_fill_(unseen, -1)
    into["received"].copy_(received)


def _pool(matrix: _Matrix, form: Form, into: Mapping[str, Tensor]) -> None:
    """The mean over a bin's queries of what its keys' bin receives: sums over queries first."""
    weights = into["weights"]
    P, Q = weights.shape[-2:]
    edges = _edges(matrix.L, P)
    own, received_XS = 0, torch.zeros(())
    for rows, block in matrix.blocks():
        start = rows.start
        while start < rows.stop:
            stop = min(rows.stop, edges[own + 1])
            part = block[..., start - rows.start : stop - rows.start, :]
            received_XS = part.sum(-2).double() + received_XS.to(part.device)
            if stop == edges[own + 1]:
                weights[..., own, :] = _binned(received_XS, Q) / (stop - edges[own])
                own, received_XS = own + 1, torch.zeros(())
            start = stop


def _attends(
    variant: Variant,
    parameters: pydantic.BaseModel,
    sizes: Mapping[str, int],
    pairs: int,
    bins: int,
) -> bool:
    """Whether to attend to the bins in place of values is right, and sooner done than to look at
    every weight: where those are never made, or the bins are few."""
    weights, value = variant.outputs["weights"], variant.inputs.get("value")
    if value is None or value.letters[-2] != weights.letters[-1] or value.optional:
        return False
    planes = sizes["B"] * sizes.get("H", 1)
    return bins <= _FEW or variant.pairs(sizes, parameters) < planes * pairs


def _pool_by_attending(
    variant: Variant, arguments: Mapping[str, Any], dtype: torch.dtype, into: Tensor
) -> None:
    """The same by sum_j A_ij [j is in the bin]: what `attend` makes of such values."""
    widened = {
        i.argument: arguments[i.argument].to(dtype)
        for i in variant.inputs.values()
        if (t := arguments.get(i.argument)) is not None
        and t.is_floating_point()
        and not i.broadcasts
    }
    value, (P, Q) = arguments[variant.inputs["value"].argument], into.shape[-2:]
    S = value.shape[-2]
    bin_S = torch.arange(S, device=value.device) * Q // S
    for start in range(0, Q, _BINS):
        bins = torch.arange(start, min(Q, start + _BINS), device=value.device)
        inside_SQ = (bin_S[:, None] == bins).to(dtype)
        own = {**arguments, **widened}
        own[variant.inputs["value"].argument] = inside_SQ.expand(*value.shape[:-1], -1).contiguous()
        output = variant.attend(**own, outputs=frozenset({"output"})).output
        L = output.shape[-2]
        counts_P1 = torch.tensor(_edges(L, P), device=value.device).diff()[:, None]
        into[..., start : start + len(bins)] = _binned(output.double().mT, P).mT / counts_P1


def _edges(n: int, bins: int) -> list[int]:
    """Where bins begin, and where the last one ends: position i of n lies in i * bins // n."""
    return [-(-b * n // bins) for b in range(bins + 1)]


def _binned(x_XN: Tensor, bins: int) -> Tensor:
    """Sums over the bins of the last axis."""
    n = x_XN.shape[-1]
    if n % bins == 0:
        return torch.sum(x_XN.unflatten(-1, (bins, -1)), -1)
    edges = torch.tensor(_edges(n, bins), device=x_XN.device)
    at = edges[:-1, None] + torch.arange(-(-n // bins), device=x_XN.device)
    at = torch.where(at < edges[1:, None], at, n)  # past the end are zeros
    return torch.sum(pad(x_XN, (0, 1)).index_select(-1, at.flatten()).unflatten(-1, at.shape), -1)


_MAKERS: Final[Mapping[str, Callable[[_Matrix, Form, Mapping[str, Tensor]], None]]] = {
    "rows": _keep_rows,
    "top_k": _keep_largest,
    "stats": _keep_stats,
    "pool": _pool,
}
