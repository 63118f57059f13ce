"""Layers of tiny real models of transformers, loaded by their configuration: the module's output.

Each has a field that changes its attention, or names that only its configuration explains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch

from qkv.client.arrays import to_raw
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.executor import execute
from qkv.jobs.job import Job
from qkv.jobs.loaded.checkpoint_loader import load_checkpoints
from qkv.jobs.loaded.known_models import KNOWN
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.jobs.plan import Limits, Plan
from qkv.wire.message import Message
from support.loaded_checkpoints import layer_name, write_checkpoint
from support.real_module import RealModule, call_module, largest_error
from support.real_module_calls import bound
from support.real_module_models import HEADS, WIDTH, feed_tokens, hf, run_bert

# building the models imports transformers, which takes seconds
pytestmark = pytest.mark.slow

_TEXT: Final = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 29,
    "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_BERT: Final = {n: v for n, v in _TEXT.items() if n != "num_key_value_heads"}
_GPT: Final = {
    "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": 29, "n_positions": 64,
    "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LOCAL: Final = {"layer_types": ["full_attention", "sliding_attention"]}
_YARN: Final = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_OLD_YARN: Final = {
    "rope_parameters": None, "rope_theta": 500.0,
    "rope_scaling": {
        "type": "yarn", **{n: v for n, v in _YARN.items() if n not in ("rope_type", "rope_theta")}
    },
}  # fmt: skip


class Known(NamedTuple):
    """A layer of a model whose configuration explains it.

    Attributes:
        model: the class of transformers.
        config: its fields.
        path: of the attention.
        parameters: that the layer must have.
        edits: fields of `config.json` that replace those of the model; None: left out.
        run: calls the module.
    """

    model: str
    config: Mapping[str, Any]
    path: str = "layers.1.self_attn"
    parameters: Mapping[str, Any] = {}
    edits: Mapping[str, Any] = {}
    run: Any = call_module

    @property
    def case(self) -> RealModule:
        """The module with its inputs."""
        return RealModule(
            self.model, self.model, "", "", hf(self.model, **self.config), self.path, {},
            feed=feed_tokens, run=self.run,
        )  # fmt: skip


CASES: Final = {
    "embeddinggemma-window": Known(
        "Gemma3TextModel",
        _TEXT | _LOCAL | {"use_bidirectional_attention": True, "sliding_window": 7},
        parameters={"window": [3, 3], "scale": 0.0625},
    ),
    "embeddinggemma-whole": Known(
        "Gemma3TextModel",
        _TEXT | _LOCAL | {"use_bidirectional_attention": True, "sliding_window": 7},
        path="layers.0.self_attn", parameters={"scale": 0.0625},
    ),
    "not-causal": Known("LlamaModel", _TEXT | {"is_causal": False}),
    "not-causal-window": Known(
        "MistralModel", _TEXT | {"is_causal": False, "sliding_window": 3},
        parameters={"window": [3, 3]},
    ),
    "neo-is-always-causal": Known(
        "GPTNeoModel",
        {"hidden_size": WIDTH, "num_layers": 2, "num_heads": HEADS, "vocab_size": 29,
         "attention_types": [[["global", "local"], 1]], "window_size": 3, "is_causal": False,
         "max_position_embeddings": 64},
        path="h.1.attn.attention", parameters={"causal": True, "window": [2, 0], "scale": 1.0},
    ),
    "yarn-mscale": Known(
        "LlamaModel", _TEXT | {"rope_parameters": _YARN}, parameters={"causal": True}
    ),
    "yarn-mscale-before-5": Known(
        "LlamaModel", _TEXT | {"rope_parameters": _YARN}, parameters={"causal": True},
        edits=_OLD_YARN,
    ),
    "yarn-without-one-mscale": Known(
        "LlamaModel", _TEXT | {"rope_parameters": _YARN | {"mscale": None}},
        parameters={"causal": True},
    ),
    "yarn-without-factor": Known(
        "LlamaModel", _TEXT | {"rope_parameters": _YARN | {"factor": None}},
        parameters={"causal": True},
    ),
    "starcoder": Known("GPTBigCodeModel", _GPT, path="h.1.attn", parameters={"causal": True}),
    "bigcode-with-all-heads": Known(
        "GPTBigCodeModel", _GPT | {"multi_query": False}, path="h.1.attn",
        parameters={"causal": True},
    ),
    "codegen": Known(
        "CodeGenModel", _GPT | {"rotary_dim": 4}, path="h.1.attn", parameters={"causal": True}
    ),
    "bert-that-is-no-decoder": Known(
        "BertLMHeadModel", _BERT | {"is_decoder": False}, path="bert.encoder.layer.1.attention",
        edits={"architectures": ["BertLMHeadModel"]}, run=run_bert,
    ),
    "bert-that-is-a-decoder": Known(
        "BertLMHeadModel", _BERT | {"is_decoder": True}, path="bert.encoder.layer.1.attention",
        parameters={"causal": True}, edits={"architectures": ["BertLMHeadModel"]}, run=run_bert,
    ),
    "xlm-roberta": Known(
        "XLMRobertaModel", _BERT, path="encoder.layer.1.attention", run=run_bert
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _quiet_transformers() -> Iterator[None]:
    """Keeps the warnings of transformers about sizes that no real model has."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


def write(folder: Path, case: RealModule, edits: Mapping[str, Any]) -> Path:
    """Writes the checkpoint of a module with edits of `config.json`; returns its folder."""
    path = write_checkpoint(folder, case) / "config.json"
    config = json.loads(path.read_text()) | edits
    gone = {name for name, value in edits.items() if value is None}
    path.write_text(json.dumps({n: v for n, v in config.items() if n not in gone}))
    return folder


def output(layers: LoadedLayers, name: str, x: torch.Tensor) -> torch.Tensor:
    """Returns the output of a loaded layer."""
    message = Message({"layer": {"name": name}, "outputs": ["output"]}, {"x": to_raw(x)})
    job = Job.new(Plan, "softmax", message, Limits(1 << 30, 1 << 30, layers=layers))
    (result,) = execute([job], CpuDevice(), stack=False)
    return torch.from_numpy(result.outputs["output"].numpy().copy())


@pytest.mark.parametrize("name", CASES)
def test_layer_is_what_its_configuration_says(tmp_path: Path, name: str) -> None:
    known = CASES[name]
    case = known.case
    folder = write(tmp_path / "m", case, known.edits)
    layers = load_checkpoints({"m": folder}, 1 << 30, is_strict=True)
    layer = layer_name("m", case, list(layers.names))
    assert layers.describe(layer)["parameters"] == known.parameters
    assert largest_error(output(layers, layer, case.embeddings["x"]), case.truth.output) < bound(
        case
    )


_VISION: Final = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 8,
    "num_attention_heads": HEADS, "patch_size": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("Gemma3Model", _TEXT | {"model_type": "gemma3_text"}),
        ("PaliGemmaModel", _TEXT | {"model_type": "gemma"}),
        ("LlavaOnevisionModel", _TEXT | {"model_type": "qwen2"}),
    ],
)
def test_text_is_served_beside_a_tower_that_is_not_known(
    tmp_path: Path, model: str, text: Mapping[str, Any]
) -> None:
    vision = _VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
    fields: dict[str, Any] = {"text_config": dict(text), "vision_config": vision}
    case = RealModule(
        model, model, "", "", hf(model, **fields), "language_model.layers.1.self_attn", {},
        feed=lambda built: feed_tokens(built.language_model),
    )  # fmt: skip
    layers = load_checkpoints({"m": write_checkpoint(tmp_path / "m", case)}, 1 << 30)
    assert list(layers.names) == [f"m.language_model.layers.{i}" for i in range(2)]
    found = output(layers, layers.names[1], case.embeddings["x"])
    assert largest_error(found, case.truth.output) < bound(case)
    ((path, problem),) = layers.checkpoints[0].unserved.items()
    assert path == "vision_tower.encoder.layers"
    assert "the model type 'siglip_vision_model' is not known" in problem


def test_known_types_are_those_of_transformers() -> None:
    """A dash and an underscore are not the same."""
    from transformers import CONFIG_MAPPING

    assert KNOWN.keys() <= set(CONFIG_MAPPING)
