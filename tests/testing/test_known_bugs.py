"""The oracle names bugs in pairs, in any block and dtype, and accuses no function without reason.

The bugs of one kernel, each alone, are in `test_planted_bugs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.testing import verify
from support.flash_kernel import Attention, flash_kernel
from support.shared_truths import shared_truths as shared_truths

FAST: dict[str, Any] = {"dtype": "float32", "gradients": False}
PAIRS: list[tuple[tuple[str, str], str, dict[str, Any]]] = [
    (("scale-missing", "causal-top-left"), "scale-missing+causal-top-left",
     {"causal": True, "query_offset": "end"}),
    (("scale-missing", "gqa-tiled"), "scale-missing+gqa-tiled", {}),
    (("mask-inverted", "gqa-tiled"), "mask-inverted+gqa-tiled", {}),
    (("causal-missing", "mask-ignored"), "causal-missing+mask-ignored", {"causal": True}),
    (("padding-attended", "softcap-missing"), "padding-attended+softcap-missing",
     {"softcap": 5.0}),
    (("scale-1/D", "normalizer-missing"), "scale-wrong+normalizer-missing", {}),
]  # fmt: skip


@pytest.mark.parametrize(("planted", "name", "options"), PAIRS)
def test_pair_of_planted_bugs_is_named_first(
    planted: tuple[str, str], name: str, options: dict[str, Any]
) -> None:
    report = verify(flash_kernel(*planted), "softmax", **FAST, **options)
    assert report.diagnosis
    assert report.diagnosis[0] == name, report


@pytest.mark.parametrize(
    ("planted", "block"),
    [
        (["output-not-rescaled"], 1), (["sum-not-rescaled"], 32), (["output-not-rescaled"], 64),
        (["output-not-rescaled", "sum-not-rescaled"], 128),
    ],
)  # fmt: skip
def test_missing_rescaling_is_named_for_each_size_of_block(planted: list[str], block: int) -> None:
    report = verify(flash_kernel(*planted, block=block), "softmax", **FAST)
    assert not report.passed
    assert report.diagnosis[:1] == ["online-not-rescaled"], report


@pytest.mark.parametrize(
    ("epsilon", "dtype"),
    [(1e-3, "float32"), (1e-5, "float32"), (1e-6, "float64"), (1e-9, "float64")],
)
def test_epsilon_in_the_denominator_is_named(epsilon: float, dtype: str) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        K = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(K, 1).mT * query.shape[-1] ** -0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        total = weights.sum(-1, keepdim=True) + epsilon
        output: Tensor = (weights / total) @ value.repeat_interleave(K, 1)
        return output

    report = verify(attend, "softmax", dtype=dtype, gradients=False)
    assert not report.passed
    assert report.diagnosis[:1] == ["epsilon-in-denominator"], report


@pytest.mark.parametrize("is_blind_nan", [True, False])
def test_nan_of_blind_rows_is_named_beside_nan_of_hidden_values(is_blind_nan: bool) -> None:
    """A kernel that multiplies hidden values by 0 also fails where they are NaN."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None) -> Tensor:
        K = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(K, 1).mT * query.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1)
        if not is_blind_nan:
            weights = weights.nan_to_num(0.0)
        output: Tensor = weights @ value.repeat_interleave(K, 1)
        return output

    report = verify(attend, "softmax", strict=True, **FAST)
    failed = {case.family for case in report.failures}
    assert failed == {"nan behind mask"} | ({"blind mask"} if is_blind_nan else set())
    name = "nan-from-masked-row" if is_blind_nan else "nan-from-hidden-value"
    assert report.diagnosis[:1] == [name], report


def linear_kernel(phi: Callable[[Tensor], Tensor], is_normalized: bool) -> Attention:
    """Returns linear attention with a feature map, without its normaliser on request."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_lengths: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        K, S = query.shape[1] // key.shape[1], key.shape[2]
        weights = phi(query) @ phi(key).repeat_interleave(K, 1).mT
        if causal:
            weights = weights.tril()
        if key_lengths is not None:
            weights = weights * (torch.arange(S) < key_lengths.view(-1, 1, 1, 1))
        total = weights.sum(-1, keepdim=True)
        if is_normalized:
            weights = weights / torch.where(total == 0, 1.0, total)
        output: Tensor = weights @ value.repeat_interleave(K, 1)
        return output

    return attend


def elu_plus_1(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "exp": torch.exp,
    "softplus": torch.nn.functional.softplus,
    "sigmoid": torch.sigmoid,
    "relu squared": lambda x: x.relu().square(),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "causal"), [*((n, False) for n in MAPS), ("relu", True)])
def test_another_feature_map_of_linear_is_named(name: str, causal: bool) -> None:
    skip = ["large", "steep", "one-hot", "tiny"]  # products overflow or underflow float32
    report = verify(linear_kernel(MAPS[name], True), "linear", skip=skip, causal=causal, **FAST)
    assert not report.passed
    assert report.diagnosis[:1] == ["feature-map-wrong"], report


@pytest.mark.parametrize("causal", [False, True])
def test_missing_normalizer_of_linear_is_named(causal: bool) -> None:
    right = verify(linear_kernel(elu_plus_1, True), "linear", causal=causal, **FAST)
    assert right.passed, right
    report = verify(linear_kernel(elu_plus_1, False), "linear", causal=causal, **FAST)
    assert not report.passed
    assert report.diagnosis[:1] == ["normalizer-missing"], report


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("block", [1, 16, 64])
def test_sums_in_the_narrow_dtype_of_the_inputs_are_named(dtype: str, block: int) -> None:
    function = flash_kernel(sums=getattr(torch, dtype), block=block)
    report = verify(function, "softmax", dtype=dtype, gradients=block == 16)
    assert not report.passed
    assert list(report.diagnosis) == ["low-precision-accumulation"], report


@pytest.mark.parametrize("sums", [torch.bfloat16, torch.float16])
def test_narrow_sums_of_float32_inputs_are_named(sums: torch.dtype) -> None:
    report = verify(flash_kernel(sums=sums), "softmax", dtype="float32", gradients=False)
    assert not report.passed
    assert list(report.diagnosis) == ["low-precision-accumulation"], report


def test_gradients_are_not_explained_by_bugs_that_change_nothing() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, *, softcap: float) -> Tensor:
        scores = query @ key.mT * query.shape[-1] ** -0.5  # rounded after each step
        scores = softcap * (scores / softcap).tanh()
        output: Tensor = scores.float().softmax(-1).to(query.dtype) @ value
        return output

    report = verify(attend, "softmax", dtype="float16", families=["large"], seed=3, softcap=5.0)
    assert {check.result for check in report.failures} >= {"grad query"}
    assert not report.diagnosis, report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_summed_in_a_narrow_dtype_are_named(dtype: torch.dtype) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(*query.shape[:3], key.shape[2], dtype=dtype)
        for d in range(query.shape[-1]):
            scores += query[..., d, None] * key[..., None, :, d]
        weights = (scores.float() * query.shape[-1] ** -0.5).softmax(-1)
        output: Tensor = (weights @ value.float()).to(dtype)
        return output

    skip = ["grouped heads", "large"]  # products of large numbers overflow float16
    report = verify(attend, "softmax", dtype=dtype, skip=skip, gradients=False)
    assert list(report.diagnosis) == ["low-precision-accumulation"], report


def unknown_bug(change: Callable[..., Tensor]) -> Attention:
    """Returns the right kernel with a mistake that is not a known bug."""
    right = flash_kernel()
    return lambda q, k, v, **keywords: change(right, q, k, v, keywords)


UNKNOWN: dict[str, Callable[..., Tensor]] = {
    "output times 1.01": lambda f, q, k, v, w: f(q, k, v, **w) * 1.01,
    "output plus 0.01": lambda f, q, k, v, w: f(q, k, v, **w) + 0.01,
    "first head times 1.1": lambda f, q, k, v, w: torch.cat(
        [f(q, k, v, **w)[:, :1] * 1.1, f(q, k, v, **w)[:, 1:]], 1
    ),
    "queries times 1.05": lambda f, q, k, v, w: f(q * 1.05, k, v, **w),
    "zeros": lambda f, q, k, v, w: torch.zeros_like(q),
    "nan": lambda f, q, k, v, w: torch.full_like(q, torch.nan),
    "rows reversed": lambda f, q, k, v, w: f(q, k, v, **w).flip(2),
    "values squared": lambda f, q, k, v, w: f(q, k, v * v, **w),
    "positive scores only": lambda f, q, k, v, w: f(q.relu(), k, v, **w),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_bug_fails_without_an_accusation(name: str, dtype: str) -> None:
    function = unknown_bug(UNKNOWN[name])
    report = verify(function, "softmax", dtype=dtype, gradients=False)
    assert not report.passed
    assert not report.diagnosis, report


WRONG_ABOVE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "half": lambda output: output / 2,
    "noise": lambda output: output + 1e-2 * torch.randn(output.shape),
    "relative noise": lambda output: output * (1 + 1e-2 * torch.randn(output.shape)),
    "another factor": lambda output: output * 0.99,
}


@pytest.mark.parametrize(
    ("dtype", "keys"),
    [("float32", 200), ("bfloat16", 10), ("float16", 200)],
)
@pytest.mark.parametrize("change", WRONG_ABOVE)
def test_function_that_is_wrong_above_some_keys_is_not_accused(
    change: str, dtype: str, keys: int
) -> None:
    """Its errors are within the bound of narrow sums, but right results of few keys show none."""
    torch.manual_seed(0)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = plain_softmax(query, key, value)
        return (WRONG_ABOVE[change](output) if key.shape[2] > keys else output).to(query.dtype)

    report = verify(attend, "softmax", dtype=dtype, gradients=False)
    assert not report.passed
    assert not report.diagnosis, report


ROUNDED: dict[str, Callable[..., Tensor]] = {
    "output": lambda query, key, value: plain_softmax(query, key, value).bfloat16().float(),
    "inputs": lambda *inputs: plain_softmax(*(x.bfloat16() for x in inputs)),
    "both": lambda *inputs: plain_softmax(*(x.bfloat16() for x in inputs)).bfloat16().float(),
}


@pytest.mark.parametrize("tensors", ROUNDED)
def test_rounded_inputs_and_outputs_are_not_named_narrow_sums(tensors: str) -> None:
    function = ROUNDED[tensors]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return function(query, key, value)

    report = verify(attend, "softmax", dtype="float32", gradients=False)
    assert not report.passed
    assert not report.diagnosis, report


def plain_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns the right output in float32."""
    K = query.shape[1] // key.shape[1]
    q, k, v = query.float(), *(x.float().repeat_interleave(K, 1) for x in (key, value))
    output: Tensor = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    return output


@pytest.mark.parametrize("block", [1, 16, 64])
def test_sums_in_the_dtype_of_any_inputs_are_named(block: int) -> None:
    """The function is right for wide inputs, where nothing has to be explained."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_kernel(sums=query.dtype, block=block)(query, key, value)

    report = verify(attend, "softmax", gradients=False)
    assert {check.dtype for check in report.failures} == {"bfloat16", "float16"}
    assert list(report.diagnosis) == ["low-precision-accumulation"], report


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_bug_is_named_in_every_dtype(dtype: str) -> None:
    for planted in ("scale-missing", "gqa-tiled", "mask-inverted"):
        report = verify(flash_kernel(planted), "softmax", dtype=dtype, gradients=False)
        assert report.diagnosis[0] == planted, report
