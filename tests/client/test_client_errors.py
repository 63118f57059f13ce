"""Tests of the client's exceptions: rejected requests, missing services, other servers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch

from qkv import Client, QkvError, ServiceUnreachable, errors
from support.clients import attend, in_asyncio, numbers, send_sync
from support.clients import client as client
from support.processes import TIMEOUT_S
from support.service import Server


@pytest.mark.parametrize(
    ("call", "kind", "expected", "pointer"),
    [
        (attend(variant="sofmax"), errors.NotFound, "softmax", None),
        (attend(variant="a/b?c#d"), errors.NotFound, "a/b", None),
        (attend(causal="yes"), errors.InvalidContent, "causal", "/parameters/causal"),
        (attend(nothing=np.ones(3)), errors.InvalidContent, "nothing", "/inputs/nothing"),
        (
            lambda c: c.convert({"W_query": np.ones((2, 2))}, source="v1", target="v7"),
            errors.InvalidContent, "v7", "/to",
        ),
        (attend(scale=float("nan")), errors.InvalidContent, "scale is not finite", None),
    ],
)  # fmt: skip
def test_rejected_request_raises_its_error_in_both_clients(
    client: Client,
    server: Server,
    call: Callable[[Any], object],
    kind: type[QkvError],
    expected: str,
    pointer: str | None,
) -> None:
    with pytest.raises(QkvError) as caught:
        call(client)
    assert type(caught.value) is kind
    assert expected in caught.value.detail
    assert str(caught.value) == caught.value.detail
    assert caught.value.pointer == pointer
    assert caught.value.problem()["status"] == kind.status
    with pytest.raises(kind) as of_async:
        in_asyncio(server.url, call)
    assert type(of_async.value) is kind
    assert of_async.value.problem() == caught.value.problem()


def masked(array: Any) -> Any:
    return np.ma.masked_array(array, np.arange(array.size).reshape(array.shape) == 1)


ONES = torch.ones(2, 2)
WITHOUT_NUMBERS: dict[str, Callable[[], Any]] = {
    "masked array: got 1 masked numbers": lambda: masked(np.ones((2, 2), "f4")),
    "masked array: got 1 masked": lambda: [masked(np.ones(2)), [1.0, 2.0]],
    "masked array: got 1": lambda: [[1.0, np.ma.masked], [1.0, 2.0]],
    "float32, strided, on meta": lambda: ONES.to("meta"),
    "a Tensor of float32, strided, on meta": lambda: [[0.0, 1.0], ONES[0].to("meta")],
    "a Tensor of float32, sparse_coo, on cpu": ONES.to_sparse,
    "a Tensor of bfloat16, sparse_coo, on cpu": lambda: ONES.bfloat16().to_sparse(),
    "a Tensor of float32, sparse_csr, on cpu": ONES.to_sparse_csr,
    "a Tensor of float8_e4m3fn, strided": lambda: ONES.to(torch.float8_e4m3fn),
    "a Tensor of qint8, strided": lambda: torch.quantize_per_tensor(ONES, 0.1, 0, torch.qint8),
    "a UninitializedParameter of float32": torch.nn.UninitializedParameter,
    "unsupported dtype: got object": lambda: np.array([[1.0, None]]),
    "unsupported dtype: got int32": lambda: np.ones((2, 2), "i4"),
    "unsupported dtype: got complex64": lambda: ONES.to(torch.complex64).conj(),
    "unsupported dtype: got float8_e4m3fn": lambda: np.ones(2, ml_dtypes.float8_e4m3fn),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("send", [send_sync, in_asyncio])
@pytest.mark.parametrize("expected", WITHOUT_NUMBERS)
def test_array_without_numbers_is_named(
    server: Server, send: Callable[..., Any], expected: str
) -> None:
    odd, good = WITHOUT_NUMBERS[expected](), np.ones((2, 2), "f4")
    inputs: dict[str, Any] = {"query": good, "key": odd, "value": good}
    calls: list[tuple[str, Callable[[Any], Any]]] = [
        ("key", lambda c: c.attend("softmax", **inputs)),
        ("key", lambda c: c.compare(["linear"], **inputs)),
        ("key", lambda c: c.gradients("softmax", **inputs, grad_output=good)),
        ("grad_output", lambda c: c.gradients("softmax", query=good, key=good, value=good,
                                              grad_output=odd)),
        ("y", lambda c: c.detect({"W_query": good}, good, odd)),
        ("state.sums", lambda c: c.attend("gated", query=good, state={"state.sums": odd})),
        ("output", lambda c: c.verify(lambda **_: odd, "softmax")),
        ("W_query", lambda c: c.convert({"W_query": odd}, source="v1", target="v2")),
        ("W_query", lambda c: c.attend("softmax", x=good, layer={"tensors": {"W_query": odd}})),
    ]  # fmt: skip
    for name, call in calls:
        if isinstance(odd, list) and name in ("output", "state.sums"):
            continue  # no list is taken there
        with pytest.raises(errors.InvalidContent) as caught:
            send(server.url, call)
        assert caught.value.detail.startswith(f"{name} "), caught.value.detail
        shown = expected.partition(": got ")[2] or expected.partition(" of ")[2].partition(",")[0]
        assert (expected if not name.startswith("W_") else shown) in caught.value.detail


@pytest.mark.parametrize(
    ("arguments", "detail"),
    [
        ({"weights": {"top_k": float("nan")}}, "top_k is not finite: got nan"),
        ({"layer": {"layout": "v1", "softcap": np.float64("inf")}}, "softcap is not finite"),
        ({"scale": object()}, "scale cannot be sent: got <object object"),
        ({"weights": {"rows": {1, 2}}}, "rows cannot be sent: got {1, 2}, expected a value of"),
        ({"seed": 1 << 70}, "seed cannot be sent: got 1180591620717411303424, expected"),
        ({"layer": {1: 2}}, "layer has a name that is no text: got 1"),
        ({"weights": "\ud800"}, "weights cannot be sent: got '\\ud800', expected"),
    ],
)
def test_value_without_a_place_in_json_is_named(
    client: Client, arguments: dict[str, Any], detail: str
) -> None:
    with pytest.raises(errors.InvalidContent) as caught:
        client.attend("softmax", **numbers(), **arguments)
    assert caught.value.detail.startswith(detail)


@pytest.mark.slow
def test_limits_of_the_service_raise_their_errors(serve: Callable[..., Server]) -> None:
    inputs = numbers()
    small = serve(max_body_bytes=1000)
    with Client(small.url) as client:
        with pytest.raises(errors.PayloadTooLarge) as too_large:
            client.attend("softmax", **inputs)
        assert too_large.value.members == {"limit": 1000}
    busy = serve(max_queue_bytes=3000)
    with ThreadPoolExecutor(1) as pool, Client(busy.url, timeout=TIMEOUT_S) as client:
        with busy.hold():
            waiting = pool.submit(client.attend, "softmax", **inputs)
            busy.wait_until_queued(1)
            with pytest.raises(errors.ServiceUnavailable) as not_now:
                client.attend("softmax", **inputs)
            assert not_now.value.retry_after >= 1
        assert waiting.result().output.shape == (2, 4, 3, 6)


@pytest.mark.parametrize("send", [send_sync, in_asyncio])
def test_missing_service_is_an_error_with_address_and_hint(send: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    calls: list[Callable[[Any], Any]] = [
        lambda client: client.attend("softmax", **numbers()),
        lambda client: client.variants(),
    ]
    for call in calls:
        with pytest.raises(ServiceUnreachable) as caught:
            send(url.replace("//", "//user:secret@"), call, retries=1)
        assert caught.value.url == url
        assert str(caught.value).startswith(f"no service at {url}: ")
        assert "`qkv serve`" in str(caught.value)
        assert "secret" not in str(caught.value)
        assert isinstance(caught.value, httpx.ConnectError)
        assert caught.value.__cause__ is not None
