"""CPU threads of a job: a lone job takes idle ones only if its bits do not depend on them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from qkv.attention.catalogue import variants
from qkv.engine.executor import execute
from support.engines import CPU, new_job
from support.raw_connection import NAMES, random_inputs


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_idle_threads_do_not_change_bits() -> None:
    taken = 0
    for seed, (H, L, S, D) in enumerate([
        (8, 1024, 1024, 64), (2, 2000, 1333, 65), (1, 3000, 3000, 33), (8, 64, 9000, 64),
        (1, 1, 400_000, 64), (8, 512, 2048, 128),
    ]):  # fmt: skip
        random = np.random.default_rng(seed)
        arrays = {
            n: random.standard_normal((1, H, size, D), dtype=np.float32)
            for n, size in zip(NAMES, (L, S, S), strict=True)
        }
        for fields in ({}, {"parameters": {"causal": True}}, {"outputs": ["output", "scores"]}):
            if "outputs" in fields and L * S * H > 1 << 24:
                continue
            job = new_job(arrays, **fields)
            (alone,) = execute([job], CPU, False, 1, 1)
            (spread,) = execute([job], CPU, False, 1, 4)
            taken += torch.get_num_threads() == 4
            assert {n: bytes(t.data) for n, t in alone.outputs.items()} == {
                n: bytes(t.data) for n, t in spread.outputs.items()
            }
    assert taken >= 5  # the idle threads were used


def test_numbers_that_need_another_code_path_take_no_idle_threads() -> None:
    arrays = random_inputs(0, (1, 4, 1024, 64))
    arrays["query"][0, 0, 0, 0] = 3e38
    job = new_job(arrays)
    (alone,) = execute([job], CPU, False, 1, 1)
    (spread,) = execute([job], CPU, False, 1, 4)
    assert torch.get_num_threads() == 1
    assert alone.backend == spread.backend == "explicit"
    assert bytes(alone.outputs["output"].data) == bytes(spread.outputs["output"].data)


def test_only_jobs_of_the_sdpa_kernel_take_idle_threads() -> None:
    arrays = random_inputs(0, (1, 8, 1024, 64))
    assert new_job(arrays).plan.uses_sdpa
    assert not new_job(arrays, parameters={"dropout": 0.5}).plan.uses_sdpa
    assert not new_job(arrays, parameters={"softcap": 5.0}).plan.uses_sdpa
    assert not new_job(arrays, outputs=["output", "weights"]).plan.uses_sdpa
    assert not new_job(random_inputs(0, (1, 8, 32, 64))).plan.uses_sdpa
    others = [v.name for v in variants().values() if v.name not in ("softmax", "mean")]
    assert not any(new_job(arrays, n).plan.uses_sdpa for n in others if n != "linear_layer")


@pytest.mark.slow
def test_idle_threads_do_not_change_bits_with_slopes_and_sinks() -> None:
    taken = 0
    for H, L, S in ((8, 700, 700), (1, 2000, 2000), (2, 64, 9000)):
        random = np.random.default_rng(L)
        arrays = {
            n: random.normal(size=(1, H, size, 64)).astype(np.float32)
            for n, size in zip(NAMES, (L, S, S), strict=True)
        }
        for names in (("sinks",), ("alibi_slopes",), ("sinks", "alibi_slopes")):
            terms = {n: random.normal(size=H).astype(np.float32) for n in names}
            job = new_job(arrays | terms)
            (alone,) = execute([job], CPU, False, 1, 1)
            (spread,) = execute([job], CPU, False, 1, 4)
            taken += torch.get_num_threads() == 4
            assert alone.backend == spread.backend == "sdpa"
            assert bytes(alone.outputs["output"].data) == bytes(spread.outputs["output"].data)
    assert taken >= 3  # the idle threads were used


def test_biases_of_each_head_that_cut_the_rows_take_no_idle_threads() -> None:
    """A block of few rows would have other bits on another number of threads."""
    terms = {"sinks": np.zeros(8, np.float32), "alibi_slopes": np.ones(8, np.float32)}
    for name, term in terms.items():
        assert new_job(random_inputs(0, (1, 8, 512, 64)) | {name: term}).plan.uses_sdpa
        assert not new_job(random_inputs(0, (1, 8, 1024, 64)) | {name: term}).plan.uses_sdpa
