"""Answers to what the service asks for: lines of qkv.toml, read off the real modules.

What a module does is measured: it runs again with other numbers in one token, or with other rotary
tables, and what changes in its output says which tokens it sees, and whether it turns them.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from census.comparison import Place, keys_of, with_three_axes
from census.real_model import Call, tensors_in

_FIELDS: Final = "positions|rope|alibi|causal|window|softcap|scale|heads|qk_norm|layout"
_TABLES: Final = (
    ("position_embeddings",), ("cos", "sin"), ("rotary_pos_emb",), ("freqs_cis",),
    ("position_embeddings_global",), ("position_encodings",), ("rotary_position_embeddings",),
    ("sinusoidal_pos",), ("rotary_emb",), ("rope",),
)  # fmt: skip
_RELATIVE: Final = ("position_bias", "relative_position_bias", "rel_pos", "relative_pos")
_SCALES: Final = ("scaling", "scale", "softmax_scale", "attention_scale", "inv_norm_factor")
_SOFTCAPS: Final = ("attn_logit_softcapping", "softcap", "logits_soft_cap", "attn_logit_softcap")
_HEADS: Final = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "num_attn_heads", "nhead",
)  # fmt: skip
_QK_NORM: Final = r"(^|\.)(q|k|query|key)_?(layer)?_?norm$"
_EPS: Final = ("variance_epsilon", "eps", "epsilon")
_SCALINGS: Final = ("linear", "llama3", "yarn")
_NOT_SCALING: Final = ("rope_theta", "partial_rotary_factor", "type", "mrope_section")


def asked_fields(problem: str) -> set[str]:
    """Returns the fields that a message asks for."""
    return set(re.findall(rf"\b({_FIELDS}) = ", problem))


def asked_tables(problem: str) -> set[str]:
    """Returns the names of the tables that a message names."""
    return set(re.findall(r'\[layers\."([^"]*)"\]', problem))


def write_answers(
    model: PreTrainedModel,
    places: Mapping[str, Place],
    calls: Mapping[str, Call],
    fields: set[str],
    tables: set[str],
) -> str:
    """Returns the text of qkv.toml.

    Args:
        model: the real one.
        places: of the layers, by the prefix of their tensors, without the last dot.
        calls: the first ones of its modules, by path.
        fields: that were asked for.
        tables: whose blocks were asked for; empty: all.
    """
    texts = []
    blocks = Counter(_block(prefix) for prefix in places)
    for prefix, place in places.items():
        block = _block(prefix) if blocks[_block(prefix)] == 1 else prefix
        if tables and not any(f"{block}.".startswith(f"{table}.") for table in tables):
            continue
        answers: dict[str, Any] = {}
        with contextlib.suppress(NoAnswer):  # the service asks again, and the layer is not served
            answers = dict(_Answers(model, place, calls).of(fields))
        lines = "".join(f"{name} = {_toml(value)}\n" for name, value in answers.items())
        texts.append(f'[layers."{block}"]\n{lines}' if block else lines)
    return "".join(texts)


def _block(prefix: str) -> str:
    found = re.match(r"(.*\.[0-9]+|[0-9]+)(\.|$)", prefix)
    return found[1] if found else prefix


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{n} = {_toml(v)}" for n, v in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


class NoAnswer(Exception):
    """A property that no line of qkv.toml expresses."""


class _Answers:
    """The properties of one module."""

    def __init__(self, model: PreTrainedModel, place: Place, calls: Mapping[str, Call]) -> None:
        self._module = model.get_submodule(place.attention)
        self._call = calls.get(place.attention)
        own = getattr(self._module, "config", None)
        self._config = own if isinstance(own, PretrainedConfig) else _config_around(model, place)

    def of(self, fields: set[str]) -> Iterator[tuple[str, Any]]:
        """Yields the asked fields with their values."""
        left, right = self._reach()
        if fields & {"positions", "rope", "alibi"}:
            yield from self._positions()
        if "causal" in fields:
            yield "causal", right == 0
        if "window" in fields:
            is_bounded = left is not None or right not in (None, 0)
            yield (
                "window",
                [10**6 if e is None else e for e in (left, right)] if is_bounded else False,
            )
        if "heads" in fields:
            yield "heads", self._heads()
        if "qk_norm" in fields:
            yield "qk_norm", self._qk_norm()
        if "scale" in fields:
            yield "scale", self._scale()
        if "softcap" in fields:
            yield "softcap", self._number(_SOFTCAPS) or False

    def _number(self, names: tuple[str, ...]) -> Any:
        for holder in (self._module, self._config):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    return value
        return None

    def _heads(self) -> int:
        width = getattr(self._module, "head_dim", None)
        query = getattr(self._module, "q_proj", None)
        if isinstance(width, int) and isinstance(query, nn.Linear):
            return query.out_features // width
        return self._number(_HEADS) or 1

    def _scale(self) -> float | bool:
        for name in _SCALES:
            value = getattr(self._module, name, None)
            if isinstance(value, int | float) and not isinstance(value, bool):
                width = getattr(self._module, "head_dim", None)
                return False if width and abs(value - width**-0.5) < 1e-6 else float(value)
        return False

    def _qk_norm(self) -> dict[str, Any]:
        """Returns the numbers of the norms of queries and keys."""
        norms = [m for n, m in self._module.named_modules() if re.search(_QK_NORM, n)]
        numbers = [e for m in norms for n in _EPS if isinstance(e := getattr(m, n, None), float)]
        is_offset = any("1.0 + self.weight" in inspect.getsource(type(m).forward) for m in norms)
        return {"eps": numbers[0] if numbers else 1e-6} | ({"offset": 1} if is_offset else {})

    def _reach(self) -> tuple[int | None, int | None]:
        """Returns how many tokens the module sees to the left and to the right; None: all."""
        x = None if self._call is None else self._call.x
        if self._call is not None and keys_of(self._call) is not None:
            return None, None
        if self._call is None or x is None or x.dim() != 3:
            return None, 0 if getattr(self._module, "is_causal", False) is True else None
        last = with_three_axes(x).shape[1] - 1
        first_seen_by, last_seen_by = (self._rows_that_see(x, token) for token in (0, last))
        if not first_seen_by or not last_seen_by:
            return None, 0 if getattr(self._module, "is_causal", False) is True else None
        left, right = max(first_seen_by), last - min(last_seen_by)
        return (None if left == last else left), (None if right == last else right)

    def _rows_that_see(self, x: Tensor, token: int) -> list[int]:
        """Returns the rows of the output that a token changes."""
        changed = x.clone()
        tokens = with_three_axes(changed)
        tokens[:, token] = torch.randn_like(tokens[:, token]) * changed.abs().max()
        before, after = self._run(x), self._run(changed)
        if before is None or after is None or before.dim() != 3:
            return []
        before, after = with_three_axes(before), with_three_axes(after)
        rows = (before - after).abs().amax((0, 2)) > 1e-5 * before.abs().max()
        return [int(i) for i in rows.nonzero()]

    def _run(self, x: Tensor, **others: Any) -> Tensor | None:
        assert self._call is not None
        arguments = dict(self._call.arguments)
        name = next(n for n, t in arguments.items() if t is self._call.x)
        with contextlib.suppress(Exception), torch.no_grad():
            output = self._module(**{**arguments, name: x.clone(), **others})
            return next(tensors_in(output), None)
        return None

    def _positions(self) -> Iterator[tuple[str, Any]]:
        arguments = {} if self._call is None else self._call.arguments
        if getattr(self._config, "alibi", False) is True or "alibi" in arguments:
            yield "positions", "alibi"
            return
        if any(isinstance(arguments.get(n), Tensor) for n in _RELATIVE):
            raise NoAnswer
        rope = self._rope(arguments)
        if rope is None:
            yield "positions", "none"
            return
        yield "positions", "rotary"
        yield "rope", rope

    def _rope(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the rotary embedding of the module; None: it has none."""
        tables = next((t for names in _TABLES if (t := _tables(names, arguments))), None)
        has_own = any(
            "rotary" in name or "rope" in name for name, _ in self._module.named_modules()
        )
        if tables is None and not has_own:
            return None
        if tables is not None and not self._uses_tables(arguments):
            return None
        fields: dict[str, Any] = {"order": "interleaved"} if _is_interleaved(self._module) else {}
        parameters = getattr(self._config, "rope_parameters", None) or {}
        found = None
        if tables is not None and self._call is not None and self._call.x is not None:
            kind = parameters.get("rope_type", "default")
            found = _base_and_dims(tables, self._call.x)
            if found is None or (found[0] is None and kind not in _SCALINGS):
                raise NoAnswer
        theta = parameters.get("rope_theta", getattr(self._config, "rope_theta", 10000.0))
        base, dims = found or (theta, None)
        fields["base"] = float(base if base is not None else theta)
        if dims is None:
            dims = getattr(self._config, "rotary_dim", None)
        if dims is not None:
            fields["dims"] = int(dims)
        kind = parameters.get("rope_type")
        if kind in _SCALINGS and base is None:
            fields["scaling"] = {n: v for n, v in parameters.items() if n not in _NOT_SCALING}
        return fields

    def _uses_tables(self, arguments: Mapping[str, Any]) -> bool:
        """Returns True if other rotary tables change the output of the module."""
        assert self._call is not None
        x = self._call.x
        assert x is not None
        names = [n for names in _TABLES for n in names if n in arguments]
        others = {
            n: tuple(torch.randn_like(t) if t.is_floating_point() else t for t in value)
            if isinstance(value := arguments[n], tuple)
            else torch.randn_like(value)
            for n in names
            if isinstance(arguments[n], tuple | Tensor)
        }
        before, after = self._run(x), self._run(x, **others)
        return before is None or after is None or not torch.allclose(before, after, atol=1e-4)


def _config_around(model: PreTrainedModel, place: Place) -> Any:
    """Returns the configuration of the nearest module around one that has one."""
    path = place.attention
    while path:
        path = path.rpartition(".")[0]
        config = getattr(model.get_submodule(path), "config", None)
        if isinstance(config, PretrainedConfig):
            return config
    return model.config


def _tables(names: tuple[str, ...], arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    values = [arguments.get(name) for name in names]
    if len(values) == 1 and isinstance(values[0], Tensor) and values[0].is_complex():
        return values[0].real, values[0].imag
    if len(values) == 1 and isinstance(values[0], tuple):
        values = list(values[0])
    if names == ("sinusoidal_pos",) and isinstance(values[0], Tensor):
        sin, cos = values[0].chunk(2, dim=-1)
        return cos, sin
    if len(values) == 2 and all(isinstance(v, Tensor) and v.is_floating_point() for v in values):
        return values[0], values[1]  # type: ignore[return-value]
    return None


def _base_and_dims(tables: tuple[Tensor, Tensor], x: Tensor) -> tuple[float | None, int] | None:
    """Returns base and number of turning channels of rotary tables.

    Returns:
        a base of None if no base gives these tables; None if they are of another form: some tokens
        do not turn, or positions have several axes.
    """
    cos, sin = (table.reshape(-1, *table.shape[-2:])[0].float() for table in tables)
    length = with_three_axes(x).shape[1]
    if len(cos) != length or length < 3:
        return None
    angles = torch.atan2(sin[1], cos[1])
    dims = len(angles)
    rates = angles[: dims // 2]
    if not torch.allclose(rates, angles[dims // 2 :], atol=1e-5):
        pairs = angles.view(-1, 2)
        is_paired = torch.allclose(pairs[:, 0], pairs[:, 1], atol=1e-5)
        rates, dims = (pairs[:, 0], dims) if is_paired else (angles, 2 * dims)
    turns = torch.outer(torch.arange(length).float(), angles)
    size = (cos[1] ** 2 + sin[1] ** 2).sqrt()
    if not torch.allclose(turns.cos() * size, cos, atol=1e-3):
        return None
    if abs(float(rates[0]) - 1) > 1e-4 or len(rates) < 2 or rates[1] <= 0:
        return None, dims
    base = float(f"{float(rates[1].double() ** (-len(rates))):.4g}")
    powers = base ** (-torch.arange(len(rates)).double() / len(rates))
    is_one = torch.allclose(rates.double(), powers, rtol=1e-3)
    return (base if is_one else None), dims


def _is_interleaved(module: nn.Module) -> bool:
    """Returns True if the code beside a module turns neighbouring channels."""
    for name, function in vars(sys.modules[type(module).__module__]).items():
        if re.search("rotary|rotate", name) and inspect.isfunction(function):
            source = inspect.getsource(function)
            if re.search(r"::2|view_as_complex|unflatten\(-1, \(-1, 2\)\)", source):
                return True
    return False
