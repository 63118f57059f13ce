"""The contract of a variant as checks: annotations, numbers, gradients, same bits.

`CHECKS` has them by name; `contract_results` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.sample_inputs import (
    dtypes_of,
    largest_number,
    output_of,
    sample,
    to_float64,
)
from qkv.attention.signature import fixed_size
from qkv.attention.step import STEPS
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent

_LENGTHS: Final[tuple[dict[str, int], ...]] = ({}, {"L": 1, "S": 1})
_LARGE: Final = {"float64": 1e4, "float32": 1e4, "float16": 100.0, "bfloat16": 100.0}
_OUTPUT: Final = frozenset({"output"})
_STEP: Final = torch.finfo(torch.float64).eps ** (1 / 3)  # least error of a central difference


class Violation(Exception):
    """A variant breaks its contract."""


class Skipped(Exception):
    """A check does not apply to a variant."""


def _annotations(variant: Variant) -> str:
    """Lists the inputs, outputs and parameters that the annotations describe."""
    inputs = ", ".join(
        f"{i.name} ({', '.join(i.letters)}){'?' if i.is_optional else ''}"
        for i in variant.inputs.values()
    )
    outputs = ", ".join(f"{o.name} ({', '.join(o.letters)})" for o in variant.outputs.values())
    parameters = ", ".join(variant.parameters.model_fields) or "none"
    return f"{inputs} -> {outputs}; parameters: {parameters}"


def _parameters(variant: Variant) -> str | None:
    """Checks that defaults are valid, and that wrong parameters are rejected."""
    defaults = variant.parse({})
    accepted = {n: v for n, v in defaults.model_dump(mode="json").items() if v is not None}
    try:
        variant.parse(accepted)
    except InvalidContent as error:
        raise Violation(f"a default does not fit its own annotation: {error.detail}") from None
    wrong: list[tuple[str, Any]] = [("no_such_parameter", 1)]
    wrong += [(name, True) for name in variant.refuses]
    wrong += [(name, {"no such": "value"}) for name in variant.parameters.model_fields]
    for name, value in wrong:
        try:
            variant.parse({name: value})
        except InvalidContent:
            continue
        raise Violation(
            f"parameter {name} is not validated: {value!r} is accepted; annotate it with a type"
        )
    return None


def _shapes_and_dtypes(variant: Variant) -> str:
    """Checks shape and dtype of each output, for each dtype and each value of a bool parameter."""
    defaults = variant.parse({}).model_dump()
    flips = [{}, *({n: not v} for n, v in defaults.items() if isinstance(v, bool))]
    for dtype in dtypes_of(variant):
        for parameters in flips:
            sizes, tensors = sample(variant, dtype, parameters=parameters)
            every = variant.attend(**tensors, **parameters, outputs=frozenset(variant.outputs))
            for name, output in variant.outputs.items():
                shape = tuple(fixed_size(x) or sizes[x] for x in output.letters)
                expected = score_dtype(dtype) if output.is_exact else dtype
                _check_tensor(f"{name}, for {_short(dtype)}", getattr(every, name), shape, expected)
                alone = variant.attend(**tensors, **parameters, outputs=frozenset({name}))
                _check_tensor(f"{name} alone", getattr(alone, name), shape, expected)
    return ", ".join(map(_short, dtypes_of(variant)))


def _accuracy(variant: Variant) -> str:
    """Checks `attend` against `steps`, or each dtype against float64 without them.

    A sum of n products is off by n roundings of its largest term at most.
    """
    worst = 0.0
    for dtype in dtypes_of(variant):
        sizes, tensors = sample(variant, dtype)
        output = variant.attend(**tensors, outputs=_OUTPUT).output.double()
        drawn = variant.random_inputs(tensors)  # as they are drawn for this dtype
        truth = variant.reference(**{n: to_float64(v) for n, v in drawn.items()}).output.double()
        largest = max(float(truth.abs().max()), largest_number(tensors))
        terms = sum(size for letter, size in sizes.items() if letter not in "BHGJVT")
        bound = terms * torch.finfo(dtype).eps * largest
        error = float((output - truth).abs().max())
        if not error <= bound:
            raise Violation(
                f"output in {_short(dtype)} is off by {error:.1e}: expected at most {bound:.1e} "
                f"from {'`steps`' if variant.steps else 'float64'}"
            )
        worst = max(worst, error / bound)
    _check_every_output(variant)
    source = "`steps`" if variant.steps else "attend in float64 (there are no `steps`)"
    return f"against {source}: {worst:.2f} of the tolerance"


def _check_every_output(variant: Variant) -> None:
    """Checks all outputs in float64: two paths that share no code agree to half the digits."""
    _, tensors = sample(variant, torch.float64)
    result = variant.attend(**tensors, outputs=frozenset(variant.outputs))
    truth = variant.reference(**tensors)
    close = math.sqrt(torch.finfo(torch.float64).eps)
    for name in variant.outputs:
        if (expected := getattr(truth, name, None)) is None:
            continue
        if not torch.allclose(getattr(result, name), expected.double(), rtol=close, atol=close):
            raise Violation(f"{name} differs from `steps` in more than half of the digits")


def _weights(variant: Variant) -> str | None:
    """Checks that the weights times the values are the output, for whole matrix and row blocks."""
    if "weights" not in variant.outputs:
        raise Skipped("it has no weights: there is no required input value (B, H, S, E)")
    letters = variant.outputs["weights"].letters
    for dtype in dtypes_of(variant):
        sizes, tensors = sample(variant, dtype)
        values = frozenset({"value"} & variant.outputs.keys())
        result = variant.attend(**tensors, outputs=values | {"output", "weights"})
        if values:
            value = result.value.double()
        elif "value" in variant.inputs:
            value = tensors[variant.inputs["value"].argument].double()
        else:
            raise Skipped("it has no values")
        A, eps = result.weights.double(), torch.finfo(score_dtype(dtype)).eps
        if A.ndim == value.ndim:
            value = value.repeat_interleave(A.shape[1] // value.shape[1], 1)
        else:  # each item is one row
            A = A[:, None]
        product = (A @ value).view(result.output.shape)
        size = (A.abs() @ value.abs()).view(result.output.shape)
        # a file without `weights` may have sums in the dtype of the request
        narrow = torch.finfo(dtype)
        weights_eps = eps if variant.has_row_blocks else narrow.eps
        bound = (sizes[letters[-1]] + 2) * weights_eps * size + narrow.eps * product.abs()
        error = (result.output.double() - product).abs()
        if not bool((error <= bound).all()):
            raise Violation(
                f"weights @ value is off the output by {float(error.max()):.1e} in "
                f"{_short(dtype)}: expected at most {float(bound.max()):.1e}. Is output = A @ "
                "value for a matrix A that does not depend on the values?"
            )
        R, rows = sizes[letters[-2]], variant.row_block_function(tensors)
        scale = float(A.abs().sum(-1).max()) * sizes[letters[-1]] * sizes["D"]
        parts = [slice(0, 1), slice(1, R - 1), slice(R - 1, R)]
        blocks = torch.cat([rows(part) for part in parts if part.start < part.stop], -2)
        torch.testing.assert_close(
            blocks, result.weights, rtol=0, atol=64 * eps * scale,
            msg=lambda text: f"blocks of rows are not the whole matrix: {text}",
        )  # fmt: skip
    return None if variant.has_row_blocks else "computed with the identity as values"


def _steps(variant: Variant) -> str:
    """Checks names, shapes and symbols of the steps, and that the last one is the output."""
    if not variant.steps:
        raise Skipped("it has no `steps`")
    for step in variant.steps.values():
        if step.symbol is not None and step.symbol not in variant.formula:
            raise Violation(
                f"the symbol of {step.name} is no part of the formula: got {step.symbol!r}, "
                f"expected a part of {variant.formula!r}"
            )
    sizes, tensors = sample(variant, torch.float64)
    given = [i.name for i in variant.inputs.values() if i.argument in tensors]
    found = variant.compute_steps(**variant.random_inputs(tensors))
    for name in variant.group_names(variant.parse({}), given)["steps"]:
        if name not in found:
            raise Violation(f"`steps` does not return {name}: got {', '.join(found)}")
        shape = tuple(sizes[x] for x in variant.steps[name].letters)
        _check_tensor(name, found[name], shape, None)
    output = output_of(variant, tensors)
    bound = math.sqrt(torch.finfo(torch.float64).eps) * max(1.0, float(output.abs().max()))
    error = float((found[f"{STEPS}output"] - output).abs().max())
    if not error <= bound:
        raise Violation(f"the last step is off the output by {error:.1e}: expected {bound:.1e}")
    return f"{len(variant.steps)} steps"


def _stochastic(variant: Variant) -> str | None:
    """Checks that stochastic weights are not negative and each row sums to 1."""
    if "weights" not in variant.outputs:
        raise Skipped("it has no weights")
    if (kind := variant.weights_are(variant.parse({}))) != "stochastic":
        raise Skipped(f"its weights are {kind}")
    _, tensors = sample(variant, torch.float64)
    A = variant.attend(**tensors, outputs=frozenset({"weights"})).weights
    if bool((A < 0).any()):
        raise Violation(f"stochastic weights are not negative: got {float(A.min()):.3g}")
    error = float((A.sum(-1) - 1).abs().max())
    if not error <= A.shape[-1] * 64 * torch.finfo(A.dtype).eps:
        raise Violation(f"rows of stochastic weights sum to 1: got a sum off by {error:.1e}")
    return None


def _gradients(variant: Variant) -> str:
    """Checks the gradients against central differences of `attend` in float64."""
    if (backward := variant.backward) is None:
        raise Skipped("no input is floating")
    _, tensors = sample(variant, torch.float64)
    floating = {
        i.name: i.argument
        for i in variant.inputs.values()
        if i.argument in tensors and tensors[i.argument].is_floating_point()
    }
    output = variant.attend(**tensors, outputs=_OUTPUT).output
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    gradients = backward(grad, **tensors)
    if set(gradients) != set(floating):
        raise Violation(f"backward returns {sorted(gradients)}: expected {sorted(floating)}")
    for name, argument in floating.items():
        x, gradient = tensors[argument], gradients[name]
        _check_tensor(f"the gradient of {name}", gradient, tuple(x.shape), None)
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        ahead, behind = (
            float((grad * output_of(variant, tensors | {argument: x + h * direction})).sum())
            for h in (_STEP, -_STEP)
        )
        expected, slope = (ahead - behind) / (2 * _STEP), float((gradient * direction).sum())
        terms = (gradient * direction).abs().sum() + (grad * output).abs().sum()
        bound = 1e4 * _STEP**2 * float(terms)
        if not abs(slope - expected) <= bound:
            raise Violation(
                f"the gradient of {name} along a random direction is {slope:.9g}: expected "
                f"{expected:.9g}, a difference quotient of attend"
            )
    return "by its `backward`" if variant.has_closed_form_gradients else "by autograd"


def _flops(variant: Variant) -> str:
    """Checks that the floating-point operations are a positive number."""
    sizes, _ = sample(variant, torch.float32)
    if not (count := variant.flops(sizes)) > 0:
        raise Violation(f"flops is {count}: expected a positive number")
    letters = dict.fromkeys(x for i in variant.inputs.values() for x in i.letters if x in sizes)
    return f"{count} for {', '.join(f'{x}={sizes[x]}' for x in letters)}"


def _hard_inputs(variant: Variant) -> str | None:
    """Checks that finite inputs give no NaN, and no infinity unless the dtype cannot hold it.

    In float16 and bfloat16 it is only a remark: a file that computes in them may have its reasons.
    """
    remarks = []
    families: dict[str, Callable[[Tensor], Tensor]] = {
        "zeros": torch.zeros_like,
        "equal numbers": torch.ones_like,
        "large numbers": lambda x: x * _LARGE[_short(x.dtype)],
        "small numbers": lambda x: x * 1e-7,
    }
    for dtype in dtypes_of(variant):
        for title, family in families.items():
            for lengths in _LENGTHS:
                _, tensors = sample(variant, dtype, sizes=lengths)
                hard = {n: family(t) if t.is_floating_point() else t for n, t in tensors.items()}
                output = output_of(variant, hard)
                wide = output_of(variant, {n: to_float64(t) for n, t in hard.items()})
                fits = wide.abs() <= torch.finfo(dtype).max / 4  # false of NaN and infinity
                if not bool((output.isfinite() | ~fits).all()) or not bool(wide.isfinite().all()):
                    problem = f"{title} in {_short(dtype)} give NaN or infinity"
                    if dtype == score_dtype(dtype):
                        raise Violation(
                            f"{problem}: before exp, subtract the largest score; do not divide by 0"
                        )
                    remarks.append(problem)
    return "; ".join(dict.fromkeys(remarks)) or None


def _unseen_keys(variant: Variant) -> str | None:
    """Checks that a row that sees no key is zeros, and that padding has no influence."""
    if (spec := variant.inputs.get("key_lengths")) is None:
        raise Skipped("it takes no key_lengths")
    sizes, tensors = sample(variant, torch.float32)
    lengths = torch.full((sizes["B"],), sizes["S"] - 1)
    lengths[0] = 0
    output = output_of(variant, tensors | {spec.argument: lengths})
    if not bool((output[0] == 0).all()):
        raise Violation("an item with key_lengths 0 sees no key: expected an output of zeros")
    other = dict(tensors)
    for i in variant.inputs.values():
        if i.argument in other and "S" in i.letters and not i.broadcasts and i.letters[0] == "B":
            axis = i.letters.index("S")
            other[i.argument] = other[i.argument].clone()
            other[i.argument].narrow(axis, sizes["S"] - 1, 1).fill_(3.0)
    if not torch.equal(output, output_of(variant, other | {spec.argument: lengths})):
        raise Violation("padded keys change the output")
    return None


def _purity(variant: Variant) -> str | None:
    """Checks that a second call has the same bits, and that the inputs are unchanged."""
    _, tensors = sample(variant, torch.float32)
    before = {n: t.clone() for n, t in tensors.items()}
    first = output_of(variant, tensors)
    for name, tensor in tensors.items():
        if not torch.equal(tensor, before[name]):
            raise Violation(f"attend writes to its argument {name}")
    state = torch.random.get_rng_state()
    second = output_of(variant, tensors)
    if not _same_bits(first, second):
        raise Violation("two calls with the same inputs have different bits")
    if not torch.equal(state, torch.random.get_rng_state()):
        raise Violation("attend draws from torch's global random numbers: use a seed parameter")
    return None


def _batches(variant: Variant) -> str | None:
    """Checks that an item of a batch does not depend on the other items."""
    for dtype in dtypes_of(variant):
        _, tensors = sample(variant, dtype, sizes={"B": 3})
        has_item = {i.argument for i in variant.inputs.values() if "B" in i.letters}
        output = output_of(variant, tensors)
        others = {
            n: torch.cat([t[:1], t[1:].flip(0) if t.dtype == torch.int64 else -t[1:] / 2])
            if n in has_item and t.dtype != torch.bool
            else t
            for n, t in tensors.items()
        }
        if not _same_bits(output[0], output_of(variant, others)[0]):
            raise Violation(f"an item's bits depend on the other items, in {_short(dtype)}")
        alone = output_of(variant, {n: t[:1] if n in has_item else t for n, t in tensors.items()})
        size = max(float(output.double().abs().max()), largest_number(tensors))
        bound = 64 * torch.finfo(dtype).eps * size
        if not bool(((alone[0] - output[0]).double().abs() <= bound).all()):
            raise Violation(f"an item alone differs from the item in a batch, in {_short(dtype)}")
    if not variant.stackable_below:
        return "requests are never stacked: there is no STACKABLE_BELOW"
    return f"requests with numbers below {variant.stackable_below:g} are stacked on a GPU"


CHECKS: Final[Mapping[str, Callable[[Variant], str | None]]] = {
    "annotations": _annotations,
    "parameters": _parameters,
    "shapes and dtypes": _shapes_and_dtypes,
    "accuracy": _accuracy,
    "weights": _weights,
    "steps": _steps,
    "stochastic rows": _stochastic,
    "gradients": _gradients,
    "flops": _flops,
    "hard inputs": _hard_inputs,
    "unseen keys": _unseen_keys,
    "purity": _purity,
    "batches": _batches,
}
"""Each check takes a variant, returns a remark or None, and raises `Violation` or `Skipped`."""


def _check_tensor(
    name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    if not isinstance(tensor, Tensor):
        raise Violation(f"{name} is no tensor: got {type(tensor).__name__}")
    if tensor.shape != shape:
        raise Violation(f"{name} has shape {list(tensor.shape)}: expected {list(shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise Violation(f"{name} has dtype {_short(tensor.dtype)}: expected {_short(dtype)}")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    one, other = one.contiguous().view(-1), other.contiguous().view(-1)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
