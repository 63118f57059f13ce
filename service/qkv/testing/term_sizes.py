"""`TermSizes`: the sizes of the terms that torch's operations add up, beside their results.

The size of a sum is the sum of the sizes of its terms, and the size of a product is the product of
their sizes. Rounding errors are in proportion to it, also where terms cancel and the order of a sum
is free (Higham, Accuracy and Stability of Numerical Algorithms, 2002, sections 3.1 and 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class TermSizes(TorchDispatchMode):
    """The size of each float64 number that an operation in a `with` block returns.

    The numbers are computed as without the block. The size of a number from elsewhere is its
    absolute value. So is that of a result of an operation that `_SUMS` and `_RULES` lack.

    Args:
        least: the smallest size of an exponential. Below the smallest normal number of a dtype,
            errors do not become smaller with the numbers.

    Attributes:
        unknown: the names of operations that ran and that no table of this file has: if their terms
            cancel, the sizes forget it.
    """

    def __init__(self, least: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.least = least
        self.unknown: set[str] = set()
        # by address. The sizes of a storage lie where its numbers lie, so that views of it and
        # operations in place find them
        self._kept: dict[int, tuple[StorageWeakRef, Tensor]] = {}

    def of(self, x: Any) -> Any:
        """Returns the sizes of a tensor's numbers, in its shape; anything else as it is."""
        if isinstance(x, list | tuple):
            return [self.of(each) for each in x]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        reference, sizes = self._kept.get(x.untyped_storage().data_ptr(), (None, None))
        if sizes is None or reference is None or reference.expired():
            return x.abs()
        return sizes.as_strided(x.shape, x.stride(), x.storage_offset())

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        """Runs an operation, and keeps the sizes of its result."""
        keywords = keywords or {}
        name = operation.overloadpacket.__name__.removesuffix("_")
        if operation.is_view or name == "_unsafe_view":
            return operation(*arguments, **keywords)
        # before the operation, which may change its arguments
        size = self._size_of_result(name, arguments, keywords)
        result = operation(*arguments, **keywords)
        if _is_number(result):
            self._keep(result, result.abs() if size is None else size)
        return result

    def _size_of_result(
        self, name: str, arguments: Any, keywords: Mapping[str, Any]
    ) -> Tensor | None:
        """Returns the sizes of an operation's result; None if it forgets its terms."""
        if name in _RULES:
            size: Tensor = _RULES[name](self, *arguments)
            return size
        if name not in _SUMS:
            self.unknown |= {name} - _SINGLE
            return None
        options = {n: x for n, x in keywords.items() if n != "out"}
        size = getattr(torch.ops.aten, name)(*self.of(arguments), **options)
        return size.abs_() if _is_number(size) else None

    def _keep(self, result: Tensor, size: Tensor) -> None:
        storage = result.untyped_storage()
        reference, sizes = self._kept.get(storage.data_ptr(), (None, None))
        if sizes is None or reference is None or reference.expired():
            sizes = torch.zeros(storage.nbytes() // 8, dtype=torch.float64)
            self._kept[storage.data_ptr()] = StorageWeakRef(storage), sizes
        sizes.as_strided(result.shape, result.stride(), result.storage_offset()).copy_(size)


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float64


def _added(sizes: TermSizes, x: Tensor, y: Tensor | float) -> Any:
    return sizes.of(x) + (sizes.of(y) if isinstance(y, Tensor) else abs(y))


def _quotient(sizes: TermSizes, x: Tensor, y: Tensor | float) -> Any:
    """Returns the size of x / y: where the terms of y cancel, it grows by their share.

    It is no product of sizes: an error of a divisor moves all that it divides by one factor.
    """
    if not isinstance(y, Tensor):
        return sizes.of(x) / abs(y)
    share = (sizes.of(y) / y.abs()).nan_to_num(nan=1.0, posinf=1.0)
    return (sizes.of(x) + x.abs() * (share - 1)) / y.abs()


def _power(sizes: TermSizes, x: Tensor, exponent: float) -> Any:
    """Returns the size of a power: of a square its own, since it is a square of an input's channel.

    The error of a channel is that of the moved inputs (`condition`).
    """
    return sizes.of(x) if exponent == 1 else x.abs() ** exponent


def _sum(sizes: TermSizes, x: Tensor, *axes: Any) -> Tensor:
    total: Tensor = sizes.of(x).sum(*axes)
    return total


def _copied(sizes: TermSizes, to: Tensor, x: Tensor, *rest: Any) -> Any:
    return sizes.of(x).expand_as(to)


def _exponential(sizes: TermSizes, x: Tensor) -> Tensor:
    return _at_least(sizes.least, x.exp())


def _softmax(sizes: TermSizes, x: Tensor, axis: int, *rest: Any) -> Tensor:
    return _at_least(sizes.least, x.softmax(axis))


def _at_least(least: float, x: Tensor) -> Tensor:
    """Returns numbers of at least this size; 0, of what is hidden, stays 0."""
    return torch.where(x == 0, 0.0, x.clamp(min=least))


def _slope_of_softmax(sizes: TermSizes, grad: Tensor, y: Tensor, axis: int, *rest: Any) -> Tensor:
    terms = sizes.of(grad)
    slope: Tensor = y * (terms + (terms * y).sum(axis, keepdim=True))
    return slope


_SUMS: Final = frozenset({
    "_to_copy", "addmm", "addmv", "baddbmm", "bmm", "cat", "clone", "constant_pad_nd",
    "cumsum", "dot", "flip", "gather", "index", "index_put", "linalg_vector_norm", "masked_fill",
    "mean", "mm", "mul", "mv", "neg", "repeat", "select_backward", "slice_backward", "stack",
    "tril", "triu", "where",
})  # fmt: skip
"""Operations that add, multiply or move numbers: those of the sizes give the size."""

_SINGLE: Final = frozenset({
    "all", "amax", "arange", "argmax", "bitwise_and", "bitwise_not", "bitwise_or", "clamp", "eq",
    "eye", "full", "full_like", "ge", "gt", "le", "log", "lt", "maximum", "new_full", "new_ones",
    "new_zeros", "ones_like", "reciprocal", "scalar_tensor", "sign", "sqrt", "tanh", "zeros",
    "zeros_like",
})  # fmt: skip
"""Operations without a sum, whose result has one term: itself."""

_RULES: Final[Mapping[str, Callable[..., Any]]] = {
    "add": _added, "sub": _added, "rsub": _added, "div": _quotient, "copy": _copied, "sum": _sum,
    "pow": _power, "exp": _exponential, "_softmax": _softmax,
    "_softmax_backward_data": _slope_of_softmax,
    "abs": lambda sizes, x: sizes.of(x),
    "nan_to_num": lambda sizes, x, *to: sizes.of(x).nan_to_num(*to),
    # A right function may compute 1 - sigmoid(x), 1 - tanh(x)^2 and elu(x) + 1, which have terms of
    # size 1. The first argument of their derivatives is a factor of the result
    "sigmoid": lambda sizes, x: torch.ones_like(x),
    "sigmoid_backward": lambda sizes, grad, y: sizes.of(grad) * y.abs(),
    "tanh_backward": lambda sizes, grad, *rest: sizes.of(grad),
    "elu_backward": lambda sizes, grad, *rest: sizes.of(grad),
}  # fmt: skip
"""The other operations with terms, by name: functions of the sizes and the arguments."""
