"""Default parts of variant files: weights in row blocks, gradients, flops, shapes, docstrings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from qkv.attention import catalogue
from qkv.attention.contract import CHECKS, Violation
from qkv.attention.contract_results import check
from qkv.attention.identity_weights import IdentityWeights
from qkv.attention.variant import Variant
from qkv.engine import weight_blocks
from qkv.jobs.weight_forms import WeightForm
from support.each import each

HEAD: Final = '''\
"""A variant. It has two sentences.

Formula: A = softmax(Q K^T),
    over two lines.
Cost: O(L S D).

Weights: stochastic.
"""
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from typing import Annotated, NamedTuple
from pydantic import Field
'''
QKV: Final = (
    'query: Float[Tensor, "B H L D"], key: Float[Tensor, "B G S D"], '
    'value: Float[Tensor, "B G S E"]'
)
OUT: Final = 'Float[Tensor, "B H L E"]'
SCORES: Final = """\
    K = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(K, 1).mT
"""
RETURN: Final = "    return torch.softmax(scores, -1) @ value.repeat_interleave(K, 1)\n"

PLAIN: Final = f"def attend({QKV}) -> {OUT}:\n{SCORES}{RETURN}"
CAUSAL: Final = (
    f"def attend({QKV}, *, causal: bool = False) -> {OUT}:\n{SCORES}"
    "    if causal:\n"
    "        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)\n"
    "        scores = scores.masked_fill(hidden, -torch.inf)\n" + RETURN
)
PER_HEAD: Final = (
    f"def attend({QKV}) -> {OUT}:\n{SCORES}"
    "    slopes = torch.arange(1, scores.shape[1] + 1, dtype=scores.dtype)\n"
    "    scores = scores * slopes.view(1, -1, 1, 1)\n" + RETURN
)
CALL: Final = f"""\
from dataclasses import KW_ONLY, dataclass

@dataclass(frozen=True)
class Call:
    {QKV.replace(", k", chr(10) + "    k").replace(", v", chr(10) + "    v")}
    _: KW_ONLY
    causal: bool = False

def attend(call: Call, outputs: frozenset[str]) -> {OUT}:
    query, key, value, causal = call.query, call.key, call.value, call.causal
""" + CAUSAL.partition("\n")[2]
OUTPUT: Final = frozenset({"output"})
SHARED_WIDTH: Final = PLAIN.replace("B G S E", "B G S D").replace("B H L E", "B H L D")

Load = Callable[..., Variant]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads the variant of a file with this text after `HEAD`."""

    def loaded(text: str, name: str = "small") -> Variant:
        path = tmp_path / f"{name}.py"
        path.write_text(HEAD + text)
        return catalogue.load(path)

    return loaded


def tensors(L: int = 6, S: int = 8, **more: int) -> dict[str, torch.Tensor]:
    sizes = {"B": 2, "H": 4, "G": 2, "D": 5, "E": 3} | more
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": "BHLD", "key": "BGSD", "value": "BGSE"}
    sizes |= {"L": L, "S": S}
    return {
        n: torch.randn([sizes[x] for x in letters], generator=generator, dtype=torch.float64)
        for n, letters in shapes.items()
    }


def matrix(inputs: dict[str, torch.Tensor], causal: bool = False) -> torch.Tensor:
    """Computes the weights of `PLAIN` and `CAUSAL`."""
    scores = inputs["query"] @ inputs["key"].repeat_interleave(2, 1).mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(scores, -1)


def small_blocks(variant: Variant, arguments: dict[str, Any]) -> Callable[[slice], torch.Tensor]:
    """Returns the default row blocks, of at most two rows at a time."""

    def output(**given: Any) -> torch.Tensor:
        result: torch.Tensor = variant.attend(**given, outputs=OUTPUT).output
        return result

    elements = 2 * (2 * 4 * 8)
    return IdentityWeights(output, variant.inputs, variant.outputs["output"], arguments, elements)


def test_docstring_has_summary_formula_cost_and_kind(load: Load) -> None:
    variant = load(PLAIN)
    assert variant.summary == "A variant."
    assert variant.formula == "A = softmax(Q K^T), over two lines"
    assert (variant.paper, variant.cost) == ("not given", "O(L S D)")
    assert variant.weights_are(variant.parse({})) == "stochastic"


@pytest.mark.parametrize(
    ("hook", "kinds"),
    [
        ("def weights_are(parameters): return 'signed'", ["signed", "signed"]),
        ("def weights_are(inputs): return 'signed' if 'value' in inputs else 'unnormalised'",
         ["unnormalised", "signed"]),
        ("def weights_are(parameters, inputs): return 'signed' if inputs else 'unnormalised'",
         ["unnormalised", "signed"]),
    ],
)  # fmt: skip
def test_kind_of_weights_may_depend_on_parameters_and_inputs(
    load: Load, hook: str, kinds: list[str]
) -> None:
    variant = load(f"{PLAIN}\n{hook}\n")
    defaults = variant.parse({})
    assert [variant.weights_are(defaults), variant.weights_are(defaults, {"value"})] == kinds


def test_fields_of_a_call_are_the_arguments_of_attend(load: Load) -> None:
    one, other = load(CAUSAL), load(CALL)
    assert other.inputs == one.inputs
    assert other.outputs == one.outputs
    assert other.parameters.model_fields.keys() == one.parameters.model_fields.keys()
    inputs = tensors()
    for causal in (False, True):
        found, expected = (
            v.attend(**inputs, causal=causal, outputs=frozenset({"output", "weights"}))
            for v in (other, one)
        )
        assert torch.equal(found.output, expected.output)
        assert torch.equal(found.weights, expected.weights)


@pytest.mark.parametrize("text", [PLAIN, CAUSAL, PER_HEAD, SHARED_WIDTH, CALL])
def test_variant_with_default_parts_passes_every_check(load: Load, text: str) -> None:
    failed = [result for result in check(load(text)) if result.status == "FAIL"]
    assert failed == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", [CAUSAL, CAUSAL.replace("E", "D")])
def test_row_blocks_of_a_large_matrix_are_its_rows(load: Load, text: str, causal: bool) -> None:
    """Causal rows depend on their position: a block of queries alone would be wrong."""
    inputs = tensors(E=5)
    rows = small_blocks(load(text), {**inputs, "causal": causal})
    whole = matrix(inputs, causal)
    for part in (slice(0, 1), slice(1, 6), slice(2, 3)):
        torch.testing.assert_close(rows(part), whole[:, :, part], rtol=0, atol=1e-12)


def test_large_matrix_is_computed_in_blocks_of_queries(load: Load) -> None:
    body = f"{SCORES}    LENGTHS.append(query.shape[2])\n{RETURN}"
    variant = load(f"LENGTHS: list[int] = []\ndef attend({QKV}) -> {OUT}:\n{body}")
    lengths = variant.module.LENGTHS
    lengths.clear()
    rows = small_blocks(variant, tensors())
    rows(slice(0, 2))
    rows(slice(2, 4))
    assert lengths[0] == 6  # the output that blocks are checked against
    assert set(lengths[1:]) == {2}


SOFTPLUS: Final = PLAIN.replace("torch.softmax(scores, -1)", "scores.exp().log1p()")
LINEAR: Final = (
    f"def attend({QKV}) -> {OUT}:\n    K = query.shape[1] // key.shape[1]\n"
    "    features = key.exp().repeat_interleave(K, 1).mT\n"
    "    return query.exp() @ (features @ value.repeat_interleave(K, 1))\n"
)
# in turn: no gradient, a wrong one, an error in it, and query heads in another order
WITHOUT_GRADIENT: Final = [
    PLAIN.replace("    return ", "    with torch.no_grad():\n        return "),
    PLAIN.replace("value.repeat", "(value.detach() + (value - value.detach()) / 2).repeat"),
    PLAIN.replace("    return ", "    A = torch.softmax(scores, -1)\n    output = ").replace(
        "torch.softmax(scores, -1) @", "A @"
    )
    + "    A.zero_()\n    return output\n",
    PLAIN.replace("repeat_interleave(K, 1)", "repeat(1, K, 1, 1)"),
]


def exact_weights(variant: Variant, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Computes the output in float64 for the identity as values, a few columns at a time."""
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    B, G, S, E = wide["value"].shape
    parts = []
    for columns in torch.eye(S, dtype=torch.float64).split(E, -1):
        values = columns.expand(B, G, S, E)
        parts.append(variant.attend(**wide | {"value": values}, outputs=OUTPUT).output)
    return torch.cat(parts, -1)


@pytest.mark.parametrize("text", [PLAIN, SOFTPLUS, LINEAR, SHARED_WIDTH, *WITHOUT_GRADIENT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_default_weights_are_within_the_roundings_of_float32(
    load: Load, text: str, dtype: torch.dtype
) -> None:
    variant = load(text)
    inputs = {name: tensor.to(dtype) for name, tensor in tensors(L=150, S=300, E=5).items()}
    with torch.inference_mode():
        weights = variant.attend(**inputs, outputs=frozenset({"weights"})).weights
        exact = exact_weights(variant, inputs)
    assert weights.dtype == torch.float32
    largest_score = 5 * 4.0**2  # a score's rounding is one of its exponential's exponent
    bound = 4 * largest_score * torch.finfo(torch.float32).eps * exact.amax(-1, keepdim=True)
    assert bool(((weights - exact).abs() <= bound).all())


@pytest.mark.parametrize("text", [PLAIN, SHARED_WIDTH])
def test_products_of_default_weights_have_few_columns(load: Load, text: str) -> None:
    """The identity as values would have as many columns as there are keys."""
    noted = text.replace(SCORES, f"{SCORES}    WIDTHS.add(value.shape[3])\n")
    variant = load(f"WIDTHS: set[int] = set()\n{noted}")
    variant.attend(**tensors(L=150, S=300, E=5), outputs=frozenset({"weights"}))
    assert max(variant.module.WIDTHS) <= 64


@each("form", [WeightForm("top_k", 2), WeightForm("stats"), WeightForm("pool", 3)])
def test_weight_forms_see_all_heads_together(load: Load, form: WeightForm) -> None:
    """An `attend` that uses the number of a head gets all heads, however large a head is."""
    variant, inputs = load(PER_HEAD), tensors(L=9)
    sizes = {"B": 2, "H": 4, "G": 2, "L": 9, "S": 8, "D": 5, "E": 3}
    with pytest.MonkeyPatch.context() as patch:
        # a private name: with real blocks, a head needs 9,000 keys and the test 13 s
        patch.setattr(weight_blocks, "_CPU_BLOCK_ELEMENTS", 16)
        result = weight_blocks.compute_weight_form(variant, form, inputs, variant.parse({}), sizes)
    slopes = torch.arange(1, 5, dtype=torch.float64).view(1, -1, 1, 1)
    whole = matrix({**inputs, "query": inputs["query"] * slopes})
    if form.kind == "top_k":
        torch.testing.assert_close(result["weights"], whole.topk(2).values)
    elif form.kind == "stats":
        torch.testing.assert_close(result["largest"], whole.amax(-1))
    else:
        torch.testing.assert_close(result["weights"].sum(-1), torch.ones(2, 4, 3).double())


def test_gradient_of_a_detached_or_unused_input_is_zero(load: Load) -> None:
    detached = load(PLAIN.replace("query @", "query.detach() @"), "detached")
    unused = load(
        f"def attend({QKV}) -> {OUT}:\n"
        "    return query.new_zeros(*query.shape[:3], value.shape[3])\n",
        "unused",
    )
    inputs, grad = tensors(), torch.ones(2, 4, 6, 3, dtype=torch.float64)
    for variant, used in ((detached, {"key", "value"}), (unused, set())):
        assert variant.backward is not None
        with torch.inference_mode():
            gradients = variant.backward(grad, **inputs)
        assert {n: t.shape for n, t in gradients.items()} == {n: t.shape for n, t in inputs.items()}
        assert {n for n, t in gradients.items() if t.any()} == used


def test_flops_are_those_of_the_products(load: Load) -> None:
    sizes = {"B": 2, "H": 4, "G": 2, "L": 6, "S": 8, "D": 5, "E": 3}
    products = 2 * 2 * 4 * 6 * 8 * (5 + 3)
    assert load(PLAIN).flops(sizes) == products
    branch = PLAIN.replace(RETURN, f"    if scores.max() > 0:\n        scores = -scores\n{RETURN}")
    assert load(branch, "branch").flops(sizes) == products  # it cannot run without numbers
    assert load(PLAIN, "again").score_count(sizes, load(PLAIN).parse({})) == 2 * 4 * 6 * 8


def test_wrong_shape_of_an_output_is_an_error(load: Load) -> None:
    variant = load(f"def attend({QKV}) -> {OUT}:\n{SCORES}    return scores\n")
    with pytest.raises(ValueError, match=r"small: attend's output has shape \[2, 4, 6, 8\]"):
        variant.attend(**tensors())


def test_named_tuple_without_weights_gets_weights(load: Load) -> None:
    text = (
        f"class Outputs(NamedTuple):\n    output: {OUT}\n    scores: "
        'Float[Tensor, "B H L S"]\n'
        + PLAIN.replace(f"-> {OUT}", "-> Outputs").replace(
            "    return torch.softmax(scores, -1) @ value.repeat_interleave(K, 1)",
            "    return Outputs(torch.softmax(scores, -1) @ value.repeat_interleave(K, 1), scores)",
        )
    )
    variant, inputs = load(text), tensors()
    assert list(variant.outputs) == ["output", "scores", "weights"]
    result = variant.attend(**inputs, outputs=frozenset({"weights"}))
    assert result.output is None
    torch.testing.assert_close(result.weights, matrix(inputs))


WRONG: Final = {
    "accuracy": PLAIN.replace("query @", "query.float().to(query.dtype) * 1.01 @")
    + "from qkv.attention.step import Step\n"
    "STEPS = (Step('output', 'B H L E', None, 'Right.'),)\n"
    "def steps(query, key, value):\n"
    "    return {'output': attend(query / 1.01 / 1.01, key, value)}\n",
    "weights": PLAIN.replace("@ value.", "@ value.square()."),
    "steps": PLAIN + "from qkv.attention.step import Step\n"
    "STEPS = (Step('output', 'B H L E', None, 'Too large.'),)\n"
    "def steps(query, key, value):\n    return {'output': 1.01 * attend(query, key, value)}\n",
    "stochastic rows": PLAIN.replace("torch.softmax(scores, -1)", "scores.exp()"),
    "hard inputs": PLAIN.replace(
        "torch.softmax(scores, -1)", "(scores.exp() / scores.exp().sum(-1, keepdim=True))"
    ),
    "purity": PLAIN.replace(SCORES, f"    query.mul_(0.5)\n{SCORES}"),
    "batches": PLAIN.replace(RETURN, f"    scores = scores - scores.mean(0)\n{RETURN}"),
    "shapes and dtypes": PLAIN.replace("    return ", "    return torch.zeros(1) + "),
    "parameters": PLAIN.replace(f"{QKV})", f"{QKV}, *, gain: object = 1)"),
    "flops": PLAIN + "def flops(sizes):\n    return 0\n",
    "gradients": PLAIN + "def backward(grad_output, query, key, value):\n"
    "    return {'query': query, 'key': key, 'value': value}\n",
    "unseen keys": PLAIN.replace(
        f"{QKV})", f'{QKV}, key_lengths: Int64[Tensor, "B"] | None = None)'
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_check_finds_the_fault(load: Load, name: str) -> None:
    variant = load(WRONG[name])
    with pytest.raises(Violation):
        CHECKS[name](variant)
