"""The run of a real attention module: its tensors, inputs, output and gradients.

The module runs twice, in float32 and in float64. The float64 run is the truth; the float32 run
shows which error is normal.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

BATCH: Final = 2
LENGTH: Final = 11


class Run:
    """Results of one run of a module.

    Attributes:
        output: of the whole attention block (B, L, M), output projection included.
        gradients: of sum(grad_output * output): of each input, and of each parameter of the
            block by its whole name.
    """

    def __init__(
        self,
        case: RealModule,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        grad_output: Tensor,
    ) -> None:
        dtype = next(model.parameters()).dtype
        captured = case.capture(model)[1] if case.feed is not None else {}
        leaves = {n: x.to(dtype, copy=True).requires_grad_() for n, x in inputs.items()}
        block = model.get_submodule(case.path)
        prefix = f"{case.path}." if case.path else ""
        parameters = {case.renamed(prefix + n): p for n, p in block.named_parameters()}
        output = case.run(block, leaves, captured)
        everything = leaves | parameters
        found = torch.autograd.grad(
            (output * grad_output.to(dtype)).sum(), list(everything.values()), allow_unused=True
        )
        self.output = output.detach()
        self.gradients = {n: g for n, g in zip(everything, found, strict=True) if g is not None}


def call_module(
    block: nn.Module, inputs: Mapping[str, Tensor], captured: Mapping[str, Any]
) -> Tensor:
    """Calls a block as its model did, with x as its first argument."""
    arguments = dict(captured)
    if arguments:
        arguments[next(iter(arguments))] = inputs["x"]
        output = block(**arguments)
    else:
        output = block(inputs["x"])
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def random_x(width: int = 32) -> dict[str, Tensor]:
    """Returns normal hidden states (B, L, M)."""
    generator = torch.Generator().manual_seed(2)
    return {"x": torch.randn(BATCH, LENGTH, width, generator=generator)}


@dataclass(frozen=True, eq=False)
class RealModule:
    """A real attention block, with the fields of the request that makes a service run it.

    Attributes:
        name: of the case.
        source: library and class.
        shows: the kinds of tensors and positions in it.
        layout: of its tensors.
        build: returns the model that has it; the weights are drawn afterwards.
        path: of the block in the model, which is the prefix of its tensors.
        fields: of `layer`, beside layout, prefix and tensors.
        parameters: of the variant.
        feed: runs the model, so that the block's arguments can be captured; None: the block gets
            `inputs` alone.
        inputs: returns the embeddings if there is no `feed`.
        run: calls the block with inputs and captured arguments.
        auto: the layouts that its names and shapes fit; empty: only its own.
        keep: the beginning of the names that are sent.
        renames: parts of names, and what stands for them in the tensors that are sent.
        has_own_weights: True if the model's weights are those of `build`.
    """

    name: str
    source: str
    shows: str
    layout: str
    build: Callable[[], nn.Module]
    path: str
    fields: Mapping[str, Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    feed: Callable[[Any], object] | None = None
    inputs: Callable[[], dict[str, Tensor]] = random_x
    run: Callable[[Any, Mapping[str, Tensor], Mapping[str, Any]], Tensor] = call_module
    auto: Sequence[str] = ()
    keep: str = ""
    renames: Mapping[str, str] = field(default_factory=dict)
    has_own_weights: bool = False

    @cached_property
    def model(self) -> nn.Module:
        """The model in float32."""
        model = self.build().float().eval()
        if not self.has_own_weights:
            _draw_weights(model)
        return model

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The model's state dict."""
        found = self.model.state_dict().items()
        return {self.renamed(n): tensor for n, tensor in found if n.startswith(self.keep)}

    @cached_property
    def embeddings(self) -> dict[str, Tensor]:
        """The inputs of the block in float32: x (B, L, M), or query, key and value."""
        return self.inputs() if self.feed is None else {"x": self.capture(self.model)[0]}

    @cached_property
    def grad_output(self) -> Tensor:
        """A random gradient of the output, in float32."""
        with torch.no_grad():
            captured = self.capture(self.model)[1] if self.feed is not None else {}
            block = self.model.get_submodule(self.path)
            output = self.run(block, self.embeddings, captured)
        return torch.randn(output.shape, generator=torch.Generator().manual_seed(3))

    @cached_property
    def narrow(self) -> Run:
        """The run in float32."""
        return Run(self, self.model, self.embeddings, self.grad_output)

    @cached_property
    def truth(self) -> Run:
        """The run in float64."""
        weights, embeddings, grad = self.model.state_dict(), self.embeddings, self.grad_output
        with _in_float64():
            model = self.build().double().eval()
            model.load_state_dict(weights)
            return Run(self, model, embeddings, grad)

    def renamed(self, name: str) -> str:
        """Returns the name under which a tensor of the model is sent."""
        for part, other in self.renames.items():
            name = name.replace(part, other)
        return name

    @property
    def layer(self) -> dict[str, Any]:
        """The field `layer` of a request, with the whole state dict."""
        return {
            "layout": self.layout, "prefix": self.path, **self.fields, "tensors": self.tensors
        }  # fmt: skip

    @property
    def roundings(self) -> int:
        """The number of products that are summed, one after the other, into an output."""
        weights = [t for n, t in self.narrow.gradients.items() if t.dim() == 2]
        return sum(max(w.shape) for w in weights) + LENGTH + max(self.grad_output.shape)

    def capture(self, model: nn.Module) -> tuple[Tensor, dict[str, Any]]:
        """Returns the hidden states that reach the block, and all its arguments by name."""
        assert self.feed is not None
        block = model.get_submodule(self.path)
        seen: list[dict[str, Any]] = []

        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
            named = dict(bound.arguments)
            named |= named.pop("kwargs", {})
            seen.append(named)
            raise _Captured

        hook = block.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with torch.no_grad(), contextlib.suppress(_Captured):
                self.feed(model)
        finally:
            hook.remove()
        (arguments,) = seen
        return next(iter(arguments.values())), arguments


class _Captured(Exception):
    """Ends a model's run when its block is reached."""


def largest_error(found: Tensor, truth: Tensor, scale: float | None = None) -> float:
    """Returns the largest error, relative to the largest true value or to `scale`."""
    size = float(truth.abs().max()) if scale is None else scale
    return float((found.double() - truth).abs().max()) / size


def _draw_weights(model: nn.Module) -> None:
    """Draws weights of a size at which scores and norms matter, unlike those of a fresh model."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            numbers = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                numbers = numbers * 1.5 / parameter.shape[-1] ** 0.5
            else:
                numbers = 0.3 * numbers + ("norm" in name.lower() and name.endswith("weight"))
            parameter.copy_(numbers)


class _Float64(TorchFunctionMode):
    """Replaces float32 by float64 in every call.

    Models of transformers compute norms, rotary embeddings and softmax in float32, whatever
    the dtype of their weights is.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        named = {n: torch.float64 if a is torch.float32 else a for n, a in (kwargs or {}).items()}
        return func(*args, **named)


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    """Makes every new floating tensor a float64 one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)
