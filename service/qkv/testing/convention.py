"""`Convention`: how a function takes the inputs of a call, and what it returns.

Functions of softmax take them as the variant does. Those of recurrences have names of their own:
`g` of flash-linear-attention and transformers is `log_decay` here, and tokens come before heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor

from qkv.errors import InvalidContent
from qkv.testing.call import STATE, Call, state_dtype

Layout = Literal["BHTD", "BTHD"]
"""The order of axes: heads before tokens, as in this package, or tokens before heads."""

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "log_decay": ("log_decay", "g", "decay", "gk"),
    STATE: ("initial_state", "state"),
    "normalize_qk": ("normalize_qk", "use_qk_l2norm_in_kernel"),
    "chunk": ("chunk", "chunk_size"),
}
_CLAIMS: Final = ("rule", "chunk")  # what a function of a recurrence computes without being told
_MUST_NAME: Final = {"sinks"}  # a function with **keywords might ignore these
_RECURRENCE_MUST_NAME: Final = {"key_lengths", "scale", STATE}


@dataclass(frozen=True)
class Convention:
    """How a function takes the inputs and parameters of a call.

    Attributes:
        positional: the names of the inputs that are passed by position.
        keywords: the function's name of each other input and parameter, by that of the call.
        constants: what is passed beside them: `output_final_state`, and None for a state.
        missing: the first input or parameter that the function does not take; "": none.
    """

    positional: list[str]
    keywords: dict[str, str]
    constants: dict[str, Any]
    missing: str

    @property
    def asks_for_state(self) -> bool:
        """True if the function is asked for the state behind the tokens."""
        return "output_final_state" in self.constants

    @classmethod
    def of(cls, function: Callable[..., Any], call: Call) -> Convention:
        """Returns that of a function.

        One with `**keywords` takes those that every kernel may have; it has to name the others.
        """
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a function of C has no signature
            return cls(call.positional, {n: n for n in call.keywords}, {}, "")
        named = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if not call.is_recurrence:
            takes = {*named} | ({*call.keywords} - _MUST_NAME if takes_any else set())
            missing = next((n for n in call.keywords if n not in takes), "")
            return cls(call.positional, {n: n for n in call.keywords}, {}, missing)
        gates = [(n, _name(n, named)) for n in call.positional[3:]]
        by_name = [n for n, own in gates if own is not None]
        if len(by_name) < len(gates) and all(
            own in (None, *named[place : place + 1]) for place, (_, own) in enumerate(gates, 3)
        ):
            by_name = []  # each stands at its place, and some have another name
        keywords, missing = {}, ""
        for name in (*by_name, *call.keywords):
            found = _name(name, named)
            if found is None and takes_any and name not in _RECURRENCE_MUST_NAME:
                found = name
            if found is not None:
                keywords[name] = found
            elif name not in _CLAIMS:
                missing = missing or _NAMES.get(name, (name,))[0]
        constants: dict[str, Any] = {n: True for n in ("output_final_state",) if n in named}
        if STATE not in call.inputs and (state := _name(STATE, named)) is not None:
            constants[state] = None
        return cls([n for n in call.positional if n not in by_name], keywords, constants, missing)


def _name(name: str, named: list[str]) -> str | None:
    """Returns the name that a function has for an input or a parameter; None: it has none."""
    return next((n for n in _NAMES.get(name, (name,)) if n in named), None)


def arrange(call: Call, name: str, x: Tensor, layout: Layout) -> Tensor:
    """Returns an input as a function of a layout takes it.

    Decays are float32 beside narrow inputs, as layers compute them.
    """
    if name == "log_decay":
        x = x.to(state_dtype(x.dtype))
    return swap_axes(x) if layout == "BTHD" and _has_tokens(call, name) else x


def swap_axes(x: Tensor) -> Tensor:
    """Exchanges heads and tokens."""
    return x.transpose(1, 2).contiguous()


def _has_tokens(call: Call, name: str) -> bool:
    letters = call.variant.tensors[name].letters
    return letters[0] == "B" and len(letters) > 2 and letters[2] in ("L", "S")


def check_layout(layout: Any) -> None:
    """Checks a layout that a caller gives.

    Raises:
        InvalidContent: there is no such layout.
    """
    if layout not in (None, "BHTD", "BTHD"):
        raise InvalidContent(f"no layout {layout!r}; there are BHTD and BTHD")
