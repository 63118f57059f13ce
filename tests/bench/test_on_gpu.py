"""Tests of bench/on_gpu.py: it measures the pretended device, and its tables are complete."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import gpu_batches
import gpu_engine
import on_gpu
import pytest
import torch
from gpu_batches import BitsResult, OverlapResult, WaitsResult
from gpu_engine import MemoryResult, RateResult
from gpu_jobs import KINDS, build_jobs, kinds_of
from gpu_tables import GpuResults, SuiteResult, build_tables
from tables import END, Results, write_page

from qkv.attention.catalogue import variants
from qkv.engine.engine import Engine
from qkv.engine.executor import Launched, launch
from qkv.jobs.result import Result
from qkv.tensors import FLOATING, RawTensor
from support import hidden_waits
from support.pretended_device import PretendedDevice, faults

TINY: Final = (1, 2, 5, 4)


@pytest.mark.parametrize("name", variants())
def test_jobs_of_every_kind_have_equal_batch_keys_and_other_numbers(name: str) -> None:
    for kind in kinds_of(variants()[name]):
        for dtype in FLOATING:
            first, second = build_jobs(name, 2, TINY, dtype, kind)
            assert first.plan.inputs.dtype == dtype
            assert first.plan.batch_key == second.plan.batch_key
            has_own_batch = name == "linear_layer" and kind.name == "gradients"
            assert (first.batch_key == second.batch_key) is not has_own_batch
            tensors = [{n: bytes(t.data) for n, t in j.tensors.items()} for j in (first, second)]
            assert tensors[0] != tensors[1]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all sizes small."""
    for module in (gpu_batches, gpu_engine):
        monkeypatch.setattr(module, "SHAPES", dict.fromkeys("SML", TINY))
    monkeypatch.setattr(gpu_engine, "IN_FLIGHT", 6)
    monkeypatch.setattr(gpu_engine, "WARM_UP_S", 0.01)
    monkeypatch.setattr(gpu_engine, "GPU_MAX_BATCH", 4)
    monkeypatch.setattr(gpu_engine, "CALLS", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_bits_of_every_variant_kind_and_dtype_are_compared() -> None:
    sizes = {"S": (2, 3), "L": (2,)}
    results = list(gpu_batches.measure_bits(PretendedDevice(), sizes))
    kinds = [(v.name, kind) for v in variants().values() for kind in kinds_of(v)]
    assert [r[:3] for r in results] == [(n, k.name, d) for n, k in kinds for d in FLOATING]
    for result in results:
        assert not result.error
        own = result.variant == "linear_layer" and result.kind == "gradients"
        second = 4 if result.kind == KINDS[0].name else 2
        assert result.total == ({2: 0, 3: 0} if own else {2: second, 3: 3})
        assert all(0 <= result.same[size] <= count for size, count in result.total.items())


@pytest.mark.usefixtures("tiny")
def test_other_bits_and_errors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(jobs: Any, device: Any, stack: bool) -> list[Result]:
        outputs = launch(jobs, device, stack)()
        return [outputs[0], *outputs[:-1]] if len(jobs) > 2 else outputs

    monkeypatch.setattr(gpu_batches, "execute", run)
    monkeypatch.setattr(gpu_batches, "variants", lambda: {"softmax": variants()["softmax"]})
    device = PretendedDevice()
    softmax, *_ = gpu_batches.measure_bits(device, {"S": (2, 3)}, ["float32"])
    assert (softmax.same, softmax.total) == ({2: 2, 3: 1}, {2: 2, 3: 3})
    faults.allocations = 0
    softmax, *_ = gpu_batches.measure_bits(device, {"S": (2, 3)}, ["float32"])
    assert softmax.error == "OutOfMemoryError: out of memory. Tried to allocate 2.00 MiB."
    PretendedDevice()  # without faults


@pytest.mark.usefixtures("tiny")
def test_rates_are_those_of_a_busy_engine_and_of_bare_torch() -> None:
    result = gpu_engine.measure_rates(PretendedDevice(), "S", "float16", 0.02, tries=2)
    assert result[:2] == ("S", "float16")
    assert 1 < result.batch_size <= 4
    for rates in (result.engine, result.bare, result.bare_stacked):
        assert len(rates) == 2
        assert min(rates) > 0


def negated(output: Result) -> Result:
    """Returns an output with other signs."""
    tensors = {n: RawTensor.from_numpy(-raw.numpy()) for n, raw in output.outputs.items()}
    return replace(output, outputs=tensors)


@pytest.mark.usefixtures("tiny")
def test_wrong_output_of_the_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(jobs: Any, *how: Any) -> Launched:
        launched = launch(jobs, *how)
        return lambda: [negated(output) for output in launched()]

    monkeypatch.setattr(gpu_engine, "Engine", partial(Engine, launch=wrong))
    with pytest.raises(AssertionError, match="outputs of S, float32 are wrong"):
        gpu_engine.measure_rates(PretendedDevice(), "S", "float32", 0.01, tries=1)


@pytest.mark.usefixtures("tiny")
def test_overlapped_batches_have_the_bits_of_the_others() -> None:
    result = gpu_batches.measure_overlap(PretendedDevice(), "S", 3, batches=4, tries=2)
    assert result[:2] == ("S", 3)
    assert result.has_same_bits
    for times_ms in (result.sequential, result.overlapped, result.compute):
        assert len(times_ms) == 2
        assert min(times_ms) > 0


@pytest.mark.usefixtures("tiny")
def test_waits_of_every_kind_of_run_are_counted() -> None:
    results = list(gpu_batches.measure_waits(PretendedDevice()))
    assert len(results) == sum(len(kinds_of(v)) for v in variants().values())
    for result in results:
        own = result.variant == "linear_layer" and result.kind == "gradients"
        assert result[2:] == (1, None, 1 if own else 8)


def test_hidden_waits_are_the_warnings_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def work() -> str:
        assert modes == ["warn"]
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return "result"

    assert hidden_waits.count_hidden_waits(torch.device("cuda"), work) == ("result", 3)
    assert modes == ["warn", 0]
    assert hidden_waits.count_hidden_waits(torch.device("cpu"), lambda: "x") == ("x", None)


@pytest.mark.usefixtures("tiny")
def test_engine_goes_on_after_a_request_without_memory() -> None:
    def exhaust() -> None:
        faults.allocations = 0

    result = gpu_engine.measure_out_of_memory(PretendedDevice(), 3, exhaust)
    assert result == MemoryResult(4 << 30, 1 << 30, "PayloadTooLarge", 3, 3)


REPORT: Final = """<testsuites><testsuite name="pytest">
<testcase classname="tests.a" name="test_b"/>
<testcase classname="tests.a" name="test_c"><failure>why</failure></testcase>
<testcase classname="tests.a" name="test_d"><skipped/></testcase>
</testsuite></testsuites>"""


def test_counts_of_the_tests_are_read() -> None:
    assert on_gpu.read_report(REPORT) == SuiteResult(1, 1, 1, ["tests.a.test_c"])


@pytest.mark.slow
def test_tests_run_in_a_process() -> None:
    """Without an accelerator all are skipped, with one none fails."""
    result = on_gpu.run_tests("tests/engine/test_device.py", "-p", "no:cacheprovider")
    assert (result.passed + result.skipped, result.failed) == (1, 0)


RESULTS: Final = GpuResults(
    SuiteResult(7, 1, 2, ["tests.a.test_c"]),
    [
        BitsResult("softmax", "output", "float32", {2: 4, 3: 6}, {2: 4, 3: 6}),
        BitsResult("softmax", "output", "float16", {2: 4, 3: 5}, {2: 4, 3: 6}),
        BitsResult("linear_layer", "gradients", "float32", {2: 0}, {2: 0}),
        BitsResult("linear_layer", "gradients", "float16", {2: 0}, {2: 0}, "TypeError: none"),
    ],
    [RateResult("S", "float32", [1000, 1500, 1200], 63.5, [3000, 3000, 2400], [6000] * 3)],
    [OverlapResult("M", 64, [2.0, 4.0], [1.0, 2.0], [0.5, 0.5], True)],
    [WaitsResult("softmax", "output", 1, None, 8), WaitsResult("mean", "weights", 2, 0, 3)],
    MemoryResult(4 << 30, 1 << 30, "PayloadTooLarge", 8, 7),
)
LINES: Final = (
    "`pytest -m gpu`: 7 passed, 1 failed, 2 skipped.",
    "- `tests.a.test_c`",
    "| `softmax` | output | 10 / 10 | 9 / 10 (3) |",
    "| `linear_layer` | gradients | never in a batch | error |",
    "- float16: TypeError: none",
    "| S | float32 | 1,200 (1,000–1,500) | 63.5 | 3,000 (2,400–3,000) "
    "| 0.500 (0.333–0.500) | 6,000 (6,000–6,000) | 0.200 (0.167–0.250) |",
    "| M | 64 | 3.00 (2.00–4.00) | 1.50 (1.00–2.00) | 0.500 (0.500–0.500) "
    "| 0.500 (0.500–0.500) | yes |",
    "| `softmax` | output | 8 | 1 | not counted |",
    "| `mean` | weights | 3 | 2 | 0 |",
    "A request for 4.0 GiB of weights, on a device of 1.0 GiB: `PayloadTooLarge`. "
    "Requests behind it with a right output: 7 of 8.",
)


def test_tables_have_all_results(tmp_path: Path) -> None:
    """Each has its place in the page."""
    page = tmp_path / "gpu.md"
    page.write_text(on_gpu.PAGE.read_text())
    results = Results("make gpu", {"device": "pretended"}, build_tables(RESULTS))
    write_page(page, results)
    written = page.read_text()
    assert all(f"{line}\n" in written for line in LINES)
    for title, text in results.texts.items():
        assert f"{results.mark(title)}{text}\n{END}" in written
    first, *_ = build_tables(RESULTS._replace(tests=None))
    assert first.markdown == "The tests did not run."


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_all_parts_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short plan, on a device whose memory runs out for the largest request."""
    original = gpu_engine.measure_out_of_memory

    def exhaust() -> None:
        faults.allocations = 0

    monkeypatch.setattr(on_gpu, "measure_out_of_memory", lambda d: original(d, 2, exhaust))
    device = PretendedDevice()
    tables = build_tables(on_gpu.measure(device, on_gpu.QUICK))
    text = "\n".join(table.markdown for table in tables)
    assert on_gpu.describe(device, on_gpu.QUICK)["device"].startswith("pretended:0")
    assert "`PayloadTooLarge`" in text
    assert "error" not in text


def test_command_without_an_accelerator_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(SystemExit) as ended:
        on_gpu.main(["--quick"])
    assert ended.value.code == 2
    assert tuple(capsys.readouterr()) == ("", f"{on_gpu.NO_ACCELERATOR}\n")
