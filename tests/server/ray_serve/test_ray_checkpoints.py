"""Tests of layers of a checkpoint behind Ray's proxy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx
import numpy as np

from qkv import Client
from support import small_checkpoints
from support.processes import wait_until
from support.ray_replicas import replica_actors, run_replicas

if TYPE_CHECKING:
    from support.ray_cluster import RayCluster

RESPONSES: Final = 20  # two replicas take turns


def test_every_replica_serves_the_layers_of_the_checkpoint(
    cluster: RayCluster, tmp_path: Path
) -> None:
    folder = small_checkpoints.bert(tmp_path / "bert")
    run_replicas(cluster, 2, checkpoints=f"small={folder}")
    wait_until(lambda: len(replica_actors()) == 2)
    assert httpx.get(f"{cluster.url}/readyz").is_success
    x = np.random.default_rng(0).normal(size=(5, small_checkpoints.WIDTH)).astype(np.float32)
    tensors = {
        name.removeprefix("encoder.layer.1.attention."): tensor
        for name, tensor in small_checkpoints.bert_tensors().items()
        if name.startswith("encoder.layer.1.")
    }
    sent = {"layout": "bert", "heads": small_checkpoints.HEADS}
    with Client(cluster.url, retries=8) as client:
        assert [layer["name"] for layer in client.layers()] == [
            "small.encoder.layer.0", "small.encoder.layer.1",
        ]  # fmt: skip
        expected = client.attend("softmax", x=x, layer={**sent, "tensors": tensors})
        for _ in range(RESPONSES):
            run = client.attend("softmax", x=x, layer="small.encoder.layer.1")
            assert np.array_equal(run.output, expected.output)
            assert np.array_equal(run.weights, expected.weights)
