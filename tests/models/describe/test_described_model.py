"""Models are described as they are, up to the length that was seen, or refused by a part's name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from census.comparison import TensorNames, compare
from census.real_model import build, quiet, save
from census.served_model import ServedModel
from safetensors.torch import load_file, save_file

from qkv.errors import InvalidContent
from qkv.models.describe.described_model import Described, describe
from support.peak_memory import needs_proc, peaks_of_a_new_process

# building the models imports transformers, which takes seconds
pytestmark = pytest.mark.slow

LENGTH: Final = 4096
_ROPE: Final = {"rope_theta": 10000.0}
ROPES: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "default": ({"rope_type": "default"}, LENGTH),
    "linear": ({"rope_type": "linear", "factor": 4.0}, LENGTH),
    "llama3": (
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        LENGTH,
    ),
    "yarn": (
        {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512,
            "mscale": 0.7, "mscale_all_dim": 1.3,
        },
        LENGTH,
    ),
    "longrope": (
        {
            "rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 512,
            "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [4.0] * 8,
        },
        512,  # longer sequences have other frequencies
    ),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, LENGTH),
}  # fmt: skip

_DESCRIBES: Final = """
from pathlib import Path
from qkv.models.describe.described_model import describe
start()
for folder in sys.argv[1:]:
    found = describe(Path(folder))
    assert found.kinds and not found.refused
    say()
of_server = "fastapi httptools msgpack opentelemetry prometheus_client pydantic_settings uvicorn"
assert not {*of_server.split()} & sys.modules.keys()  # the extra "models" has what it needs
"""


def described(folder: Path, model_type: str, **changes: Any) -> Described:
    """Describes a small model, and checks that its layers are served right."""
    with quiet():
        model = build(model_type, **{"max_position_embeddings": LENGTH, **changes})
        save(model, folder)
        found = describe(folder)
        (folder / "qkv.toml").write_text(found.toml)
        served = ServedModel(folder)
        verdicts = list(compare(model, served, TensorNames(model, folder)))
    if found.kinds:
        assert verdicts, served.problem
        assert {verdict.kind for verdict in verdicts} == {"right"}, verdicts
        listed = [served.layers.describe(name)["proof"] for name in served.layers.names]
        proofs = [proof for proof in listed if proof is not None]
        assert len(proofs) == sum(len(kind.blocks) for kind in found.kinds)
        assert all(proof["error"] <= 1e-5 for proof in proofs)
    return found


@pytest.mark.parametrize("name", ROPES)
def test_every_scaling_is_described_up_to_its_length(tmp_path: Path, name: str) -> None:
    rope, length = ROPES[name]
    found = described(tmp_path, "llama", rope_parameters=_ROPE | rope)
    (kind,) = found.kinds
    assert kind.blocks == ["layers.0", "layers.1"]
    assert kind.length == length
    assert ("base" in kind.fields["rope"]) == (name in ("default", "dynamic"))


def test_kinds_of_layers_have_a_table_each(tmp_path: Path) -> None:
    found = described(tmp_path, "gemma3_text", sliding_window=1000)
    local, whole = found.kinds
    assert local.fields["window"] == [999, 0]
    assert local.fields["rope"] == {"order": "half", "base": 10000.0}
    assert local.fields["qk_norm"] == {"eps": 1e-6, "offset": 1}
    assert whole.fields["rope"] == {"order": "half", "base": 1000000.0}
    assert "window" not in whole.fields
    assert local.length == whole.length == LENGTH


def test_window_of_both_sides_is_crossed(tmp_path: Path) -> None:
    changes = {"use_bidirectional_attention": True, "sliding_window": 1000}
    (local, _) = described(tmp_path, "gemma3_text", **changes).kinds
    left, right = local.fields["window"]
    assert left == right
    assert not local.fields["causal"]


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("bert", {"causal": False, "positions": "none"}),
        ("gpt2", {"causal": True, "positions": "none"}),
        ("gpt_neox", {"rope": {"order": "half", "base": 10000.0, "dims": 4}}),
        ("cohere", {"rope": {"order": "interleaved", "base": 500000.0}}),
        ("gemma2", {"softcap": 50.0, "window": [3, 0]}),
        ("granite", {"scale": 1.0}),
        ("qwen3_moe", {"qk_norm": {"eps": 1e-6, "offset": 0}}),
        ("olmoe", {"positions": "rotary"}),
        ("gpt_oss", {"causal": True, "window": [3, 0]}),
        ("vit", {"causal": False}),
    ],
)
def test_fields_are_found(tmp_path: Path, model_type: str, fields: Mapping[str, Any]) -> None:
    found = described(tmp_path, model_type)
    assert not found.refused
    assert fields.items() <= found.kinds[0].fields.items(), found.kinds[0].fields


@pytest.mark.parametrize(
    ("model_type", "part"),
    [
        ("llama4_text", "queries and keys after their projection"),
        ("nanochat", "queries and keys after their projection"),
        ("qwen2_vl", "positions of several axes"),
        ("whisper", "keys of other embeddings"),
    ],
)
def test_missing_part_is_named(tmp_path: Path, model_type: str, part: str) -> None:
    found = described(tmp_path, model_type)
    assert any(part in reason for reason in found.refused.values()), found.refused


def test_model_that_chooses_keys_is_described_for_the_tokens_of_its_run(tmp_path: Path) -> None:
    """Its queries may see other keys once there are more than some: no run shows it."""
    (kind,) = described(tmp_path, "minimax_m3_vl_text").kinds
    assert kind.length == 64


@pytest.mark.parametrize(
    ("model_type", "part", "fields", "is_right"),
    [
        ("afmoe", "gate_proj", '"layout": "llama"', False),
        ("bloom", "code of its own", '"alibi": true', True),
        ("falcon", "code of its own", '"layout": "falcon"', True),
        ("t5", "relative positions that no layout reads", "in front of SelfAttention.o", False),
        ("deepseek_v3", "latent attention that no layout reads", '"causal": true', True),
        ("qwen3_next", "a gate of the output", '"kv_heads": 2', True),
    ],
)
def test_layer_is_named_with_its_nearest_description(
    tmp_path: Path, model_type: str, part: str, fields: str, is_right: bool
) -> None:
    """It is that of a layout, of the attention call alone, or from the output alone.

    It is right where it was measured if what is missing lies outside of its attention call, or of
    what describe can see.
    """
    found = described(tmp_path, model_type)
    assert not found.kinds
    reason = next(iter(found.refused.values()))
    assert part in reason
    (error,) = re.findall(r"\(the nearest has the error (\d\.\de[-+]\d\d)", reason)
    assert (float(error) < 1e-6) == is_right, reason
    assert fields in reason


@pytest.mark.parametrize("model_type", ["hunyuan_vl_vision", "cosmos3_edge_vision"])
def test_tower_of_patches_is_described(tmp_path: Path, model_type: str) -> None:
    """Its images are rows of patches with the numbers of rows and columns."""
    found = described(tmp_path, model_type)
    assert [kind.length for kind in found.kinds] == [16]
    assert not found.refused


def test_model_of_another_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidContent, match="unknown model type: got 'mine'"):
        describe(tmp_path)


def test_own_numbers_are_compared_too(tmp_path: Path) -> None:
    """A layer whose own weights give no finite output is not described."""
    with quiet():
        save(build("llama"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(n for n in tensors if n.endswith("1.self_attn.k_proj.weight"))
    tensors[name][0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = describe(tmp_path)
    assert [kind.blocks for kind in found.kinds] == [["layers.0"]]
    assert "its own numbers" in found.refused["layers.1"]


@needs_proc
def test_memory_does_not_grow_with_the_depth(tmp_path: Path) -> None:
    """A model of 4 layers needs less than one layer in float64 more than one of a layer."""
    width, inner, depths = 512, 1536, (1, 4)
    for depth in depths:
        sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": depth}
        with quiet():
            save(build("llama", vocab_size=128, **sizes), tmp_path / str(depth))
    folders = (tmp_path / str(depth) for depth in depths)
    shallow, deep = peaks_of_a_new_process(_DESCRIBES, *folders)
    assert deep.whole - shallow.whole < 8 * (4 * width**2 + 3 * width * inner)
