"""Runs a model on random inputs, and records what its attention modules receive and return."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qkv.models.attention_call import AttentionCall
from qkv.models.capture import capture
from qkv.models.describe.drawn_model import quiet
from qkv.models.describe.random_inputs import draw_inputs, towers

_SEED: Final = 3
_FEW: Final = 16  # tokens, for models that take fewer than others


@dataclass
class LayerRecord:
    """The first run of an attention module.

    Attributes:
        args, kwargs: of the module.
        inputs: the first one of each module inside it that is known to have weights, by name.
        output: the first one of the module; None: it has not returned.
        call: of attention; None: none was captured.
        missed: the reason for that.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    output: Tensor | None = None
    call: AttentionCall | None = None
    missed: str = "it makes no attention call that qkv can see"

    @property
    def x(self) -> Tensor | None:
        """The first argument that is a floating tensor."""
        return first_tensor((self.args, self.kwargs))


def first_tensor(value: Any) -> Tensor | None:
    """Returns the first floating tensor in arguments, or in an output."""
    return next(_tensors_in(value), None)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors_in(each)


def record(
    model: PreTrainedModel,
    layers: Mapping[str, Collection[str]],
    length: int,
    positions: Sequence[int] | None = None,
) -> dict[str, LayerRecord]:
    """Runs a model, and its towers if a layer is in none that ran.

    Args:
        model: in float64.
        layers: names of the modules with weights inside each attention module, by its path.
        length: of sequences of tokens.
        positions: of the tokens, where the model takes them; None: 0, 1, 2, ...

    Returns:
        The records by path, without those of layers that did not run.
    """
    records: dict[str, LayerRecord] = {}
    with contextlib.ExitStack() as stack, torch.no_grad(), quiet():
        for path, names in layers.items():
            stack.callback(_hook(model, path, names, records))
        with capture(model) as calls:
            for runner, inputs in _attempts(model, length, positions):
                if all(path in records and records[path].output is not None for path in layers):
                    break
                with contextlib.suppress(Exception):  # whatever a model does with such inputs
                    runner(**inputs)
    for path, found in records.items():
        below = f"{path}."
        found.call = next((c for c in calls if f"{c.layer}.".startswith(below)), None)
        reasons = (m.reason for m in calls.missed if f"{m.layer}.".startswith(below))
        found.missed = next(reasons, found.missed)
    return {path: found for path, found in records.items() if found.output is not None}


def _attempts(
    model: PreTrainedModel, length: int, positions: Sequence[int] | None
) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yields a model and its parts with inputs: those that it needs, all, and fewer tokens."""
    lengths = [length] if positions is not None else [length, min(length, _FEW)]
    for tokens, every in itertools.product(lengths, (False, True)):
        with contextlib.suppress(Exception):  # a model that no input is known for
            yield model, _inputs(model, tokens, positions, every=every)
    for tower in towers(model):
        with contextlib.suppress(Exception):
            yield tower, _inputs(tower, length, positions)


def _inputs(
    runner: nn.Module, length: int, positions: Sequence[int] | None, *, every: bool = False
) -> dict[str, Any]:
    torch.manual_seed(_SEED)
    inputs = draw_inputs(runner, length, every=every)
    if positions is not None:
        batch = len(next(iter(inputs.values())))
        inputs["position_ids"] = torch.tensor(positions).expand(batch, -1)
    return {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}


def _hook(
    model: nn.Module, path: str, names: Iterable[str], records: dict[str, LayerRecord]
) -> Callable[[], None]:
    """Records the first run of a module; returns a function that ends it."""

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        if path not in records or records[path].output is None:
            records[path] = LayerRecord(args, dict(kwargs))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if path in records and records[path].output is None:
            records[path].output = first_tensor(output)

    def inside(name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            found = records.get(path)
            if found is not None and found.output is None and args and name not in found.inputs:
                found.inputs[name] = args[0]

        return note

    module = model.get_submodule(path)
    hooks = [
        module.register_forward_pre_hook(begin, with_kwargs=True),
        module.register_forward_hook(end),
    ]
    hooks += [module.get_submodule(name).register_forward_hook(inside(name)) for name in names]

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove
