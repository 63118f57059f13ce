"""Finds modules that mix positions without an attention call, by runs with another token.

A module that receives a sequence mixes its positions, if another token in one position changes what
the module returns at others. What runs again is a copy with the same parameters, so that neither
the model nor what it received changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkv.models.random_numbers import random_state, repeating

_NORMS: Final = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
"""Modules whose statistics may be of several positions; they mix no tokens."""
_HOOKS: Final = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"

_ROUNDINGS: Final = 4
"""Such as those of sums in another order. Runs of equal shapes hardly ever differ."""


@dataclass
class ModuleRun:
    """A run of a module on a sequence.

    Attributes:
        module: that runs.
        args, kwargs: what it receives. An object that is no tensor is a copy from before the run,
            because a cache of keys grows.
        outputs: the tensors that it returned, with the positions of a sequence that it received.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: list[Tensor] = field(default_factory=list)

    @classmethod
    def begin(
        cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ModuleRun | None:
        """Notes that a module begins to run; None if it receives no sequence."""
        run = cls(module, args, kwargs)
        if isinstance(module, (*_NORMS, nn.LayerNorm)) or not run.sequences:
            return None
        with suppress(Exception), _Copying(lambda x: x):  # an object may have no copy
            run.args, run.kwargs = deepcopy((args, kwargs), _shared(module))
            return run
        return None

    def end(self, result: Any) -> bool:
        """Notes what the module returned; False if it has other positions than the input."""
        self.outputs = self._with_positions(result)
        return bool(self.outputs)

    @property
    def has_channels_first(self) -> bool:
        """True if the module receives (B, channels, L) or an image, as a convolution takes it."""
        return self._has_channels_first(self.sequences[0])

    @cached_property
    def sequences(self) -> list[Tensor]:
        """The sequences that the module receives, such as a decoder's and its encoder's."""
        tensors = {id(x): x for x in tensors_of([self.args, self.kwargs])}
        return [x for x in tensors.values() if self._is_sequence(x)]

    def mixing_parts(self) -> list[str]:
        """Returns the names, inside the module, of the innermost ones that mix positions.

        "" is the module itself.
        """
        device = self.outputs[0].device
        with suppress(Exception), torch.no_grad():  # such as a lack of memory
            state = random_state(device)
            for shape in dict.fromkeys(self._rows(x).shape[:-1] for x in self.sequences):
                with repeating(device, state):
                    after = self._repeat(shape)
                if not _differ_elsewhere(shape, self.outputs, after):
                    continue
                parts: dict[str, ModuleRun] = {}
                with repeating(device, state):  # of equal random numbers
                    before = self._repeat(None, parts)
                if _differ_elsewhere(shape, before, after):
                    found = [
                        f"{name}.{inner}".removesuffix(".")
                        for name, part in parts.items()
                        for inner in part.mixing_parts()
                    ]
                    return found or [""]
        return []

    def _repeat(
        self, shape: torch.Size | None, parts: dict[str, ModuleRun] | None = None
    ) -> list[Tensor]:
        """Runs a copy of the module; returns its outputs as `end` notes them.

        Args:
            shape: sequences of so many positions get another token.
            parts: gets the runs of modules inside it, by their names.
        """

        def copied(x: Tensor) -> Tensor:
            copy = x.detach().clone()
            if any(x is each for each in self.sequences) and self._rows(x).shape[:-1] == shape:
                _disturb(self._rows(copy))
            return copy

        with _Copying(copied):
            module, args, kwargs = deepcopy(
                (self.module, self.args, self.kwargs), _shared(self.module)
            )
        for part in module.modules():
            if isinstance(part, _NORMS):
                part.forward = lambda x, *_, **__: x  # type: ignore[method-assign]
        if parts is not None:
            _watch(module, parts)
        return self._with_positions(module.forward(*args, **kwargs))

    def _rows(self, x: Tensor) -> Tensor:
        """Returns a view of a sequence with its features last."""
        return x.movedim(1, -1) if self._has_channels_first(x) else x

    def _has_channels_first(self, x: Tensor) -> bool:
        """True for (B, channels, L) or (B, channels, height, width)."""
        return x.ndim in (3, 4) and x.shape[1] in self._channels - {x.shape[-1]}

    @cached_property
    def _channels(self) -> set[int | None]:
        names = "in_channels", "out_channels"
        return {getattr(part, name, None) for part in self.module.modules() for name in names}

    def _with_positions(self, result: Any) -> list[Tensor]:
        """Returns the tensors with positions of a sequence, with their features last."""
        shapes = [self._rows(x).shape[:-1] for x in self.sequences]
        rows = [self._rows(y) for y in tensors_of(result) if is_number(y) and y.ndim > 1]
        return [y for y in rows if y.shape[:-1] in shapes]

    def _is_sequence(self, x: Tensor) -> bool:
        """True for (B, L, M), (L, B, M) or (L, M) with numbers that can be read.

        Four axes are (B, height, width, M) if a linear part of the module takes the last one, or
        an image. Otherwise they may be channels, heads or a mask.
        """
        is_grid = x.ndim == 4 and (
            any(getattr(p, "in_features", None) == x.shape[-1] for p in self.module.children())
            or self._has_channels_first(x)
        )
        return (
            type(x) is Tensor  # no weight, and no tensor without numbers
            and is_number(x)
            and (is_grid or x.ndim in (2, 3))
            and max(x.shape[:-1]) > 1
            and x.numel() > 0
            and not x.is_meta
            and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        )


class _Copying(TorchFunctionMode):
    """Copies the tensors in what is copied by a function."""

    def __init__(self, copied: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._copied = copied

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls a function of torch."""
        if func is Tensor.__deepcopy__:
            return self._copied(args[0])
        return func(*args, **kwargs or {})


def _shared(module: nn.Module) -> dict[int, Any]:
    """Returns what `deepcopy` does not copy: parameters, and hooks, which do not run again."""
    shared: dict[int, Any] = {id(p): p for p in module.parameters()}
    for part in module.modules():
        shared |= {id(getattr(part, name)): OrderedDict() for name in _HOOKS}
        if (hook := vars(part).get("_hf_hook")) is not None:
            shared[id(hook)] = hook  # of accelerate: it has all weights of an offloaded model
    return shared


def _watch(module: nn.Module, runs: dict[str, ModuleRun]) -> None:
    """Notes the runs of modules inside a module, but of none inside a noted one."""
    running: list[ModuleRun | None] = []

    def begin(part: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(None if any(running) else ModuleRun.begin(part, args, kwargs))

    def end(name: str, result: Any) -> None:
        if (run := running.pop()) is not None and run.end(result):
            runs.setdefault(name, run)

    for name, part in module.named_modules():
        part.register_forward_pre_hook(begin, with_kwargs=True)
        part.register_forward_hook(lambda _, __, result, name=name: end(name, result))


def _middle(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the place of the other token."""
    return tuple((n - 1) // 2 for n in shape)


def _disturb(rows: Tensor) -> None:
    """Writes a token that is larger than the one before, with both signs."""
    row = rows[_middle(rows.shape[:-1])]
    # neighbours have different signs: a constant may change nothing
    signs = 1 - torch.arange(len(row), device=row.device) % 2 * 2
    row.copy_(row * 1.25 + signs * (row.abs().amax() * 4 + 1))


def _differ_elsewhere(shape: torch.Size, before: list[Tensor], after: list[Tensor]) -> bool:
    """True if outputs differ at other positions than that of the other token.

    Args:
        shape: of the positions of the sequences with another token.
        before, after: the outputs.
    """
    for y, z in zip(before, after, strict=True):
        if y.ndim != len(shape) + 1 or y.shape != z.shape:
            continue
        differs = _differing(y, z)
        for axis, (n, at) in enumerate(zip(shape, _middle(shape), strict=True)):
            found = differs.movedim(axis, 0).flatten(1).any(1).nonzero().flatten().tolist()
            if n > 1 and (len(found) > 1 or (n == differs.shape[axis] and found not in ([], [at]))):
                return True
    return False


def _differing(before: Tensor, after: Tensor) -> Tensor:
    """Returns true for each position where features differ by more than rounding.

    A single one of several may be a score of two positions.
    """
    moved = (after != before).any(-1)
    old, new = before[moved], after[moved]
    sizes = old.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(before.dtype).tiny)
    near = torch.isclose(
        new / sizes, old / sizes, 0.0, _ROUNDINGS * torch.finfo(before.dtype).eps, equal_nan=True
    )
    moved[moved.clone()] = (~near).sum(-1) >= min(2, before.shape[-1])
    return moved


def is_number(x: object) -> TypeGuard[Tensor]:
    """True for a tensor of floating or complex numbers that is not nested."""
    if not isinstance(x, Tensor) or x.is_nested:
        return False
    return x.is_floating_point() or x.is_complex()


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors of arguments or of a result, also those in lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [x for each in value if each is not None for x in tensors_of(each)]
