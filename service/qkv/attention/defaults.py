"""Default parts of a variant that its file leaves out: outputs, gradients and flops.

`variant.Variant` uses them, and `identity_weights`. Each calls only the file's `attend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qkv.attention.signature import Input, Output, fixed_size

RowBlock = Callable[[slice], Tensor]


class CompleteAttend:
    """A file's `attend`, called as the engine calls each variant.

    It takes the set `outputs`, and returns an object with the variant's outputs as attributes. An
    output that is not requested is None.

    Args:
        name: of the variant.
        attend: the file's function.
        inputs: of the variant.
        outputs: of the variant; `weights` is computed by `weights` if `attend` does not return it.
        returned: the outputs that `attend` returns; None: it returns the output itself.
        takes_outputs: `attend` has the argument `outputs`.
        weights: returns the function that computes a block of rows of the weights.
    """

    def __init__(
        self,
        name: str,
        attend: Callable[..., Any],
        inputs: Mapping[str, Input],
        outputs: Mapping[str, Output],
        returned: frozenset[str] | None,
        takes_outputs: bool,
        weights: Callable[[Mapping[str, Any]], RowBlock],
    ) -> None:
        self._name, self._attend, self._weights = name, attend, weights
        self._inputs, self._outputs = inputs, outputs
        self._returned = returned
        self._takes_outputs = takes_outputs

    def __call__(
        self, *, outputs: frozenset[str] = frozenset({"output"}), **arguments: Any
    ) -> SimpleNamespace:
        """Computes the outputs. The arguments are those of the file's `attend`.

        Raises:
            ValueError: a tensor's shape is not that of its annotation.
        """
        returned = outputs & ({"output"} if self._returned is None else self._returned)
        values: dict[str, Any] = {**dict.fromkeys(self._outputs), "backend": "explicit"}
        if returned:
            selected = {"outputs": returned} if self._takes_outputs else {}
            result = self._attend(**arguments, **selected)
            if self._returned is None:
                values["output"] = result
            else:
                values |= {name: getattr(result, name) for name in returned}
                values["backend"] = getattr(result, "backend", "explicit")
        sizes = self._sizes(arguments)
        if "weights" in outputs - returned:
            rows = sizes[self._outputs["weights"].letters[-2]]
            values["weights"] = self._weights(arguments)(slice(0, rows))
        for name in outputs:
            self._check_shape(name, values[name], sizes)
        return SimpleNamespace(**values)

    def _sizes(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for spec in self._inputs.values():
            if not spec.broadcasts and (tensor := arguments.get(spec.argument)) is not None:
                sizes.update(zip(spec.letters, tensor.shape, strict=True))
        return sizes

    def _check_shape(self, name: str, tensor: Any, sizes: Mapping[str, int]) -> None:
        letters = self._outputs[name].letters
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{self._name}: attend's {name} is a {type(tensor).__name__}")
        expected = [fixed_size(x) or sizes.get(x) for x in letters]
        if len(expected) != tensor.ndim or any(
            size not in (None, actual) for size, actual in zip(expected, tensor.shape, strict=True)
        ):
            raise ValueError(
                f"{self._name}: attend's {name} has shape {list(tensor.shape)}: expected "
                f"({', '.join(letters)}), {expected}"
            )


def backward_by_autograd(
    attend: Callable[..., Tensor],
    inputs: Mapping[str, Input],
    grad_output: Tensor,
    **arguments: Any,
) -> dict[str, Tensor]:
    """Returns the gradients of sum(grad_output * output), by autograd of `attend` in float64.

    Args:
        attend: returns the output; takes the arguments.
        inputs: of the variant.
        grad_output: the gradient of the output.
        arguments: of `attend`.

    Returns:
        By wire name, for each floating input among the arguments, in its shape.
    """
    with torch.inference_mode(False), torch.enable_grad():
        copies = dict(arguments)
        leaves = {}
        for name, value in arguments.items():  # copies: autograd cannot save inference tensors
            if isinstance(value, Tensor):
                is_floating = value.is_floating_point()
                copies[name] = value.to(torch.float64, copy=True) if is_floating else value.clone()
        for spec in inputs.values():
            tensor = copies.get(spec.argument)
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                leaves[spec.name] = tensor.requires_grad_()
        output = attend(**copies)
        if not output.requires_grad:  # it depends on no input in a differentiable way
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        gradients = torch.autograd.grad(
            output, list(leaves.values()), grad_output.to(output.dtype, copy=True),
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
    return dict(zip(leaves, gradients, strict=True))


def flop_counter(
    attend: Callable[..., Any], inputs: Mapping[str, Input], weights: Output | None
) -> Callable[[Mapping[str, int]], int]:
    """Returns a function from axis sizes to the floating-point operations of matrix products.

    torch counts them on tensors without data, once for each combination of sizes. If `attend`
    cannot run on such tensors, the count is that of the products Q K^T and A V.

    Args:
        attend: takes the required inputs.
        inputs: of the variant.
        weights: the output with that name, if there is one.
    """
    required = [i for i in inputs.values() if not i.is_optional]

    @functools.lru_cache(4096)
    def count(shapes: tuple[tuple[int, ...], ...], pairs: int, widths: int) -> int:
        from torch.utils.flop_counter import FlopCounterMode  # its import takes a second

        tensors = {
            i.argument: torch.empty(shape, dtype=_meta_dtype(i), device="meta")
            for i, shape in zip(required, shapes, strict=True)
        }
        elements = sum(t.numel() for t in tensors.values())
        try:
            with torch.inference_mode(False), torch.no_grad(), FlopCounterMode(display=False) as c:
                attend(**tensors)
            counted = int(c.get_total_flops())
        except Exception:  # such as a branch on numbers
            counted = 2 * pairs * widths
        return counted or elements  # without a product: each element is read at least once

    def flops(sizes: Mapping[str, int]) -> int:
        shapes = tuple(tuple(fixed_size(x) or int(sizes[x]) for x in i.letters) for i in required)
        pairs = 0
        if weights is not None:
            pairs = torch.Size(fixed_size(x) or int(sizes[x]) for x in weights.letters).numel()
        return count(shapes, pairs, int(sizes.get("D", 1)) + int(sizes.get("E", 1)))

    return flops


def _meta_dtype(spec: Input) -> torch.dtype:
    known = spec.dtypes
    dtype: torch.dtype = getattr(torch, "float32" if "float32" in known else known[0])
    return dtype
