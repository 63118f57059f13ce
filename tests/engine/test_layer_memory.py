"""Loaded layers on a device: copied once, shared by batches, within a budget."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from qkv.client.arrays import to_raw
from qkv.engine.batch_verifier import BatchVerifier
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.device.layer_memory import LayerMemory
from qkv.engine.engine import Engine
from qkv.engine.executor import execute, launch
from qkv.engine.remote.job_memory import layouts_of
from qkv.jobs.gradient_plan import GradientPlan
from qkv.jobs.job import Job
from qkv.jobs.loaded.checkpoint_loader import load_checkpoints
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.jobs.plan import Limits, Plan
from qkv.jobs.plan_description import describe
from qkv.wire.message import Message
from support import remote_service, small_checkpoints
from support.engines import bits, run_together, with_engine
from support.pretended_device import PretendedDevice, counting, live_tensors, log
from support.small_checkpoints import WIDTH

NAMES: Final = [f"small.encoder.layer.{i}" for i in range(3)]
LENGTH: Final = 6
WEIGHTS: Final = 8  # tensors of a layer


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> LoadedLayers:
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {
        "small": small_checkpoints.bert(folder / "bert", layers=3),
        "llama": small_checkpoints.llama(folder / "llama"),
    }
    return load_checkpoints(paths, 1 << 30, is_strict=True)


def job(
    layers: LoadedLayers, seed: int = 0, kind: type[Plan] = Plan, batch: int = 1, **layer: Any
) -> Job:
    """Returns a job with a named layer, as a request makes it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"x": torch.randn(batch, LENGTH, WIDTH, generator=generator)}
    if kind is GradientPlan:
        tensors["grad_output"] = torch.randn(batch, LENGTH, WIDTH, generator=generator)
    limits = Limits(1 << 30, 1 << 30, layers=layers)
    fields: dict[str, Any] = {"layer": {"name": NAMES[0], **layer}}
    message = Message(fields, {name: to_raw(tensor) for name, tensor in tensors.items()})
    return Job.new(kind, "softmax", message, limits)


def products() -> int:
    """Returns the number of matrix products on the device so far."""
    return sum(name in ("aten::bmm", "aten::baddbmm") for name in log)


@pytest.mark.parametrize("kind", [Plan, GradientPlan])
@pytest.mark.parametrize("name", [NAMES[1], "llama.model.layers.1"])
def test_requests_of_one_layer_share_a_call(
    layers: LoadedLayers, kind: type[Plan], name: str
) -> None:
    """Each request has a plan of its own, and the weights are copied for the first batch only."""
    device = PretendedDevice()
    jobs = [job(layers, seed, kind, batch=1 + seed % 2, name=name) for seed in range(12)]
    assert len({each.batch_key for each in jobs}) == 1
    with counting() as first:
        alone = [execute([each], device, stack=True)[0] for each in jobs]
    inputs, positions = (1 if kind is Plan else 2), int("llama" in name)
    weights = len(layers[name].weights)
    assert first["to device"] == weights + len(jobs) * (inputs + positions)
    before = products()
    execute(jobs[:1], device, stack=True)
    of_one, before = products() - before, products()
    with counting() as counted:
        together = execute(jobs, device, stack=True)
    assert counted["to device"] == inputs + positions  # no weight
    assert products() - before == of_one  # one projection for all
    assert [bits(result) for result in together] == [bits(result) for result in alone]
    assert {result.call_size for result in together} == {len(jobs)}


def test_requests_of_other_layers_or_fields_share_none(layers: LoadedLayers) -> None:
    changes: list[dict[str, Any]] = [{}, {"name": NAMES[1]}, {"heads": 2}, {"alibi": True}]
    jobs = [job(layers, **change) for change in changes]
    assert len({each.batch_key for each in jobs}) == len(jobs)


def test_engine_checks_the_bits_of_its_batches(layers: LoadedLayers) -> None:
    checks: list[bool] = []
    verifier = BatchVerifier("always", checks.append)

    async def test(engine: Engine) -> None:
        for _ in range(3):
            results = await run_together(engine, [job(layers, seed) for seed in range(8)])
            assert {result.batch_size for result in results} == {8}

    with_engine(test, device=PretendedDevice(), verifier=verifier)
    assert checks == [True] * 3


def test_cpu_copies_no_weights(layers: LoadedLayers) -> None:
    layer = layers[NAMES[0]]
    weights = CpuDevice().layer_memory.weights_of(layer)
    assert {n: t.data_ptr() for n, t in weights.items()} == {
        n: array.ctypes.data for n, array in layer.weights.items()
    }


def new_memory(layers: LoadedLayers, count: float) -> tuple[PretendedDevice, LayerMemory]:
    """Returns a device, and its memory with room for a number of layers."""
    device, size = PretendedDevice(), layers.checkpoints[0].bytes // 3
    device.layer_memory = LayerMemory(device.load, int(size * count))
    return device, device.layer_memory


def test_layer_that_was_not_used_for_longest_leaves(layers: LoadedLayers) -> None:
    _, memory = new_memory(layers, 2)
    first, second, third = (layers[name] for name in NAMES)
    for layer in (first, second, first, third):
        memory.weights_of(layer)
    assert [name in memory for name in NAMES] == [True, False, True]
    assert memory.held_bytes == 2 * layers.checkpoints[0].bytes // 3
    assert live_tensors() == 2 * WEIGHTS
    memory.clear()
    assert memory.held_bytes == live_tensors() == 0


def test_layer_larger_than_the_memory_is_copied_for_each_batch(layers: LoadedLayers) -> None:
    device, memory = new_memory(layers, 0.9)
    expected = execute([job(layers)], CpuDevice(), stack=True)
    for _ in range(2):
        with counting() as counted:
            found = execute([job(layers)], device, stack=True)
        assert counted["to device"] == WEIGHTS + 1
        assert found[0].outputs["output"].numpy() == pytest.approx(
            expected[0].outputs["output"].numpy(), abs=1e-5
        )
    assert memory.held_bytes == live_tensors() == 0


def test_layer_stays_while_a_batch_uses_it(layers: LoadedLayers) -> None:
    device, memory = new_memory(layers, 1)
    expected = execute([job(layers)], device, stack=True)
    begun = launch([job(layers)], device, True)
    memory.weights_of(layers[NAMES[1]])  # has the room of the first one
    assert NAMES[0] not in memory
    assert live_tensors() >= 2 * WEIGHTS
    assert [bits(result) for result in begun()] == [bits(result) for result in expected]
    del begun
    assert live_tensors() == WEIGHTS


def test_memory_that_runs_out_is_taken_from_the_layers(layers: LoadedLayers) -> None:
    from qkv.engine.device.accelerator import Accelerator

    device, memory = new_memory(layers, 3)
    memory.weights_of(layers[NAMES[0]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        Accelerator.release_memory(device)
    assert memory.held_bytes == live_tensors() == 0


def test_preloaded_layers_are_there_before_the_first_request(layers: LoadedLayers) -> None:
    device = PretendedDevice()

    async def test(engine: Engine) -> None:
        await engine.submit(job(layers))

    with_engine(test, device=device, preload=[layers[name] for name in layers.names])
    assert all(name in device.layer_memory for name in layers.names)


def test_preloading_ends_where_the_memory_is_full(
    layers: LoadedLayers, caplog: pytest.LogCaptureFixture
) -> None:
    """No layer makes room for another one before a request needs it."""
    _, memory = new_memory(layers, 2.5)
    with caplog.at_level(logging.WARNING):
        memory.preload(layers[name] for name in NAMES)
    assert [name in memory for name in NAMES] == [True, True, False]
    (line,) = caplog.messages
    assert line.startswith("the device gets 2 layers before the first request: ")


def test_device_process_has_the_weights(layers: LoadedLayers) -> None:
    """A worker sends the name and x only; fields that a request changes travel too."""
    changes: list[dict[str, Any]] = [{}, {"heads": 2}, {"name": "llama.model.layers.1"}]
    for kind in (Plan, GradientPlan):
        for change in changes:
            sent = job(layers, kind=kind, **change)
            assert layouts_of(sent.plan).input_bytes == sum(t.nbytes for t in sent.tensors.values())

            async def test(fixture: remote_service.Service, sent: Job = sent) -> None:
                there = await fixture.remotes[0].submit(sent)
                assert bits(there) == bits(await fixture.engine.submit(sent))

            remote_service.run(test, layers=layers)


def test_plans_of_one_layer_do_not_count_its_weights(layers: LoadedLayers) -> None:
    plan = job(layers).plan
    assert plan.bytes_in == LENGTH * WIDTH * 4
    assert len(describe(plan).content) < 4096


def test_batch_of_a_folder_that_is_gone(tmp_path: Path) -> None:
    """The files are not touched again once they are loaded."""
    folder = small_checkpoints.bert(tmp_path / "bert")
    loaded = load_checkpoints({"small": folder}, 1 << 30)
    (folder / "model.safetensors").write_bytes(b"")
    (result,) = execute([job(loaded)], CpuDevice(), stack=False)
    assert result.outputs["output"].shape == (1, LENGTH, WIDTH)
