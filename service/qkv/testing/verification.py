"""The oracle's entry points: `verify` returns a report, `assert_matches` raises if it fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from qkv.client.progress_bar import ProgressBar
from qkv.errors import InvalidContent
from qkv.testing.call import Call
from qkv.testing.case_spec import DTYPES, CaseSpec
from qkv.testing.check import Check, compare
from qkv.testing.convention import Layout, check_layout
from qkv.testing.diagnosis import diagnose
from qkv.testing.families import FAMILIES, families_of
from qkv.testing.family import NotDrawn
from qkv.testing.function_runner import Framework, Outcome, run_function
from qkv.testing.layout import guess_layout
from qkv.testing.observation import Observation
from qkv.testing.report import Report
from qkv.testing.torch_kernel import run_torch_kernel
from qkv.testing.truth import find_truth

Dtype = str | torch.dtype
Gradients = bool | Literal["auto"]
Runner = Callable[[CaseSpec, Call], Outcome]
"""Computes the results of a call; the spec is that which drew it."""


def assert_matches(function: Callable[..., Any], variant: str, **options: Any) -> None:
    """Checks that a function computes a variant.

    Args:
        function: as in `verify`.
        variant: its name.
        **options: those of `verify`, and parameters of the variant.

    Raises:
        AssertionError: the report has a failed check, or no check ran; its text is the message.
        QkvError: the variant or a parameter is invalid.
    """
    __tracebackhide__ = True
    report = verify(function, variant, **options)
    if not report.passed:
        raise AssertionError(str(report))


def verify(
    function: Callable[..., Any],
    variant: str,
    *,
    dtype: Dtype | Iterable[Dtype] | None = None,
    families: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    strict: bool = False,
    sizes: Mapping[str, int] | None = None,
    gradients: Gradients = "auto",
    framework: Framework = "torch",
    device: str | torch.device = "cpu",
    layout: Layout | None = None,
    seed: int = 0,
    **parameters: Any,
) -> Report:
    """Runs a function on families of inputs and compares it with the float64 reference.

    The function is called as `function(query, key, value, **keywords)` with tensors (B,H,L,D),
    (B,G,S,D), (B,G,S,E) and returns (B,H,L,E), in the dtype and on the device of the inputs. Its
    keywords are the parameters given here, and what a family sends: `mask` (bool, broadcastable to
    (B,H,L,S)), `key_lengths` (int64 (B,)) or `sinks` ((H,)). Other variants pass their required
    inputs in order. For `gated` they include the decays and betas of the rule; a function may have
    the signature of flash-linear-attention or transformers (`convention`), and also returns the
    state behind the tokens.

    Args:
        function: the function to check. It does not run on families with keywords that it lacks.
        variant: the name of the variant that it claims to compute, for instance "softmax".
        dtype: one or several; None: float32, bfloat16, float16 and float64, without those for
            which every call raises.
        families: names of families; None: all of them, with the strict ones on request.
        skip: names of families that do not run.
        strict: True to add rows that see nothing (zeros are expected), NaN in what is masked, and
            values of another width than the keys.
        sizes: by axis letter (B, H, G, L, S, D, E; Z: 1 for decays per head, or D); the families
            choose the others.
        gradients: True to check the gradients of torch's autograd; "auto": if the first output
            has one. Those of decays and betas are not judged.
        framework: the kind of arrays that the function takes: "torch", "numpy" or "jax". It may
            return any array that has `__array__` or `__dlpack__`.
        device: of torch's tensors.
        layout: "BHTD" for heads before tokens, "BTHD" for tokens before heads; None: "BHTD", and
            for `gated` what the function itself shows; the report then says so.
        seed: of the inputs; the same seed draws the same inputs.
        **parameters: of the variant, for instance `causal=True`.

    Returns:
        The report: its `checks`, and in `diagnosis` the names of known bugs that fit them.

    Raises:
        QkvError: the variant, a family, a dtype or a parameter is invalid.
    """
    if gradients is True and framework != "torch":
        raise InvalidContent(f"gradients need torch's autograd: got framework {framework!r}")
    check_layout(layout)
    with_gradients: Gradients = gradients if framework == "torch" else False
    found: Layout | None = layout if layout or variant == "gated" else "BHTD"

    def run(spec: CaseSpec, call: Call) -> Outcome:
        nonlocal with_gradients, found
        if gradients is True and not call.has_gradients:
            raise InvalidContent(
                f"gradients are not judged: got {variant} with the rule {call.parsed.get('rule')}, "
                "expected the rule linear or another variant"
            )
        runner = partial(run_function, function, device=device, framework=framework)
        found = found or guess_layout(runner, spec)
        order = found or "BHTD"
        outcome = runner(call, layout=order)
        if outcome.results and with_gradients and call.has_gradients:
            outcome, with_gradients = _add_gradients(
                partial(runner, call, gradients=True, layout=order), outcome, with_gradients
            )
        return outcome

    report = verify_runner(
        run,
        variant,
        parameters,
        name=getattr(function, "__name__", type(function).__name__),
        dtype=dtype,
        families=families,
        skip=skip,
        strict=strict,
        sizes=sizes,
        seed=seed,
    )
    return report if layout or found == "BHTD" or not found else replace(report, layout=found)


def verify_runner(
    run: Runner,
    variant: str,
    parameters: Mapping[str, Any],
    *,
    name: str,
    dtype: Dtype | Iterable[Dtype] | None = None,
    families: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    strict: bool = False,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Report:
    """Runs anything that computes a variant, such as another program, on families of inputs.

    Args:
        run: returns the outcome of one call.
        variant: the name of the variant that it claims to compute.
        parameters: of the variant.
        name: of the function or program, for the report.
        dtype, families, skip, strict, sizes, seed: as in `verify`.

    Raises:
        QkvError: the variant, a family, a dtype or a parameter is invalid.
    """
    skip = list(skip)
    spec = CaseSpec(variant, parameters=dict(parameters), sizes=dict(sizes or {}), seed=seed)
    names = _select_families(variant, families, skip, strict)
    pairs = itertools.product(_select_dtypes(dtype), names)
    ran, diagnosis = _run_cases(run, [replace(spec, family=f, dtype=d) for d, f in pairs])
    checks = [Check(n, "", "output", None, not_run="skipped on request") for n in skip] + ran
    return Report(
        function=name,
        variant=variant,
        parameters=parameters,
        seed=seed,
        checks=_without_unsupported(checks) if dtype is None else checks,
        diagnosis=diagnosis,
    )


def _run_cases(run: Runner, specs: Sequence[CaseSpec]) -> tuple[list[Check], list[str]]:
    """Returns the checks of all cases, and the names of the bugs that explain them."""
    checks: list[Check] = []
    observations: list[Observation] = []
    with closing(ProgressBar("case")) as bar:
        for done, spec in enumerate(specs):
            bar.show(done, len(specs), f"{spec.dtype}, {spec.family}")
            try:
                call = spec.draw_if_applicable()
            except NotDrawn as reason:
                checks.append(Check(spec.family, spec.dtype, "output", None, not_run=str(reason)))
                continue
            of_case, observation = check_outcome(spec.family, call, run(spec, call))
            checks += of_case
            if observation is not None:
                observations.append(observation)
        bar.show(len(specs), len(specs), "diagnosis")
        return checks, diagnose(observations)


def _select_families(
    variant: str, families: Iterable[str] | None, skip: Iterable[str], strict: bool
) -> list[str]:
    """Returns the names of the families that run, in order; without a choice, of the variant.

    Raises:
        InvalidContent: a family does not exist.
    """
    skip = list(skip)
    asked = list(families) if families is not None else None
    for name in [*(asked or []), *skip]:
        if name not in FAMILIES:
            raise InvalidContent(f"no family {name!r}; there are {', '.join(FAMILIES)}")
    names = asked or [n for n in families_of(variant) if strict or not FAMILIES[n].is_strict]
    return [n for n in names if n not in skip]


def check_outcome(
    family: str, call: Call, outcome: Outcome
) -> tuple[list[Check], Observation | None]:
    """Returns the checks of the results of one call, and the observation for the diagnosis.

    It needs no function: the results may come from another process or language.

    Args:
        family: the family of the call.
        call: the call.
        outcome: the results of the function.
    """
    label = str(call.dtype)[6:]
    if outcome.not_run:
        return [Check(family, label, "output", None, not_run=outcome.not_run)], None
    if outcome.problem:
        return [Check(family, label, "output", False, problem=outcome.problem)], None
    with_gradients = any(name.startswith("grad ") for name in outcome.results)
    truth = find_truth(call, with_gradients)
    kernel = run_torch_kernel(call, with_gradients)
    checks = [
        compare(family, label, n, x, truth.results[n], truth.budgets[n], kernel.get(n))
        for n, x in outcome.results.items()
    ]
    failed = any(not check.passed for check in checks)
    return checks, Observation(call, truth, outcome.results, failed)


def _add_gradients(
    run: Callable[[], Outcome], outcome: Outcome, gradients: Gradients
) -> tuple[Outcome, Gradients]:
    """Returns the outcome with gradients, and False in place of "auto" if there are none."""
    both = run()
    if both.results:
        return both, True
    if gradients == "auto":
        return outcome, False
    return Outcome({}, f"gradients: {both.problem or both.not_run}"), gradients


def _select_dtypes(dtype: Dtype | Iterable[Dtype] | None) -> list[str]:
    """Returns the names of the dtypes that run; None: all of them.

    Raises:
        InvalidContent: a dtype does not exist.
    """
    if dtype is None:
        return list(DTYPES)
    asked = [dtype] if isinstance(dtype, str | torch.dtype) else dtype
    names = [str(each).removeprefix("torch.") for each in asked]
    for name in names:
        if name not in DTYPES:
            raise InvalidContent(f"no dtype {name!r}; there are {', '.join(DTYPES)}")
    return names


def _without_unsupported(checks: list[Check]) -> list[Check]:
    """Returns the checks; a dtype that always raises did not run, if another dtype ran."""

    def is_refused(check: Check) -> bool:
        of_float64 = check.dtype == "float64" and check.problem.startswith("wrong dtype")
        return of_float64 or check.problem.startswith("raises ")

    ran = [check for check in checks if not check.not_run]
    refused = {
        name for name in DTYPES
        if all(is_refused(c) for c in ran if c.dtype == name)
    }  # fmt: skip
    if all(check.dtype in refused for check in ran):
        return checks
    return [
        replace(check, passed=None, problem="", not_run=check.problem)
        if check.dtype in refused and check.problem
        else check
        for check in checks
    ]
