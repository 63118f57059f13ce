"""Memory of every variant is linear in the length: no path holds a matrix of scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pytest

from support.peak_memory import Peak, needs_proc, peaks


class Case(NamedTuple):
    """A call whose peak is measured.

    Attributes:
        variant: its name.
        parameters: an expression of other arguments, of torch and S.
        sizes: those that are not `SIZES`.
        dtype: of all tensors.
        outputs: empty for the gradients.
        slope: rise of the keys along the sequence.
        mib: the peak is below it.
    """

    variant: str
    parameters: str = "{}"
    sizes: Mapping[str, int] = {}
    dtype: str = "float32"
    outputs: tuple[str, ...] = ("output",)
    slope: int = 0
    mib: int = 240

    def __str__(self) -> str:
        what = "+".join(self.outputs) or "gradients"
        rest = [str(x) for x in (self.sizes, self.slope) if x]
        return " ".join([self.variant, what, self.dtype, self.parameters, *rest])


SIZES: Final = {"B": 1, "H": 2, "G": 2, "J": 2, "V": 2, "T": 2, "Z": 1, "L": 16384, "S": 16384,
                "D": 64, "E": 64}  # fmt: skip
# Paths that take longer, at fewer tokens: a head's matrix of scores has 256, 64, 36 and 384 MiB.
HALF: Final = {"L": 8192, "S": 8192}
QUARTER: Final = {"L": 4096, "S": 4096}
SHORT: Final = {"L": 3072, "S": 3072}
WIDE: Final = {"L": 6144, "S": 16384}  # the blocks of these paths have up to 192 MiB
ONE: Final = {"H": 1, "G": 1}
EVERYTHING: Final = (
    "dict(causal=True, query_offset='end', scale=0.2, softcap=20.0, window=(100, 0), dropout=0.1, "
    "seed=3, key_lengths_B=torch.tensor([S - 7]), mask_BHLS=torch.zeros(1, 1, 1, S))"
)
CAUSAL: Final = "dict(causal=True)"
RULE: Final = "dict(rule='gated_delta')"


def softmax(parameters: str, dtype: str = "float32", **sizes: int) -> Case:
    """Returns a case of softmax, with less than half of a matrix of scores."""
    return Case("softmax", parameters, HALF | ONE | sizes, dtype, mib=128)


CASES: Final = (
    *(Case(name, p) for name in ("linear", "efficient", "taylor") for p in ("{}", CAUSAL)),
    *(Case(name, CAUSAL, HALF, outputs=(), mib=128) for name in ("linear", "efficient", "taylor")),
    *(Case("mean", p, outputs=outputs) for p in ("{}", "dict(causal=False)")
      for outputs in (("output",), ())),
    *(Case("sigmoid", CAUSAL, HALF | ONE, outputs=outputs, mib=128)
      for outputs in (("output",), ())),
    # careful paths, which take the differences of far numbers
    Case("efficient", CAUSAL, SHORT | ONE, slope=1000, mib=30),
    Case("efficient", CAUSAL, HALF | ONE, outputs=(), slope=1000),
    Case("linformer"),
    Case("linformer", outputs=("output", "map")),
    *(Case("gated", RULE, QUARTER | {"Z": Z}, outputs=outputs, mib=32)
      for Z in (1, 64) for outputs in (("output",), ("output", "state"))),
    *(Case("softmax", p, {"L": 512, "S": 32768}, outputs=(), mib=120)
      for p in ("{}", "dict(causal=True, query_offset='end')")),
    softmax(EVERYTHING),
    *(softmax(p) for p in (
        "{}", CAUSAL, "dict(key_lengths_B=torch.tensor([S - 9]))",
        "dict(causal=True, query_offset=-5)", "dict(sinks_H=torch.zeros(1), causal=True)",
        "dict(alibi_slopes_H=torch.ones(1))",
    )),
    *(softmax(p, "bfloat16", H=2, D=16, E=16) for p in (
        "{}", "dict(causal=True, window=(2000, None), query_offset='end')",
    )),
    *(softmax(p, H=2, D=16, E=24) for p in ("{}", "dict(mask_BHLS=torch.zeros(1, 2, 1, S))")),
    *(Case("softmax", p, WIDE | ONE | {"D": 8, "E": 8}, mib=360) for p in (
        "dict(softcap=9.0)", "dict(dropout=0.5, causal=True)",
        "dict(softcap=9.0, sinks_H=torch.zeros(1), alibi_slopes_H=torch.ones(1))",
    )),
)  # fmt: skip
"""At 65,536 tokens of 8 heads these take 16 times as much: 240 MiB are 4 GiB with torch itself."""

MEASURE: Final = """
from qkv.attention import catalogue

for name, parameters, sizes, dtype, outputs, slope in CASES:
    variant, S = catalogue.find(name), sizes["S"]
    others = eval(parameters)
    tensors = {}
    for spec in variant.inputs.values():
        if spec.name in ("log_decay", "beta") and "rule" in others:
            numbers = torch.rand([sizes[x] for x in spec.letters])
            tensors[spec.argument] = -numbers if spec.name == "log_decay" else numbers
        elif not spec.is_optional:
            numbers = torch.randn([sizes[x] for x in spec.letters])
            numbers /= 9 if spec.name == "key" and "rule" in others else 1
            if slope and spec.name == "key":
                numbers += slope * torch.arange(S)[:, None]
            tensors[spec.argument] = numbers.to(getattr(torch, dtype))
    grad = torch.randn([sizes[x] for x in "BHLE"]) if not outputs else None
    start()
    with torch.inference_mode():
        if outputs:
            result = variant.attend(**tensors, **others, outputs=frozenset(outputs))
            found = [getattr(result, n) for n in outputs if n != "state"]
        else:
            result = variant.backward(grad, **tensors, **others)
            found = [*result.values()]
    say()
    assert all(x.isfinite().all() for x in found)
    del tensors, grad, result, found
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, Peak]:
    """Returns the peaks of all cases, of one process: to start one takes longer than a case."""
    rows: list[Any] = [(*case[:2], {**SIZES, **case.sizes}, *case[3:6]) for case in CASES]
    return dict(zip(map(str, CASES), peaks(f"CASES = {rows!r}{MEASURE}"), strict=True))


@needs_proc
@pytest.mark.slow
@pytest.mark.rare("service/qkv/attention", "tests/support/peak_memory.py")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_path_holds_a_matrix_of_scores(case: Case, measured: dict[str, Peak]) -> None:
    """At N = 16,384 one (L, S) float32 matrix is 1 GiB, of which the peak is a quarter."""
    assert measured[str(case)].above < case.mib << 20
