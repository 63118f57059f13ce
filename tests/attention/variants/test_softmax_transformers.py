"""Softmax with sinks and ALiBi against the models of transformers that have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.attention.variants import softmax
from support.checked_softmax import ALL, attend
from support.each import each

# the first test imports transformers, which takes 3 s
pytestmark = pytest.mark.slow

EPS = torch.finfo(torch.float64).eps


def heads(x_BLM: Tensor, H: int) -> Tensor:
    """Returns (B, H, L, E)."""
    split: Tensor = x_BLM.unflatten(-1, (H, -1))
    return split.transpose(1, 2)


@each("window", [None, 3])
def test_sinks_are_those_of_gpt_oss(window: int | None) -> None:
    """The oracle is the function of its model, and autograd through it."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    B, H, G, N, D = 2, 8, 2, 7, 4
    query = torch.randn(B, H, N, D, dtype=torch.float64)
    key, value = torch.randn(2, B, G, N, D, dtype=torch.float64)
    module: Any = torch.nn.Module()
    module.sinks = torch.nn.Parameter(torch.randn(H, dtype=torch.float64) * 2)
    module.num_key_value_groups = H // G
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    i, j = torch.arange(N)[:, None], torch.arange(N)
    hidden = (j > i) | (j <= i - (window or N))
    mask = torch.zeros(1, 1, N, N, dtype=torch.float64).masked_fill_(hidden, -torch.inf)
    output, expected = eager_attention_forward(module.eval(), *leaves, mask, scaling=D**-0.5)
    parameters: dict[str, Any] = {"causal": True}
    if window is not None:
        parameters["window"] = (window - 1, None)
    sinks = module.sinks.detach()
    found = attend(query, key, value, sinks_H=sinks, **parameters, outputs=ALL)
    torch.testing.assert_close(found.weights, expected.detach(), rtol=0, atol=50 * EPS)
    torch.testing.assert_close(
        found.output, output.detach().transpose(1, 2), rtol=0, atol=200 * EPS
    )
    grad = torch.randn_like(output)
    slopes = torch.autograd.grad(output, [*leaves, module.sinks], grad)
    gradients = softmax.backward(
        softmax.Call(query, key, value, sinks_H=sinks, **parameters), grad.transpose(1, 2)
    )
    for name, slope in zip(("query", "key", "value", "sinks"), slopes, strict=True):
        torch.testing.assert_close(gradients[name], slope, rtol=0, atol=1e3 * EPS)


@each("H", [4, 6])
def test_slopes_are_those_of_bloom(H: int) -> None:
    """The oracle is a layer of its model; it adds slope * j, and its softmax is float32."""
    from transformers.models.bloom.configuration_bloom import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    B, N, M = 2, 7, H * 4
    config = BloomConfig(hidden_size=M, n_head=H, hidden_dropout=0.0, attention_dropout=0.0)
    module = BloomAttention(config, layer_idx=0).double().eval()
    module.dense.weight.data.copy_(torch.eye(M))
    module.dense.bias.data.zero_()
    x, everything = torch.randn(B, N, M, dtype=torch.float64), torch.ones(B, N)
    bias = build_alibi_tensor(everything, H, torch.float64)
    causal = torch.full((1, 1, N, N), -torch.inf, dtype=torch.float64).triu(1)
    with torch.no_grad():
        output, expected = module(x, torch.zeros_like(x), bias, causal, output_attentions=True)
        query, key, value = (t.contiguous() for t in module._reshape(module.query_key_value(x)))
    # a bias is slope * j: that of the second key is the slope
    slopes = bias.view(B, H, N)[0, :, 1].float()
    found = attend(query, key, value, alibi_slopes_H=slopes, causal=True, outputs=ALL)
    assert found.weights is not None
    assert found.output is not None
    close = N * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.weights, expected, rtol=0, atol=close)
    largest = float(value.abs().max())
    torch.testing.assert_close(heads(output, H), found.output, rtol=0, atol=close * largest * N)
