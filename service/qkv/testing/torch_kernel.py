"""Results of torch's own attention kernel on a call, to compare a function's errors with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qkv.testing.call import Call
from qkv.testing.truth import has_derivation
from qkv.testing.visibility import visible_keys


def run_torch_kernel(call: Call, gradients: bool = False) -> dict[str, Tensor]:
    """Returns the results of `scaled_dot_product_attention` by name.

    There are none if torch has no kernel for the call: other variants, softcap, and sinks.

    Args:
        call: the call.
        gradients: True to add those of query, key and value.
    """
    if not has_derivation(call) or "sinks" in call.inputs:
        return {}
    if call.parsed.get("softcap") is not None:
        return {}
    visible = visible_keys(call)
    sent = {n: call.inputs[n].clone().requires_grad_(gradients) for n in ("query", "key", "value")}
    output = scaled_dot_product_attention(
        sent["query"],
        sent["key"],
        sent["value"],
        attn_mask=None if bool(visible.all()) else visible,
        scale=call.parsed.get("scale"),
        enable_gqa=sent["query"].shape[1] != sent["key"].shape[1],
    )
    results = {"output": output.detach()}
    if gradients and call.grad_output is not None:
        input_gradients = torch.autograd.grad(output, list(sent.values()), call.grad_output)
        results |= {f"grad {n}": x for n, x in zip(sent, input_gradients, strict=True)}
    return results
