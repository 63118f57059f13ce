"""Tests of qkv on Ray with HAProxy: every kind of request, and replicas that die and stop."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection

import httpx
import numpy as np
import pytest
from tritonclient import http as triton

import qkv
from qkv import Client, errors
from qkv.server.ray_serve import app
from support.clients import numbers
from support.haproxy_cluster import running_haproxy
from support.processes import TIMEOUT_S, wait_until
from support.raw_connection import PATH
from support.ray_cluster import RayCluster
from support.ray_load import Load
from support.ray_replicas import (
    configuration,
    deploy,
    kill,
    rare_of_ray,
    replica_actors,
    replica_states,
)
from support.triton_client import infer_inputs, raises_inference_error, random_inputs

RESPONSES = 15  # to two clients between changes: some requests are in each replica then


@pytest.fixture(scope="module")
def haproxy(_clean_environment: None) -> Iterator[RayCluster]:
    """Returns a Ray with HAProxy and two replicas of qkv."""
    with running_haproxy() as running:
        deploy(configuration(2, scaling={}))
        wait_until(lambda: httpx.get(f"{running.url}/readyz").is_success)
        assert len(replica_actors()) == 2
        yield running


def test_application_has_no_router_of_its_own_with_haproxy(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray has no public way to read either
    def has_own_router() -> bool:
        config = app({})._bound_deployment._deployment_config.request_router_config
        return not config.is_default_request_router()

    assert has_own_router()
    monkeypatch.setattr("ray.serve._private.constants.RAY_SERVE_ENABLE_HA_PROXY", True)
    assert not has_own_router()


@rare_of_ray
@pytest.mark.slow
def test_clients_are_answered_through_haproxy(haproxy: RayCluster) -> None:
    inputs, large = numbers(), np.ones((8, 8, 128, 64), np.float32)  # 6 MiB
    expected = qkv.reference("softmax", **inputs).output
    with Client(haproxy.url, retries=0) as client:
        for _ in range(4):  # both replicas
            run = client.attend("softmax", **inputs)
            np.testing.assert_allclose(run.output, expected, rtol=1e-4, atol=1e-5)
        output = client.attend("softmax", query=large, key=large, value=large).output
        np.testing.assert_allclose(output, large, rtol=1e-4)
        with pytest.raises(errors.InvalidContent, match="key has"):
            client.attend("softmax", **inputs | {"key": inputs["key"][..., :1]})
        with pytest.raises(errors.NotFound):
            client.attend("nothing", **inputs)
        with client.sweep(["softmax"], [16, 32], repeats=2, progress=False) as sweep:
            assert [cell.length for cell in sweep] == [16, 32]
    with closing(triton.InferenceServerClient(haproxy.url.removeprefix("http://"))) as other:
        arrays = random_inputs()
        output = other.infer("softmax", infer_inputs(arrays)).as_numpy("output")
        expected = qkv.reference("softmax", **arrays).output
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
        with raises_inference_error("not allowed under Ray Serve"):
            other.unload_model("softmax")


@rare_of_ray
@pytest.mark.slow
def test_connection_is_kept_and_a_response_has_one_id(haproxy: RayCluster) -> None:
    def is_kept() -> bool:
        sockets = set()
        with closing(HTTPConnection(*haproxy.address, timeout=TIMEOUT_S)) as connection:
            for headers in ({}, {"x-request-id": "chosen-by-the-client"}):
                connection.request("GET", "/readyz", headers=headers)
                response = connection.getresponse()
                assert response.read()
                (id,) = response.headers.get_all("x-request-id", [])
                assert id == headers.get("x-request-id", id)
                sockets.add(connection.sock)  # None once it is closed
        return len(sockets) == 1 and None not in sockets

    # Ray reloads HAProxy when replicas change, and the process that ends closes its connections.
    wait_until(is_kept)


@rare_of_ray
@pytest.mark.slow
def test_body_that_is_too_large_is_rejected_before_it_is_sent(haproxy: RayCluster) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: qkv\r\nContent-Length: {1 << 40}\r\n\r\n"
    with socket.create_connection(haproxy.address, TIMEOUT_S) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


@rare_of_ray
@pytest.mark.slow
def test_no_call_fails_while_replicas_die_and_stop(haproxy: RayCluster) -> None:
    # HAProxy holds 16 KiB of a request: it sends a larger one again only if the client does
    with Load(haproxy.url, clients=2) as small, Load(haproxy.url, clients=2, length=1024) as large:

        def wait_for_responses() -> None:
            for load in (small, large):
                load.wait_for_responses(RESPONSES)

        wait_for_responses()
        (killed, *_) = replica_actors()
        kill(killed)
        wait_for_responses()
        small.wait_until(lambda: len(replica_actors() - {killed}) == 2)  # it is replaced
        small.wait_until(lambda: replica_states() == {"RUNNING": 2})
        deploy(configuration(1, scaling={}))
        small.wait_until(lambda: len(replica_actors()) == 1)
        wait_for_responses()
