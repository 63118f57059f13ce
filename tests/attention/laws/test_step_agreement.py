"""The steps of every variant: what they say of themselves, and that the last one is the output."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.attention.common import score_steps
from qkv.attention.step import STEPS
from qkv.attention.variant import Variant
from support.drawn_requests import requests
from support.examples import examples
from support.variant_bounds import is_near
from support.variant_calls import VARIANTS

with_steps = pytest.mark.parametrize(
    "variant", [v for v in VARIANTS.values() if v.steps], ids=lambda v: v.name
)


@with_steps
def test_steps_begin_with_inputs_and_point_to_the_formula(variant: Variant) -> None:
    steps = list(variant.steps.values())
    inputs = [n for n in ("query", "key", "value") if n in variant.inputs]
    assert [step.name for step in steps[: len(inputs)]] == inputs
    for step in steps:
        assert step.symbol is None or step.symbol in variant.formula, step
        assert step.summary.endswith("."), step
        assert step.name.isidentifier(), step


@examples(40)
@given(data=st.data())
@with_steps
def test_steps_agree_with_output_and_weights(variant: Variant, data: st.DataObject) -> None:
    """Draws every dtype and parameter, masks, and lengths with garbage in the padding."""
    request = data.draw(requests(variant))
    call = request.arguments()
    found = variant.compute_steps(**wide(variant, call))
    truth = variant.reference(**call)
    bounds = request.bounds(truth)
    result = variant.attend(**call, outputs=frozenset({"output", "weights"}))
    for name in {"output", "weights"} & bounds.keys():
        if name == "output" or not call.get("dropout"):  # which has a step of its own
            output = getattr(result, name)
            # the bound has one rounding to the dtype: that of the output
            assert is_near(output, found[STEPS + name], bounds[name]), name


def reached(module: ModuleType, *functions: str) -> tuple[set[str], set[str]]:
    """Returns the functions of a file that these call, and the modules of qkv that they import."""
    tree = ast.parse(inspect.getsource(module))
    defined = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    del defined["Call"]  # the request, which all of them take
    sources = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qkv.attention.")
        for alias in node.names
    }
    called, waiting, modules = set(functions), [*functions], set()
    while waiting:
        names = names_in(defined[waiting.pop()])
        modules |= {sources[name] for name in names & sources.keys()}
        waiting += (names & defined.keys()) - called
        called |= names & defined.keys()
    found = {s if s in sys.modules else s.rpartition(".")[0] for s in modules}
    return called, found


def names_in(part: ast.AST) -> set[str]:
    """Returns the names that a function or a class reads and does not assign."""
    names = [n for n in ast.walk(part) if isinstance(n, ast.Name)]
    return {n.id for n in names} - {n.id for n in names if isinstance(n.ctx, ast.Store)}


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.call is not None])
def test_steps_share_no_code_with_attend(name: str) -> None:
    module = VARIANTS[name].module
    functions, modules = reached(module, "steps")
    others, other_modules = reached(module, "attend", "weights", "backward")
    assert not functions & others
    assert not modules & other_modules
    assert modules <= {"qkv.attention.common.score_steps", "qkv.attention.step"}
    assert "qkv.attention.common" not in inspect.getsource(score_steps)
    imports = re.findall(r"^from (qkv\.\S+)", inspect.getsource(score_steps), re.MULTILINE)
    assert {*imports} <= {"qkv.attention.step"}


def wide(variant: Variant, call: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `compute_steps` of one request."""
    found = {
        n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for n, x in variant.random_inputs(call).items()
    }
    if variant.takes_plane:
        B, H = found["query_BHLD"].shape[:2]
        found["plane_BH"] = torch.arange(B * H).view(B, H)
    return found
