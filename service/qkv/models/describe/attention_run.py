"""A run of one attention module, with what it received in the whole model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qkv.models.attention_call import AttentionCall
from qkv.models.capture import capture
from qkv.models.describe.model_run import Arguments
from qkv.models.describe.rotary_angles import Unfit, are_near
from qkv.models.mixers import tensors_of


@dataclass
class AttentionRun:
    """A run of an attention module.

    Attributes:
        module: that ran.
        arguments: that it received.
        captured: its attention call; None: qkv cannot see one.
        missed: the reason for that.
        before, behind: names of the modules with parameters that ran before the call and after it.
        unlike: projections before the call that receive something else, and what that is.
    """

    module: nn.Module
    arguments: Arguments
    captured: AttentionCall | None = None
    missed: str = "it makes no attention call that qkv can see"
    before: list[str] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)
    unlike: dict[str, str] = field(default_factory=dict)

    @property
    def call(self) -> AttentionCall:
        """The attention call.

        Raises:
            Unfit: it cannot be seen.
        """
        if self.captured is not None:
            return self.captured
        raise Unfit(f"no attention call that was captured: {self.missed}")

    @property
    def _x(self) -> Tensor | None:
        return _embeddings_of(self.arguments[:2])

    @property
    def x_BLM(self) -> Tensor:
        """The embeddings among the arguments; (L, M) are those of one sequence.

        Raises:
            Unfit: they have other axes.
        """
        x = self._x[None] if self._x is not None and self._x.dim() == 2 else self._x
        called = x if self.captured is None else self.captured.query[:, 0]  # (B, L, D)
        if x is None or x.dim() != 3 or called is None or x.shape[:2] != called.shape[:2]:
            got = "nothing" if x is None else list(x.shape)
            raise Unfit(f"an input of other axes than (B, L, M): got {got}")
        return x

    @property
    def positions(self) -> Sequence[int]:
        """The positions of the tokens."""
        return self.arguments.positions or range(self.x_BLM.shape[1])

    def output(self, size: float = 1.0) -> Tensor | None:
        """Runs the module again; returns its first floating tensor, None if it has none.

        Args:
            size: factor of the embeddings.
        """

        def scaled(value: Any) -> Any:
            if isinstance(value, Tensor) and value is self._x:
                return value * size
            if isinstance(value, tuple | list):
                return type(value)(scaled(each) for each in value)
            return value

        args = [scaled(value) for value in self.arguments.args]
        kwargs = {name: scaled(value) for name, value in self.arguments.kwargs.items()}
        with torch.no_grad():
            return _embeddings_of(self.module(*args, **kwargs))


def run_attention(
    module: nn.Module, arguments: Arguments, projections: Collection[str]
) -> AttentionRun:
    """Runs an attention module, and captures its attention call.

    Args:
        module: of attention.
        arguments: that it receives.
        projections: names of the modules inside it whose inputs are compared with its own.
    """
    run = AttentionRun(module, arguments)

    def note(name: str, args: Sequence[Any]) -> None:
        (run.behind if calls else run.before).append(name)
        if name in projections and not calls and (what := _unlike(name, args, arguments)):
            run.unlike[name] = what

    with contextlib.ExitStack() as stack, torch.no_grad():
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name, part in module.named_modules():
            if name and next(part.parameters(recurse=False), None) is not None:
                hook = part.register_forward_hook(lambda _, args, __, n=name: note(n, args))
                stack.callback(hook.remove)
        try:
            with capture(module) as calls:
                module(*arguments.args, **arguments.kwargs)
        except Exception as error:  # whatever a module does without its model
            run.missed = f"it does not run alone: {type(error).__name__}"
            return run
    if calls:
        run.captured = calls[0]
    elif calls.missed:
        run.missed = calls.missed[0].reason
    return run


def _unlike(name: str, args: Sequence[Any], arguments: Arguments) -> str | None:
    """Returns what a module receives, if that is not what the attention receives."""
    x, got = _embeddings_of(arguments[:2]), args[0] if args else None
    if x is None or got is x or not isinstance(got, Tensor):
        return None
    others = (each for each in (*arguments.args, *arguments.kwargs.values()) if each is not x)
    if got.numel() != x.numel() or any(got is other for other in others):
        return f"keys of other embeddings than those of the queries, at {name}"
    if are_near(got.reshape(x.shape), x):
        return None
    return f"a norm or another function in front of the projection {name}"


def _embeddings_of(value: Any) -> Tensor | None:
    """Returns the first floating tensor in arguments, or in an output."""
    return next((x for x in tensors_of(value) if x.is_floating_point()), None)
