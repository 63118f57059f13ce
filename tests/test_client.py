"""The client: arrays in, the same kind of arrays out, and the service's faults as exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from cases import DTYPES, FLOATING, Array, Case, as_json, random_case
from conftest import PATIENCE, Server
from torch import nn

import qkv
from qkv import AsyncClient, Client, Converted, QkvError, Run, errors

ROLES = ("query", "key", "value")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as shared:
        yield shared


def numbers(dtype: str = "float32", seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    shapes = {"query": (2, 4, 3, 8), "key": (2, 2, 5, 8), "value": (2, 2, 5, 6)}
    return {n: draw.normal(size=shape).astype(DTYPES[dtype]) for n, shape in shapes.items()}


def as_torch(array: Array) -> torch.Tensor:
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def torches(arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {name: as_torch(array) for name, array in arrays.items()}


def ask(client: Client, case: Case) -> Run:
    named: dict[str, Any] = case.inputs | case.parameters
    return client.attend("softmax", outputs=list(case.outputs), **named)


def as_numpy(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    array: Array = tensor.numpy()
    return array


def encoded(outputs: Any) -> dict[str, Any]:
    return {name: as_json(array, "base64") for name, array in outputs.items()}


@pytest.mark.parametrize("dtype", FLOATING)
def test_numpy_in_numpy_out(client: Client, dtype: str) -> None:
    inputs = numbers(dtype)
    run = client.attend("softmax", **inputs, causal=True, outputs=["output", "weights", "scores"])
    assert run.variant == "softmax"
    assert all(type(a) is np.ndarray for a in run.outputs.values())
    exact = "float64" if dtype == "float64" else "float32"
    came = [a.dtype.name for a in (run.output, run.weights, run.scores)]
    assert came == [dtype, exact, exact]
    Case(inputs, {"causal": True}, dtype).check(encoded(run.outputs))
    assert run.timing["batch_size"] == 1
    run.output[:] = 0  # the caller's own


@pytest.mark.parametrize("dtype", FLOATING)
def test_torch_in_torch_out(client: Client, dtype: str) -> None:
    inputs = numbers(dtype)
    tensors = torches(inputs)
    tensors["query"].requires_grad_()
    run = client.attend("softmax", **tensors)
    assert all(type(t) is torch.Tensor for t in run.outputs.values())
    assert run.output.dtype == tensors["query"].dtype
    assert not run.output.requires_grad
    same = client.attend("softmax", **inputs)
    for name in ("output", "weights"):
        assert as_numpy(run.outputs[name]).tobytes() == same.outputs[name].tobytes()
    run.output.zero_()


@pytest.mark.parametrize("kind", range(30))
def test_everything_that_softmax_takes(client: Client, kind: int) -> None:
    case = random_case(20_000 + kind, 0)
    if "window" in case.parameters:  # a tuple is as good as a list
        case.parameters["window"] = tuple(case.parameters["window"])
    run = ask(client, case)
    case.check(encoded(run.outputs))
    tensors = torches(case.inputs) | case.parameters
    again = client.attend("softmax", outputs=list(case.outputs), **tensors)
    for name, array in run.outputs.items():
        assert as_numpy(again.outputs[name]).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", FLOATING)
def test_arrays_need_not_be_contiguous(client: Client, dtype: str) -> None:
    dense = numbers(dtype)
    expected = client.attend("softmax", **dense).output.tobytes()

    def views(array: Array) -> Iterator[Array]:
        """The same numbers, lying otherwise."""
        yield np.asfortranarray(array)
        yield array[..., ::-1].copy()[..., ::-1]
        yield np.repeat(array, 2, axis=-1)[..., ::2]
        yield array.transpose(3, 1, 0, 2).copy().transpose(2, 1, 3, 0)

    for some in zip(*(views(dense[n]) for n in ROLES), strict=True):
        odd = dict(zip(ROLES, some, strict=True))
        assert client.attend("softmax", **odd).output.tobytes() == expected
        if all(s >= 0 for a in some for s in a.strides):
            run = client.attend("softmax", **torches(odd))
            assert as_numpy(run.output).tobytes() == expected


def test_read_only_and_big_endian_arrays(client: Client) -> None:
    dense = numbers()
    expected = client.attend("softmax", **dense).output.tobytes()
    swapped = {n: a.astype(">f4") for n, a in dense.items()}
    assert client.attend("softmax", **swapped).output.tobytes() == expected
    for array in dense.values():
        array.flags.writeable = False
    assert client.attend("softmax", **dense).output.tobytes() == expected


class Arrayish:
    """What numpy can make an array of."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return self._array


class Packed:
    """What speaks DLPack and nothing else."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("kind", [Arrayish, Packed])
def test_other_arrays_are_answered_in_numpy(client: Client, kind: Callable[[Array], Any]) -> None:
    dense = numbers()
    run = client.attend("softmax", **{n: kind(a) for n, a in dense.items()})
    assert type(run.output) is np.ndarray
    assert run.output.tobytes() == client.attend("softmax", **dense).output.tobytes()


def test_masks_and_lengths_are_arrays_too(client: Client) -> None:
    inputs = numbers() | {"key_lengths": np.array([2, 5]), "mask": np.ones((1, 5), bool)}
    Case(inputs, outputs=("output", "weights")).check(
        encoded(client.attend("softmax", **inputs).outputs)
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", np.float64(0.5)),
        ("scale", np.float32(0.5)),
        ("causal", np.bool_(True)),
        ("query_offset", np.int64(1)),
    ],
)
def test_parameters_may_be_scalars_of_numpy(client: Client, name: str, value: Any) -> None:
    """`scale=1 / np.sqrt(D)` is a numpy scalar."""
    inputs = numbers()
    plain: dict[str, Any] = {"causal": True} | {name: value.item()}
    odd: dict[str, Any] = {"causal": True} | {name: value}
    one, other = (client.attend("softmax", **inputs, **p).output for p in (plain, odd))
    assert one.tobytes() == other.tobytes()


def test_outputs_and_weights_choose_what_comes(client: Client) -> None:
    inputs = numbers()
    assert list(client.attend("softmax", **inputs).outputs) == ["output", "weights"]
    assert list(client.attend("softmax", **inputs, weights="none").outputs) == ["output"]
    run = client.attend("softmax", **inputs, outputs=["scores"])
    assert list(run.outputs) == ["scores"]
    with pytest.raises(KeyError, match="weights"):
        _ = run.weights
    assert client.attend("softmax", **inputs, scale=None, window=None).timing["flops"]


class Attention(nn.Module):
    """A layer with names that the service knows."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.W_query = nn.Linear(5, 6, bias=bias)
        self.W_key = nn.Linear(5, 6, bias=bias)
        self.W_value = nn.Linear(5, 6, bias=bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_modules_state_is_a_layer(client: Client, bias: bool, dtype: torch.dtype) -> None:
    module = Attention(bias).to(dtype)
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer = {"layout": "v2", "tensors": module.state_dict()}
    run = client.attend("softmax", x=x, layer=layer, causal=True)
    assert run.output.dtype == dtype
    assert run.output.shape == (2, 4, 6)
    with torch.no_grad():
        q, k, v = (m(x) for m in (module.W_query, module.W_key, module.W_value))
    direct = client.attend("softmax", query=q, key=k, value=v, causal=True)
    # the projections are rounded to the dtype, and sum M = 5 products in some order
    bound = 16 * torch.finfo(dtype).eps * float(v.abs().max()) * (1 + float((q @ k.mT).abs().max()))
    assert float((run.output - direct.output).abs().max()) <= bound
    apart = client.attend("softmax", query=x, key=x, value=x, layer=layer, causal=True)
    assert torch.equal(apart.output, run.output)
    heads = client.attend("softmax", x=x, layer=layer | {"heads": 2})
    assert heads.weights.shape == (2, 2, 4, 4)


def test_weights_convert_there_and_back(client: Client) -> None:
    state = {n: t.detach() for n, t in Attention(False).state_dict().items()}
    there = client.convert(state, source="v2", target="v1")
    assert all(type(t) is torch.Tensor for t in there.tensors.values())
    for role in ROLES:
        assert torch.equal(there.tensors[f"W_{role}"], state[f"W_{role}.weight"].T)
    assert there.check["largest_absolute_difference"] < 1e-12
    back = client.convert(there.tensors, source="v1", target="v2", heads=3)
    assert back.tensors.keys() == state.keys()
    assert all(torch.equal(back.tensors[n], t) for n, t in state.items())
    biased = {n: t.detach().numpy() for n, t in Attention(True).state_dict().items()}
    folded = client.convert(biased, source="v2", target="v1", bias="augment")
    assert all(type(a) is np.ndarray for a in folded.tensors.values())
    again = client.convert(folded.tensors, source="v1", target="v2", bias="augment")
    assert {n: a.tobytes() for n, a in again.tensors.items()} == {
        n: a.tobytes() for n, a in biased.items()
    }
    module = Attention(True).to(torch.bfloat16)
    halves = client.convert(module.state_dict(), source="v2", target="v1", bias="augment")
    assert {t.dtype for t in halves.tensors.values()} == {torch.bfloat16}


def test_the_catalogue(client: Client) -> None:
    (entry,) = (v for v in client.variants() if v["variant"] == "softmax")
    assert entry["inputs"].keys() == {"query", "key", "value", "mask", "key_lengths"}
    assert entry["outputs"].keys() == {"output", "weights", "scores"}
    assert entry["parameters"]["properties"]["causal"]["default"] is False


def attend(**changes: Any) -> Callable[[Client], object]:
    arguments: dict[str, Any] = {"variant": "softmax"} | numbers() | changes
    return lambda client: client.attend(**arguments)


@pytest.mark.parametrize(
    ("call", "kind", "said", "pointer"),
    [
        (attend(variant="sofmax"), errors.NotFound, "softmax", None),
        (attend(variant="a/b?c#d"), errors.NotFound, "a/b", None),
        (attend(layer="mine"), errors.NotFound, "mine", "/layer"),
        (attend(causal="yes"), errors.InvalidContent, "causal", "/parameters/causal"),
        (attend(nothing=1), errors.InvalidContent, "nothing", "/parameters/nothing"),
        (attend(nothing=np.ones(3)), errors.InvalidContent, "nothing", "/inputs/nothing"),
        (attend(key=np.ones((2, 2, 5, 7), "f4")), errors.InvalidContent, "D=7", "/inputs/key"),
        (attend(key=np.ones((2, 2, 5, 8))), errors.InvalidContent, "float64", "/inputs/key"),
        (attend(outputs=["all"]), errors.InvalidContent, "all", "/outputs/0"),
        (attend(weights="some"), errors.InvalidContent, "some", "/weights"),
        (attend(layer={"layout": "v9"}), errors.InvalidContent, "v9", "/layer/layout"),
        (
            lambda c: c.convert({"W_query": np.ones((2, 2))}, source="v1", target="v2"),
            errors.InvalidContent, "W_key", "/tensors",
        ),
        (
            lambda c: c.convert({"W_query": np.ones((2, 2))}, source="v1", target="v7"),
            errors.InvalidContent, "v7", "/to",
        ),
        (
            lambda c: c.convert({}, source="v1", target="v2"),
            errors.InvalidContent, "nothing", "/tensors",
        ),
    ],
)  # fmt: skip
def test_what_the_service_refuses_is_raised(
    client: Client,
    call: Callable[[Client], object],
    kind: type[QkvError],
    said: str,
    pointer: str | None,
) -> None:
    with pytest.raises(QkvError) as caught:
        call(client)
    assert type(caught.value) is kind
    assert said in caught.value.detail
    assert str(caught.value) == caught.value.detail
    assert caught.value.pointer == pointer
    assert caught.value.problem()["status"] == kind.status


@pytest.mark.parametrize(
    "arguments",
    [
        {"query": [[1.0]], "key": [[1.0]], "value": [[1.0]]},
        {},
        {"query": np.ones((2, 2), "c8"), "key": np.ones((2, 2)), "value": np.ones((2, 2))},
        {"query": np.array([["a"]]), "key": np.ones((2, 2)), "value": np.ones((2, 2))},
        {"query": np.array([None]), "key": np.ones((2, 2)), "value": np.ones((2, 2))},
        {"query": torch.ones(2, 2, dtype=torch.int32), "key": np.ones((2, 2))},
        {"query": np.ones((2, 2)), "key": torch.ones(2, 2, dtype=torch.complex64)},
    ],
)
def test_what_is_no_array_is_refused_without_asking(
    client: Client, arguments: dict[str, Any]
) -> None:
    with pytest.raises(errors.InvalidContent):
        client.attend("softmax", **arguments)


def test_limits_of_the_service_are_raised(serve: Callable[..., Server]) -> None:
    inputs = numbers()
    small = serve(max_body_bytes=1000)
    with Client(small.url) as client:
        with pytest.raises(errors.TooLarge) as too_large:
            client.attend("softmax", **inputs)
        assert too_large.value.members == {"limit": 1000}
    busy = serve(max_queue_bytes=3000)
    with ThreadPoolExecutor(1) as pool, Client(busy.url, timeout=PATIENCE) as client:
        with busy.engine.hold():
            waiting = pool.submit(client.attend, "softmax", **inputs)
            busy.await_waiting(1)
            with pytest.raises(errors.NotNow) as not_now:
                client.attend("softmax", **inputs)
            assert not_now.value.retry_after >= 1
        assert waiting.result().output.shape == (2, 4, 3, 6)


def test_one_client_serves_many_threads(client: Client) -> None:
    cases = [random_case(30_000 + kind, 0) for kind in range(40)]
    alone = [ask(client, case) for case in cases]
    start = threading.Barrier(8, timeout=PATIENCE)

    def run(offset: int) -> list[Any]:
        start.wait()
        runs = [ask(client, case) for case in cases[offset:] + cases[:offset]]
        return runs[len(cases) - offset :] + runs[: len(cases) - offset]

    with ThreadPoolExecutor(8) as pool:
        for runs in pool.map(run, range(0, 40, 5)):
            for one, other in zip(runs, alone, strict=True):
                assert list(one.outputs) == list(other.outputs)
                for name, array in one.outputs.items():
                    assert array.tobytes() == other.outputs[name].tobytes()


def test_where_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}") as client:
        for call in (lambda: client.attend("softmax", **numbers()), client.variants):
            with pytest.raises(httpx.ConnectError):
                call()


def test_a_timeout_is_httpxs_own(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(server.url, timeout=0.05) as client, server.engine.hold():
        with pytest.raises(httpx.TimeoutException):
            client.attend("softmax", **numbers())
        server.await_waiting(0)  # whoever waits no longer has left


def test_it_closes(server: Server) -> None:
    with Client(server.url) as client:
        assert client.variants()
    with pytest.raises(RuntimeError, match="closed"):
        client.variants()
    other = Client(server.url)
    other.close()
    other.close()


@pytest.mark.parametrize(
    ("status", "headers", "content"),
    [
        (502, {"content-type": "text/html"}, b"<h1>Bad gateway</h1>"),
        (502, {"content-type": "application/json"}, b"[]"),
        (502, {"content-type": "application/json"}, b'"bad gateway"'),
        (500, {}, b""),
        (404, {"content-type": "application/json"}, b'{"detail": "Not Found"}'),
        (
            503,
            {
                "content-type": "application/problem+json",
                "retry-after": "Wed, 21 Oct 2015 07:28:00 GMT",
            },
            b'{"type": "urn:qkv:problem:not-now", "detail": "busy"}',
        ),
        (200, {}, b"<h1>Welcome</h1>"),
        (200, {"content-type": "application/json"}, b"{}"),
        (200, {"content-type": "application/json"}, b"[]"),
    ],
)
def test_what_answers_may_be_no_qkv(status: int, headers: dict[str, str], content: bytes) -> None:
    """A proxy, or something else at that address: an error of ours all the same."""

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers=headers, content=content)

    with Client("http://elsewhere", transport=httpx.MockTransport(answer)) as client:
        for call in (
            lambda: client.attend("softmax", **numbers()),
            lambda: client.convert({"W": np.ones(2)}, source="v1", target="v2"),
            client.variants,
        ):
            with pytest.raises(QkvError):
                call()


def test_the_public_names() -> None:
    assert qkv.__all__ == sorted(qkv.__all__)
    assert {"Client", "QkvError"} <= set(qkv.__all__)
    assert all(hasattr(qkv, name) for name in qkv.__all__)


# the twin


def in_asyncio(url: str, call: Callable[[AsyncClient], Any], **options: Any) -> Any:
    """What a call of an `AsyncClient` answers or raises."""

    async def run() -> Any:
        async with AsyncClient(url, **options) as client:
            return await call(client)

    return asyncio.run(run())


def same_run(one: Run, other: Run) -> bool:
    seen = [
        [(n, a.dtype, a.shape, a.tobytes()) for n, a in run.outputs.items()] for run in (one, other)
    ]
    return one.variant == other.variant and seen[0] == seen[1]


@pytest.mark.parametrize("kind", range(10))
def test_the_twin_gives_the_same_bits(client: Client, server: Server, kind: int) -> None:
    case = random_case(50_000 + kind, 0)
    arguments: dict[str, Any] = {"outputs": list(case.outputs)} | case.inputs | case.parameters
    run = in_asyncio(server.url, lambda twin: twin.attend("softmax", **arguments))
    assert type(run) is Run
    assert same_run(run, client.attend("softmax", **arguments))
    tensors = torches(case.inputs)
    again = in_asyncio(server.url, lambda twin: twin.attend("softmax", **(arguments | tensors)))
    for name, array in run.outputs.items():
        assert as_numpy(again.outputs[name]).tobytes() == array.tobytes()


def test_the_twin_converts_and_reads_the_catalogue(client: Client, server: Server) -> None:
    state = Attention(False).state_dict()
    there = in_asyncio(server.url, lambda twin: twin.convert(state, source="v2", target="v1"))
    assert type(there) is Converted
    same = client.convert(state, source="v2", target="v1")
    assert there.check == same.check
    assert there.tensors.keys() == same.tensors.keys()
    assert all(torch.equal(there.tensors[n], t) for n, t in same.tensors.items())
    assert in_asyncio(server.url, lambda twin: twin.variants()) == client.variants()


def test_one_twin_runs_many_at_once(client: Client, server: Server) -> None:
    cases = [random_case(60_000 + kind, 0) for kind in range(40)]

    async def all_at_once(twin: AsyncClient) -> list[Run]:
        named: list[dict[str, Any]] = [
            {"outputs": list(c.outputs)} | c.inputs | c.parameters for c in cases
        ]
        calls: list[Any] = [twin.attend("softmax", **arguments) for arguments in named]
        return list(await asyncio.gather(*calls))

    runs = in_asyncio(server.url, all_at_once)
    assert all(same_run(run, ask(client, c)) for run, c in zip(runs, cases, strict=True))


def test_calls_of_the_twin_wait_beside_each_other(serve: Callable[..., Server]) -> None:
    server = serve()

    async def together(twin: AsyncClient) -> list[Run]:
        with server.engine.hold():
            calls = [asyncio.ensure_future(twin.attend("softmax", **numbers())) for _ in range(5)]
            await asyncio.to_thread(server.await_waiting, 5)
        return list(await asyncio.gather(*calls))

    runs = in_asyncio(server.url, together)
    assert all(same_run(run, runs[0]) for run in runs)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (attend(variant="sofmax"), errors.NotFound),
        (attend(causal="yes"), errors.InvalidContent),
        (attend(scale=float("nan")), errors.InvalidContent),
        (attend(query=np.ones((2, 2), "c8")), errors.InvalidContent),
        (
            lambda c: c.convert({"W_query": np.ones((2, 2))}, source="v1", target="v7"),
            errors.InvalidContent,
        ),
    ],
)
def test_the_twin_raises_the_same(
    client: Client, server: Server, call: Callable[[Any], Any], kind: type[QkvError]
) -> None:
    with pytest.raises(kind) as caught:
        call(client)
    with pytest.raises(kind) as twins:
        in_asyncio(server.url, call)
    assert type(twins.value) is type(caught.value)
    assert twins.value.problem() == caught.value.problem()


def test_the_twin_closes_and_times_out(serve: Callable[..., Server]) -> None:
    server = serve()

    async def closed() -> None:
        async with AsyncClient(server.url) as twin:
            assert await twin.variants()
        with pytest.raises(RuntimeError, match="closed"):
            await twin.variants()
        await twin.close()

    asyncio.run(closed())
    with server.engine.hold(), pytest.raises(httpx.TimeoutException):
        in_asyncio(server.url, lambda twin: twin.attend("softmax", **numbers()), timeout=0.05)


# sent again


Answer = tuple[int, dict[str, str], bytes] | None
GOOD: Answer = (200, {"content-type": "application/json"}, b'{"variants": [{"variant": "a"}]}')


def problem(status: int, name: str, **headers: str) -> Answer:
    text = f'{{"type": "urn:qkv:problem:{name}", "status": {status}, "detail": "because"}}'
    named = {n.replace("_", "-"): v for n, v in headers.items()}
    return status, {"content-type": "application/problem+json"} | named, text.encode()


def busy(retry_after: str = "0") -> Answer:
    return problem(503, "not-now", retry_after=retry_after)


@dataclass
class Script:
    """A service that answers as written, one line an attempt; None closes without a word.

    Attributes:
        url: where.
        answers: what is still to be said; the last line is said for ever.
        came: bodies, in order.
    """

    url: str
    answers: list[Answer]
    came: list[bytes] = field(default_factory=list)

    def next(self, body: bytes) -> Answer:
        self.came.append(body)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextlib.contextmanager
def scripted(*answers: Answer, port: int = 0) -> Iterator[Script]:
    script = Script("", list(answers))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            said = script.next(self.rfile.read(int(self.headers.get("content-length", 0))))
            if said is None:
                self.close_connection = True
                return
            status, headers, content = said
            self.send_response(status)
            for name, value in (headers | {"content-length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as http:
        script.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield script
        finally:
            http.shutdown()
            thread.join(PATIENCE)


def one(url: str, call: Callable[[Any], Any], **options: Any) -> Any:
    with Client(url, **options) as client:
        return call(client)


KINDS = pytest.mark.parametrize("send", [one, in_asyncio], ids=["sync", "async"])


def catalogue(client: Any) -> Any:
    return client.variants()


@KINDS
@pytest.mark.parametrize(
    "before",
    [[], [busy()], [busy(), busy()], [None], [None, busy()], [busy(), None]],
    ids=["at once", "busy", "busy twice", "closed", "closed, busy", "busy, closed"],
)
def test_what_is_refused_for_now_is_sent_again(send: Any, before: list[Answer]) -> None:
    with scripted(*before, GOOD) as script:
        assert send(script.url, catalogue) == [{"variant": "a"}]
        assert len(script.came) == len(before) + 1


@KINDS
def test_a_run_is_sent_again_as_it_was(client: Client, send: Any) -> None:
    sent: list[bytes] = []

    def keep(request: httpx.Request) -> httpx.Response:
        sent.append(request.content)
        response = httpx.post(client._http.base_url.join(request.url.path), content=request.content,
                              headers=request.headers)  # fmt: skip
        said.append((200, {"content-type": response.headers["content-type"]}, response.content))
        return httpx.Response(200, content=response.content)

    said: list[Answer] = []
    with Client("http://elsewhere", transport=httpx.MockTransport(keep)) as through:
        first = through.attend("softmax", **numbers())
    with scripted(busy(), None, said[0]) as script:
        again = send(script.url, lambda c: c.attend("softmax", **numbers()))
        assert same_run(first, again)
        assert script.came == sent * 3


@KINDS
@pytest.mark.parametrize("retries", [0, 1, 2])
def test_it_is_sent_again_only_so_often(send: Any, retries: int) -> None:
    with scripted(busy()) as script:
        with pytest.raises(errors.NotNow, match="because"):
            send(script.url, catalogue, retries=retries)
        assert len(script.came) == retries + 1
    with scripted(None) as script:
        with pytest.raises(httpx.RemoteProtocolError):
            send(script.url, catalogue, retries=retries)
        assert len(script.came) == retries + 1


@KINDS
@pytest.mark.parametrize(
    "refusal",
    [
        problem(422, "invalid-content"), problem(422, "invalid-content", retry_after="0"),
        problem(400, "unparseable"), problem(404, "not-found"), problem(413, "too-large"),
        problem(500, "internal"), problem(503, "not-now"), problem(504, "too-late"),
        (502, {}, b"<h1>Bad gateway</h1>"), (200, {}, b"<h1>Welcome</h1>"),
    ],
    ids=lambda refusal: str(refusal[0]),
)  # fmt: skip
def test_what_is_refused_for_good_is_sent_once(send: Any, refusal: Answer) -> None:
    with scripted(refusal) as script:
        with pytest.raises(QkvError):
            send(script.url, catalogue)
        assert len(script.came) == 1


@KINDS
def test_who_listens_only_later_is_reached(send: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(httpx.ConnectError):
        send(url, catalogue, retries=0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(send, url, catalogue, retries=6)
        time.sleep(0.05)  # its first attempt is refused, or its only one is answered
        with scripted(GOOD, port=port) as script:
            assert answer.result(PATIENCE) == [{"variant": "a"}]
            assert len(script.came) == 1


@KINDS
@pytest.mark.parametrize(
    "retry_after",
    [
        "Wed, 21 Oct 2015 07:28:00 GMT", "soon", "", "nan", "-nan", "-1", "-inf", "1e-400", "0x1",
        "1_0e-9", "\u00bd",
    ],
)  # fmt: skip
def test_any_retry_after_is_borne(
    send: Any, retry_after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def sleeps(delay: float) -> None:
        waited.append(delay)

    # the client's own names: others sleep too
    monkeypatch.setattr("qkv.client.time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setattr("qkv.async_client.asyncio", SimpleNamespace(sleep=sleeps))
    for retries in (1, 0):
        answers = {"a": [busy(retry_after), GOOD], "b": [busy(retry_after)]}
        with scripted(*answers["a" if retries else "b"]) as script:
            if retries:
                assert send(script.url, catalogue, retries=1) == [{"variant": "a"}]
            else:
                with pytest.raises(errors.NotNow):
                    send(script.url, catalogue, retries=0)
            assert len(script.came) == retries + 1
    assert len(waited) == 1
    assert 0 <= waited[0] <= 10


@KINDS
@pytest.mark.parametrize("retry_after", ["3", "10", "30", "3600"])
def test_a_retry_after_is_told_as_it_came(send: Any, retry_after: str) -> None:
    with scripted(busy(retry_after)) as script, pytest.raises(errors.NotNow) as caught:
        send(script.url, catalogue, retries=0)
    assert caught.value.retry_after == int(retry_after)
