"""Small models of many types: each layer is right within 1e-3, or refused by a name.

`make census` does it with every type of transformers, and every field of the known ones.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from census import known_fields
from census.census import Case, Outcome, examine, examine_described
from census.known_variants import YARN
from transformers import CONFIG_MAPPING

from qkv.jobs.loaded.known_models import KNOWN

# building the models imports transformers, which takes seconds
pytestmark = pytest.mark.slow

SERVED: Final = (
    "albert bert bloom clip codegen cohere2 distilbert falcon gemma2 gemma3 gemma3_text gpt2 "
    "gpt_bigcode gpt_neo gpt_neox gpt_oss llama llava_onevision mistral mixtral olmo2 opt "
    "paligemma phi3 qwen2 qwen3 qwen3_moe smollm3 vit whisper xlm-roberta"
)
_YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3: Final = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
VARIANTS: Final[tuple[tuple[str, dict[str, Any], str], ...]] = (
    ("bert", {}, "BertLMHeadModel"),
    ("bert", {"is_decoder": True}, "BertLMHeadModel"),
    ("falcon", {"alibi": True}, ""),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, ""),
    ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 5}, ""),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ""),
    ("gpt_bigcode", {"multi_query": False}, ""),
    ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "is_causal": False}, ""),
    ("llama", {"is_causal": False}, ""),
    ("llama", {"rope_parameters": _LLAMA3}, ""),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, ""),
    ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}, ""),
    ("llama", {"rope_parameters": YARN | {"mscale": None, "mscale_all_dim": 1.3}}, ""),
    ("llama", {"rope_parameters": YARN | {"factor": None}}, ""),
    ("llama", {"rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}, ""),
    ("mistral", {"is_causal": False, "sliding_window": 4}, ""),
    ("phi", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, ""),
)
REFUSED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "projection": ("blip", {}),
    "output": ("bigbird_pegasus", {}),
    "proj": ("kimi_k25_vision", {}),
    "self_attn.A ": ("doge", {}),
    "conv_kernel_layer": ("convbert", {}),
    "v_proj": ("zaya", {}),
    "gate_bias": ("beam", {}),
}
"""Names that no row of `test_checkpoint_loader.py` has."""
ASKING: Final = "bart blip-2 dia llama4_text nanochat olmoe pegasus_x siglip speecht5 t5gemma yoso"

DESCRIBED: Final = "arcee aya_vision bart cohere2_moe exaone4 helium hubert olmo3 owlvit seed_oss"
"""Types that `qkv describe` describes, most of them unknown to the tables of this project."""


def is_right(outcome: Outcome) -> bool:
    """Returns True if no layer is wrong, and the model could be built."""
    return outcome.kind != "not built" and not outcome.is_wrong


@pytest.mark.parametrize("model_type", SERVED.split())
def test_known_type_is_served_as_it_is(model_type: str) -> None:
    outcome = examine(Case(model_type), answers=False)
    assert outcome.kind == "served", outcome
    assert {verdict.kind for verdict in outcome.verdicts} == {"right"}, outcome.verdicts


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: Case(*variant).name[:60])
def test_variant_of_a_known_type_is_served_as_it_is(
    variant: tuple[str, dict[str, Any], str],
) -> None:
    outcome = examine(Case(*variant), answers=False)
    assert outcome.kind == "served", outcome
    assert {verdict.kind for verdict in outcome.verdicts} == {"right"}, outcome.verdicts


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_layer_holds_is_refused_by_its_name(name: str) -> None:
    outcome = examine(Case(*REFUSED[name]))
    assert is_right(outcome), outcome
    assert name.strip() in outcome.problem


@pytest.mark.parametrize("model_type", ASKING.split())
def test_answered_type_is_right_or_not_served(model_type: str) -> None:
    outcome = examine(Case(model_type))
    assert is_right(outcome), outcome
    assert not outcome.verdicts or outcome.kind == "served"


def test_table_of_fields_is_that_of_transformers() -> None:
    assert known_fields.FILE.read_text() == known_fields.as_text()


def test_known_types_are_those_of_transformers() -> None:
    """A dash and an underscore are not the same."""
    assert KNOWN.keys() <= set(CONFIG_MAPPING)


@pytest.mark.parametrize("model_type", DESCRIBED.split())
def test_described_type_is_served_right(model_type: str) -> None:
    outcome = examine_described(Case(model_type))
    assert not outcome.problem
    assert {verdict.kind for verdict in outcome.verdicts} == {"right"}, outcome
