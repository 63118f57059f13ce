"""The activations of a trained model that other tests use: right, varied and complete."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

from qkv.attention.layers.projection import apply, split_heads
from qkv.attention.variants import softmax
from support.checked_softmax import OUTPUT
from support.minilm import SENTENCES, activations, embedding_of, layer_weights
from support.references import reference_of
from support.tolerances import assert_within, bounds

# the first test imports transformers, which takes 3 s
pytestmark = pytest.mark.slow

HEADS: Final = 12


@pytest.mark.representative
def test_softmax_reproduces_the_attention_of_each_layer() -> None:
    for each in activations():
        inputs = each.query_BHLD, each.key_BGSD, each.value_BGSE
        call = softmax.Call(*inputs)
        truth = reference_of(call)
        bound = bounds(*inputs, None, {}, truth).output
        assert_within(softmax.attend(call, OUTPUT).output, truth.output, bound)
        assert_within(each.context_BHLE, truth.output, bound)


def test_weights_of_a_layer_project_its_hidden_states_to_the_activations() -> None:
    """A projection sums M products and a bias; eps, twice a rounding, bounds both results."""
    for each in activations():
        tensors = layer_weights()[each.layer]
        x = each.x_BLM
        for role, expected in (
            ("query", each.query_BHLD), ("key", each.key_BGSD), ("value", each.value_BGSE),
        ):  # fmt: skip
            weight, bias = (tensors[f"W_{role}.{name}"] for name in ("weight", "bias"))
            found = split_heads(apply(x, weight.T, bias), HEADS)
            mass = split_heads(
                apply(x.double().abs(), weight.T.double().abs(), bias.double().abs()), HEADS
            )
            eps = torch.finfo(x.dtype).eps
            assert_within(found, expected.double(), (x.shape[-1] + 1) * eps * mass)


def test_activations_are_those_of_all_layers_and_sentences() -> None:
    found = activations()
    assert [(e.sentence, e.layer) for e in found] == [(s, i) for s in SENTENCES for i in range(6)]
    for each in found:
        L = each.x_BLM.shape[1]
        assert each.x_BLM.shape == (1, L, 384)
        for tensor in (each.query_BHLD, each.key_BGSD, each.value_BGSE, each.context_BHLE):
            assert tensor.shape == (1, HEADS, L, 32)
            assert tensor.dtype == torch.float32
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
    lengths = sorted({each.x_BLM.shape[1] for each in found})
    assert lengths[0] <= 5
    assert lengths[-1] >= 100


def test_paraphrases_have_closer_embeddings_than_unrelated_sentences() -> None:
    def similarity(one: str, other: str) -> Tensor:
        return embedding_of(one) @ embedding_of(other)

    guitar, paraphrase, bank = SENTENCES[3:6]
    assert similarity(guitar, paraphrase) > 0.5
    assert similarity(guitar, bank) < 0.2
    assert similarity(paraphrase, bank) < 0.2
