"""A run of one attention module, with what it received in the whole model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from qkv.models.attention_call import AttentionCall
from qkv.models.capture import capture
from qkv.models.describe.model_run import Arguments
from qkv.models.describe.rotary_angles import Unfit, are_near
from qkv.models.places import tensors_of

_USUAL: Final = ("attention_mask", "position_embeddings")


class AttentionRun(NamedTuple):
    """A run of an attention module.

    Attributes:
        module: that ran.
        arguments: that it received.
        x_BLM: the embeddings (B, L, M) among them.
        call: of attention.
        unlike: modules inside it that receive something else, and what that is.
        positions: of the tokens.
    """

    module: nn.Module
    arguments: Arguments
    x_BLM: Tensor
    call: AttentionCall
    unlike: Mapping[str, str]
    positions: Sequence[int]

    def output(self, size: float = 1.0) -> Tensor | None:
        """Runs the module again; returns its first floating tensor, None if it has none.

        Args:
            size: factor of the embeddings.
        """

        def scaled(value: Any) -> Any:
            if value is self.x_BLM:
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

    Raises:
        Unfit: it makes no such call, or receives no embeddings (B, L, M).
    """
    x = _embeddings_of(arguments[:2])
    unlike: dict[str, str] = {}
    with contextlib.ExitStack() as stack, torch.no_grad():
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in projections:
            hook = module.get_submodule(name).register_forward_pre_hook(
                lambda _, args, name=name: unlike.update(_unlike(name, args, x, arguments))
            )
            stack.callback(hook.remove)
        try:
            with capture(module) as calls:
                module(*arguments.args, **arguments.kwargs)
        except Exception as error:  # whatever a module does without its model
            raise Unfit(f"a module that does not run alone: {type(error).__name__}") from None
    if not calls:
        reasons = [missed.reason for missed in calls.missed]
        reason = reasons[0] if reasons else "it makes no attention call that qkv can see"
        others = [
            name
            for name, value in arguments.kwargs.items()
            if name not in _USUAL and value is not x and _embeddings_of(value) is not None
        ]
        more = f"; it receives {', '.join(others)}" if others else ""
        raise Unfit(f"no attention call that was captured: {reason}{more}")
    call = calls[0]
    B, _, L, _ = call.query.shape
    if x is None or x.dim() != 3 or x.shape[:2] != (B, L):
        got = "nothing" if x is None else list(x.shape)
        raise Unfit(f"an input of other axes than (B, L, M): got {got}")
    return AttentionRun(module, arguments, x, call, unlike, arguments.positions or range(L))


def _unlike(
    name: str, args: Sequence[Any], x: Tensor | None, arguments: Arguments
) -> Iterator[tuple[str, str]]:
    """Yields a module and what it receives, if that is not what the attention receives."""
    got = args[0] if args else None
    if x is None or got is x or not isinstance(got, Tensor):
        return
    others = (each for each in (*arguments.args, *arguments.kwargs.values()) if each is not x)
    if got.numel() != x.numel() or any(got is other for other in others):
        yield name, f"keys of other embeddings than those of the queries, at {name}"
    elif not are_near(got.reshape(x.shape), x):
        yield name, f"a norm or another function in front of the projection {name}"


def _embeddings_of(value: Any) -> Tensor | None:
    """Returns the first floating tensor in arguments, or in an output."""
    return next((x for x in tensors_of(value) if x.is_floating_point()), None)
