"""Layers of real models, converted to every other layout and back."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from qkv.attention.layers import layout_catalogue
from support import real_module_calls as calls
from support.real_module import RealModule, largest_error
from support.real_module_calls import bound, decoded
from support.real_modules import CASES, find
from support.service import Server
from support.small_modules import MetaAttention

# building the models imports transformers and timm, which takes seconds
pytestmark = pytest.mark.slow

FULL_HEADS: Final = {"mha", "gpt2", "nanogpt", "codegen", "bloom", "neox", "vit"}
ONE_MATRIX: Final = {"gpt2", "nanogpt", "phi3", "codegen", "bloom", "neox", "falcon", "vit"}
SPELLINGS: Final = {
    "llama": {
        "out_proj": "o_proj", "dense": "o_proj", "out_lin": "o_proj", "q_lin": "q_proj",
        "k_lin": "k_proj", "v_lin": "v_proj",
    },
    "bert": {
        "attention.": "self.", "dense": "output.dense", "query": "self.query", "key": "self.key",
        "value": "self.value",
    },
    "falcon": {"c_attn": "query_key_value", "c_proj": "dense"}, "v2": {"out_proj": "W_output"},
}  # fmt: skip

AS_OTHERS: Final = {"minilm-3": "bert", "llama-llama3": "llama", "llama-linear": "llama",
                    "llama-yarn": "llama"}  # fmt: skip
"""Cases that differ from others in numbers and frequencies alone, which no layout moves: they are
converted to the layouts of `FEW`, one of each rotary order and one of a single matrix."""
FEW: Final = ("llama", "meta", "neox")
PAIRS: Final = [
    pytest.param(case, target, id=f"{name}-{target}")
    for name, case in CASES.items()
    if not name.startswith("minilm") or name in AS_OTHERS
    for target in (FEW if name in AS_OTHERS else layout_catalogue.known())
]


def standard(case: RealModule, name: str) -> str:
    """Returns the layout's own spelling of a tensor's name, without the prefix."""
    name = name.removeprefix(f"{case.layer['prefix']}.")
    for other, spelling in SPELLINGS.get(case.layout, {}).items():
        if name.startswith(other):
            name = name.replace(other, spelling, 1)
    return name


def own_names(case: RealModule) -> set[str]:
    """Returns the names of the layer's tensors, as they are sent."""
    return case.truth.gradients.keys() - case.embeddings.keys()


def expected_refusals(case: RealModule, target: str) -> list[str]:
    """Returns parts of the errors that name what the target cannot hold; [] if it holds all."""
    names, reasons = own_names(case), []
    if target != "llama":
        extra = [n for n in names if "_norm" in n or n.endswith("sinks")]
        reasons += [f"{n} has no place in {target}" for n in extra]
    if target == "v1":
        reasons += [f"{n} has no place in v1" for n in names if n.endswith("bias")]
    if (
        target in FULL_HEADS
        and case.fields.get("kv_heads", case.fields["heads"]) != (case.fields["heads"])
    ):
        reasons.append(f"{target} has as many key heads as query heads")
    if target in ONE_MATRIX and "key" in case.embeddings and case.name != "whisper":
        reasons.append("query, key and value have no place in one matrix")
    if target == "codegen" and case.fields["heads"] % 4:
        reasons.append("the heads have no place in codegen")
    for name in names if target == "mha" else ():
        query = name.endswith(("q_proj.weight", "q_lin.weight", "W_query.weight", "W_query"))
        if query and len(set(case.tensors[name].shape)) == 2:
            reasons.append("the query projection has no place in mha")
    return reasons


def fields_of(case: RealModule) -> dict[str, Any]:
    """Returns the fields of a convert request."""
    return {n: case.layer[n] for n in ("heads", "kv_heads", "rope") if n in case.layer}


def turned(case: RealModule, order: str | None) -> dict[str, Any]:
    """Returns the field `rope` for another rotary order."""
    return {"rope": case.layer["rope"] | {"order": order}} if "rope" in case.layer else {}


@pytest.mark.parametrize(("case", "target"), PAIRS)
def test_layout_holds_the_layer_bit_for_bit_or_refuses_it_by_name(
    server: Server, case: RealModule, target: str
) -> None:
    """The converted layer gives the module's output, and converts back to the same bytes."""
    own = {standard(case, name): case.tensors[name] for name in own_names(case)}
    fields = fields_of(case)
    there = calls.convert(
        server.http, case.tensors, case.layout, target, prefix=case.layer["prefix"], **fields
    )
    reasons = expected_refusals(case, target)
    if reasons:
        assert there.status_code == 422
        assert any(reason in there.json()["detail"] for reason in reasons), there.text
        return
    assert there.is_success, there.text
    reply = there.json()
    tensors = decoded(reply["tensors"])
    order = reply["rotary_order"]
    rope = turned(case, order)
    # the models of both layouts add their biases in different places
    if (target, case.fields.get("alibi")) not in (("falcon", True), ("bloom", "scaled")):
        found = calls.output(server.http, case, layout=target, prefix="", tensors=tensors, **rope)
        assert largest_error(found, case.truth.output) < bound(case)

    from_order = "interleaved" if case.layout in ("meta", "codegen") else "half"
    again = calls.convert(
        server.http, tensors, target, case.layout, to_order=from_order if rope else None,
        **fields | rope,
    )  # fmt: skip
    assert again.is_success, again.text
    back = {standard(case, n): t for n, t in decoded(again.json()["tensors"]).items()}
    for name, tensor in own.items():
        assert torch.equal(back[name].view(torch.int32), tensor.view(torch.int32)), name
    assert not any(back[name].any() for name in back.keys() - own.keys())  # biases that are added


@pytest.mark.parametrize("target", sorted(FULL_HEADS))
def test_grouped_heads_are_repeated_on_request(server: Server, target: str) -> None:
    case = find("llama")
    fields = fields_of(case) | {"prefix": case.layer["prefix"], "grouped": "repeat"}
    response = calls.convert(server.http, case.tensors, "llama", target, **fields)
    assert response.is_success, response.text
    tensors, order = decoded(response.json()["tensors"]), response.json()["rotary_order"]
    found = calls.output(
        server.http, case, layout=target, prefix="", tensors=tensors, kv_heads=None,
        **turned(case, order),
    )  # fmt: skip
    assert largest_error(found, case.truth.output) < bound(case)


@pytest.mark.representative
def test_llama_in_metas_order_runs_in_metas_module(server: Server) -> None:
    case = find("llama")
    fields = fields_of(case) | {"prefix": case.layer["prefix"]}
    response = calls.convert(server.http, case.tensors, "llama", "meta", **fields)
    assert response.json()["rotary_order"] == "interleaved"
    module = MetaAttention(32, 4, 2, 8)
    module.load_state_dict(decoded(response.json()["tensors"]))
    with torch.no_grad():
        found = module(case.embeddings["x"], case.layer["rope"]["base"])
    assert largest_error(found, case.truth.output) < bound(case)


def test_metas_weights_run_in_the_module_of_transformers(server: Server) -> None:
    case, other = find("meta"), find("llama")
    fields = fields_of(case) | {"prefix": case.layer["prefix"]}
    response = calls.convert(server.http, case.tensors, "meta", "llama", **fields)
    assert response.json()["rotary_order"] == "half"
    model = other.build().eval()
    block = model.get_submodule(other.path)
    block.load_state_dict(decoded(response.json()["tensors"]))
    with torch.no_grad():
        captured = other.capture(model)[1]
        found = other.run(block, case.embeddings, captured)
    assert largest_error(found, case.truth.output) < bound(case)


def test_wrong_rotary_order_gives_another_output(server: Server) -> None:
    case = find("llama")
    found = calls.output(server.http, case, **turned(case, "interleaved"))
    assert largest_error(found, case.truth.output) > 100 * bound(case)
