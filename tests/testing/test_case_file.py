"""Tests of case files: they hold a call exactly, and a hostile one gives one error."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from qkv.attention.catalogue import variants
from qkv.errors import InvalidContent, NotFound, QkvError
from qkv.tensors import RawTensor
from qkv.testing.case_file import CaseFile, read_results
from qkv.testing.case_spec import DTYPES, CaseSpec, input_digest
from qkv.testing.families import families_of
from qkv.testing.judgement import expected_shapes, judge
from qkv.wire import json, safetensors
from qkv.wire.message import Message


def drawn(spec: CaseSpec) -> Message:
    return CaseFile(spec, spec.draw()).to_message()


def sent(message: Message, codec: ModuleType = safetensors) -> CaseFile:
    """Returns the case after it has been a file."""
    return CaseFile.from_message(codec.decode(b"".join(codec.encode(message, "inputs")), "inputs"))


@pytest.mark.parametrize("codec", [safetensors, json])
@pytest.mark.parametrize("dtype", DTYPES)
def test_file_holds_every_family_bit_for_bit(codec: ModuleType, dtype: str) -> None:
    for family in families_of("softmax"):
        if family == "low" and dtype in ("float16", "bfloat16"):
            continue  # no narrow dtype has such a case
        spec = CaseSpec("softmax", family, dtype, {"scale": 0.1}, {"D": 8}, seed=5)
        case = sent(drawn(spec), codec)
        call = spec.draw()
        assert case.spec == spec
        assert case.call.parameters == {"scale": 0.1}
        assert input_digest(case.call) == input_digest(call)
        assert call.grad_output is not None
        assert case.call.grad_output is not None
        assert torch.equal(case.call.grad_output, call.grad_output)


@pytest.mark.parametrize("variant", variants())
def test_file_holds_every_variant(variant: str) -> None:
    spec = CaseSpec(variant)
    assert input_digest(sent(drawn(spec)).call) == input_digest(spec.draw())


def test_digest_shows_another_gradient_of_the_output() -> None:
    call = CaseSpec("softmax").draw()
    assert call.grad_output is not None
    other = replace(call, grad_output=call.grad_output * 2)
    assert input_digest(other) != input_digest(call) == input_digest(replace(call))


def test_numbers_of_the_file_are_judged_not_those_of_the_spec() -> None:
    message = drawn(CaseSpec("softmax"))
    message.tensors["value"] = RawTensor.from_numpy(np.ones((2, 4, 32, 16), np.float32))
    call = sent(message).call
    assert judge(call, {"output": torch.ones(2, 4, 32, 16)}, family="normal").passed


def numbers(*shape: int, number: float = 1, dtype: str = "f4") -> RawTensor:
    return RawTensor.from_numpy(np.full(shape, number, dtype))


SHAPE = (2, 4, 32, 16)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"query": None}, "softmax needs query"),
        ({"grad_output": None}, "inputs.grad_output is missing"),
        ({"query": numbers(*SHAPE, number=np.nan)}, "query is not finite: got nan"),
        ({"value": numbers(*SHAPE, number=np.inf)}, "value is not finite: got inf"),
        ({"grad_output": numbers(*SHAPE, number=-np.inf)}, "grad_output is not finite: got -inf"),
        ({"grad_output": numbers(2, 4, 32, 1)}, "grad_output has the wrong shape"),
        ({"grad_output": numbers(*SHAPE, dtype="f8")}, "grad_output has the wrong dtype"),
        ({"value": numbers(*SHAPE, dtype="f8")}, "value has the wrong dtype: got float64"),
        ({"value": numbers(2, 4, 31, 16)}, "value has S=31 where key has S=32"),
        ({"value": numbers(2, 4, 32, 0)}, "value is empty: got E=0"),
        ({"mask": numbers(32, 32)}, "mask has the wrong dtype: got float32, expected bool"),
        ({"key_lengths": numbers(2, number=99, dtype="i8")}, "key_lengths is out of range"),
        ({"alibi_slopes": numbers(4)}, "'alibi_slopes' is no input of a case"),
        (
            {
                "query": numbers(1, 1, 1 << 14, 1), "key": numbers(1, 1, 1 << 14, 1),
                "value": numbers(1, 1, 1 << 14, 1), "grad_output": numbers(1, 1, 1 << 14, 1),
            },
            "the case is too large: got 268435456 scores",
        ),
    ],
)  # fmt: skip
def test_wrong_tensor_is_one_error(change: dict[str, RawTensor | None], problem: str) -> None:
    message = drawn(CaseSpec("softmax"))
    changed = message.tensors | change
    tensors = {name: x for name, x in changed.items() if x is not None}
    with pytest.raises(InvalidContent, match=problem):
        sent(replace(message, tensors=tensors))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"case": None}, "case is missing: got null, expected a file that `qkv oracle` writes"),
        ({"case": [1]}, "case is missing"),
        ({"case": {"variant": "softmax"}}, "the case is not valid"),
        ({"dtype": "int8"}, "dtype is invalid"),
        ({"dtype": "float64"}, "query has the wrong dtype: got float32, expected float64"),
        ({"parameters": {"dropout": 0.5}}, "dropout cannot be verified"),
        ({"parameters": {"no_such": 1}}, "softmax has no parameter 'no_such'"),
        ({"parameters": []}, "parameters is invalid"),
        ({"outputs": ["output"]}, "unknown field 'outputs' of a case"),
    ],
)
def test_wrong_field_is_one_error(change: dict[str, Any], problem: str) -> None:
    message = drawn(CaseSpec("softmax"))
    with pytest.raises(InvalidContent, match=problem):
        sent(replace(message, fields=message.fields | change))


def test_unknown_variant_is_not_found() -> None:
    message = drawn(CaseSpec("softmax"))
    fields = message.fields | {"case": message.fields["case"] | {"variant": "sofmax"}}
    with pytest.raises(NotFound, match="sofmax"):
        sent(replace(message, fields=fields))


def test_case_that_cannot_be_judged_is_not_written() -> None:
    spec = CaseSpec("softmax", sizes={"B": 1, "H": 1})
    call = spec.draw()
    inputs = {n: x[:, :, :1].expand(1, 1, 1 << 14, 16) for n, x in call.inputs.items()}
    with pytest.raises(InvalidContent, match="too large"):
        CaseFile(spec, replace(call, inputs=inputs)).to_message()


Change = Callable[[random.Random, np.ndarray], np.ndarray]


def _spoil(dice: random.Random, x: np.ndarray) -> np.ndarray:
    x = x.copy()
    if x.dtype.kind != "b":
        extreme = dice.choice([np.nan, np.inf, 0, 3e4, -1e-3])
        x.reshape(-1)[dice.randrange(x.size)] = extreme if x.dtype.kind == "f" else 3
    return x


CHANGES: tuple[Change, ...] = (
    _spoil,
    lambda dice, x: x[:1],
    lambda dice, x: x[:0],
    lambda dice, x: x[0],
    lambda dice, x: x.astype(dice.choice(["f8", "?", "i8"])),
)


def test_random_damage_gives_a_report_or_one_error() -> None:
    dice, judged, refused = random.Random(0), 0, 0
    for i in range(12):
        sizes = {letter: dice.randint(1, 3) for letter in "BDE"}
        spec = CaseSpec("softmax", dice.choice(["normal", "mask", "padding", "large"]), sizes=sizes)
        message = drawn(replace(spec, seed=i))
        name = dice.choice(list(message.tensors))
        with np.errstate(invalid="ignore"):
            changed = dice.choice(CHANGES)(dice, message.tensors[name].numpy())
        message.tensors[name] = RawTensor.from_numpy(changed)
        try:
            call = sent(message).call
        except QkvError:
            refused += 1
            continue
        results = {n: torch.zeros(shape) for n, shape in expected_shapes(call).items()}
        judged += bool(judge(call, results, family=spec.family).checks)
    assert judged
    assert refused


def test_results_without_a_dtype_get_that_of_the_call() -> None:
    call = CaseSpec("softmax", dtype="bfloat16", sizes={"B": 1, "H": 1, "L": 1, "E": 2}).draw()
    body = b'{"outputs": {"output": [[[[0.5, -1]]]], "weights": [[1]]}}'
    results = read_results(json.decode(body, "outputs"), call)
    assert torch.equal(results.pop("output"), torch.tensor([[[[0.5, -1]]]]).bfloat16())
    assert not results
