"""A copy of the package with a minimal variant, a complete one and broken ones; its service."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from qkv.attention import variant_file
from support.package_copies import CopiedService, copy_package, serving
from support.paths import ROOT

COSINE: Final = variant_file.example()

HEAD: Final = '''\
"""A sentence."""
from jaxtyping import Float
from torch import Tensor
'''
QUERY: Final = 'query: Float[Tensor, "B H L D"]'
RETURNS: Final = 'Float[Tensor, "B H L D"]'

BROKEN: Final = {
    "b_syntax": ("def attend(:\n", "line 1 is no Python"),
    "b_raises": ('"""A."""\nraise ValueError("no\\nkernel")\n', "line 2 raises ValueError"),
    "b_exits": ('"""A."""\nimport sys\nsys.exit(3)\n', "SystemExit"),
    "b_import": ('"""A."""\nimport no_such_module\n', "No module named 'no_such_module'"),
    "b_empty": ("", "no docstring"),
    "b_attend": (HEAD, "no function `attend`"),
    "b_constant": (HEAD + "attend = 3\n", "no function `attend`"),
    "b_return": (HEAD + f"def attend({QUERY}):\n    return query\n", "no return annotation"),
    "b_result": (
        HEAD + f"def attend({QUERY}) -> int:\n    return 3\n",
        "returns no array: got int",
    ),
    "b_unnamed": (
        HEAD + f"def attend({QUERY}) -> tuple[{RETURNS}, {RETURNS}]:\n    return query, query\n",
        "returns no array",
    ),
    "b_argument": (
        HEAD + f"def attend({QUERY}, key) -> {RETURNS}:\n    return query\n",
        "key has no",
    ),
    "b_tensor": (
        HEAD + f"def attend(query: Tensor) -> {RETURNS}:\n    return query\n",
        "is no array",
    ),
    "b_star": (
        HEAD + f"def attend({QUERY}, causal: bool = False) -> {RETURNS}:\n    return query\n",
        "after a `*`",
    ),
    "b_default": (
        HEAD + f"def attend({QUERY}, *, causal: bool) -> {RETURNS}:\n    return query\n",
        "causal has no default",
    ),
    "b_axes": (
        HEAD
        + f'def attend(query: Float[Tensor, "batch heads L D"]) -> {RETURNS}:\n    return query\n',
        "got 'batch'",
    ),
    "b_three": (
        HEAD + f'def attend(query: Float[Tensor, "B L D"]) -> {RETURNS}:\n    return query\n',
        "expected four",
    ),
    "b_unbound": (
        HEAD + f'def attend({QUERY}) -> Float[Tensor, "B H L E"]:\n    return query\n',
        "size of axis E",
    ),
    "b_kind": (
        HEAD + f'WEIGHTS = "odd"\ndef attend({QUERY}) -> {RETURNS}:\n    return query\n',
        "'odd'",
    ),
    "b_reference": (
        HEAD
        + f"def attend({QUERY}) -> {RETURNS}:\n    return query\n"
        + "def reference(query):\n    return query\n",
        "it has `reference`, which nothing calls: expected STEPS and `steps`",
    ),
    "b_slots": (
        HEAD
        + "from dataclasses import dataclass\n@dataclass(frozen=True, slots=True)\nclass Call:\n"
        + f"    {QUERY}\ndef attend(call: Call, outputs) -> {RETURNS}:\n    return call.query\n",
        "expected fields alone",
    ),
    "b_call": (
        HEAD
        + "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Call:\n"
        + f"    {QUERY}\ndef attend(call: Call, causal=False) -> {RETURNS}:\n"
        + "    return call.query\n",
        "attend takes Call and causal: expected Call and outputs",
    ),
    "b_state": (
        HEAD
        + "from typing import NamedTuple\nclass Kept(NamedTuple):\n    count: int\n"
        + f"def attend({QUERY}, state: Kept | None = None) -> {RETURNS}:\n    return query\n",
        "state.count is no array: got int",
    ),
    "b_names": (HEAD + 'def attend(query: "Flot") -> "Float":\n    return query\n', "'Flot'"),
}


UNIFORM: Final = '''\
"""Uniform attention: each output row is the mean of the values, times a gain.

Formula: A = gain / S, output = A V.
Paper: none; it is what attention is when all scores are equal.
Cost: O(S E) time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Final, NamedTuple

import torch
from jaxtyping import Float, Float32, Float64
from pydantic import Field
from torch import Tensor

from qkv.attention.common.score_steps import input_steps
from qkv.attention.step import Step

FORMULA: Final = "A = gain / S; output = A V"
PAPER: Final = "none"
COST: Final = "O(S E) time"
WEIGHTS: Final = "unnormalised"
REFUSES: Final[Mapping[str, str]] = {"causal": "every query sees every key"}


class Uniform(NamedTuple):
    """The outputs of uniform attention."""

    output: Float[Tensor, "B H L E"] | None = None
    weights: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None


def flops(sizes: Mapping[str, int]) -> int:
    """Counts one sum."""
    return 2 * sizes["B"] * sizes["G"] * sizes["S"] * sizes["E"]


def attend(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    value_BGSE: Float[Tensor, "B G S E"],
    *,
    gain: Annotated[float, Field(gt=0, le=100, description="Factor of the mean.")] = 1.0,
    outputs: frozenset[str] = frozenset({"output"}),
) -> Uniform:
    """Averages the values."""
    (B, H, L, _), (_, G, S, E) = query_BHLD.shape, value_BGSE.shape
    exact = torch.float64 if value_BGSE.dtype == torch.float64 else torch.float32
    mean_BGE = value_BGSE.to(exact).sum(2) * (gain / S)
    output_BHLE = mean_BGE.repeat_interleave(H // G, 1)[:, :, None].expand(B, H, L, E)
    weights_BHLS = torch.full((B, H, L, S), gain / S, dtype=exact, device=query_BHLD.device)
    return Uniform(
        output_BHLE.to(value_BGSE.dtype) if "output" in outputs else None,
        weights_BHLS if "weights" in outputs else None,
    )


def weights(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    *,
    gain: float = 1.0,
) -> Callable[[slice], Tensor]:
    """Returns the function from a slice of L to rows of A, (B, H, R, S)."""
    (B, H, _, _), S = query_BHLD.shape, key_BGSD.shape[2]
    exact = torch.float64 if query_BHLD.dtype == torch.float64 else torch.float32

    def rows_of(rows: slice) -> Float32[Tensor, "B H R S"] | Float64[Tensor, "B H R S"]:
        return torch.full((B, H, rows.stop - rows.start, S), gain / S, dtype=exact)

    return rows_of


STEPS = (
    *input_steps(None, None, None),
    Step("weights", "B H L S", None, "Gain over the number of keys.", rows="L"),
    Step("output", "B H L E", None, "The weights times the values.", rows="L"),
)


def steps(
    query_BHLD: Tensor, key_BGSD: Tensor, value_BGSE: Tensor, *, gain: float = 1.0
) -> dict[str, Tensor]:
    """Computes the textbook's line."""
    (B, H, L, _), (_, G, S, _) = query_BHLD.shape, key_BGSD.shape
    weights = torch.full((B, H, L, S), gain / S, dtype=torch.float64)
    output = weights @ value_BGSE.repeat_interleave(H // G, 1)
    inputs = {"query": query_BHLD, "key": key_BGSD, "value": value_BGSE}
    return {**inputs, "weights": weights, "output": output}
'''


def files() -> dict[str, str]:
    """Returns the text of each file by its name."""
    named = {"cosine.py": COSINE, "uniform.py": UNIFORM}
    return named | {f"{name}.py": text for name, (text, _) in BROKEN.items()}


@pytest.fixture(scope="session")
def copied_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the package with the files of this module."""
    return copy_package(tmp_path_factory.mktemp("copied"), files())


@pytest.fixture(scope="session")
def copied_service(copied_package: Path) -> Iterator[CopiedService]:
    """Returns a service of the copy."""
    with serving(copied_package) as service:
        yield service


@pytest.fixture(scope="session")
def law_results(copied_package: Path) -> dict[str, str]:
    """Returns the result of each law for the variants of the copy: PASSED, SKIPPED or FAILED."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v",
         "-m", "not slow or representative", "-k", "cosine or uniform or broken",
         "tests/attention/laws"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(copied_package.parent)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines() if "::test" in line]
    found = {words[0].partition("::")[2]: words[1] for words in lines if len(words) > 2}
    assert found, done.stdout + done.stderr
    return found
