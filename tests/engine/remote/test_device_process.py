"""HTTP in several processes, and one more that has the device: real processes, sockets, signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
from test_supervisor import Asked, address, alive, ask, big, children, looping

import qkv
from conftest import PATIENCE, Process, running, until
from qkv.api.openapi import examples
from qkv.attention.catalogue import Variant, variants
from qkv.client.request_builders import build_attend
from support.known_requests import random_case, refused

WORKERS: Final = 3
PATH: Final = "/v1/attention/softmax"
JSON: Final = {"Content-Type": "application/json"}
SAFETENSORS: Final = {"Content-Type": "application/vnd.safetensors"}
Start = Callable[..., Process]


@pytest.fixture
def start(command: Start) -> Start:
    def started(workers: int = WORKERS, **environment: str) -> Process:
        environment = {"QKV_DEVICE_PROCESS": "one"} | environment
        process = command("serve", "--port", "0", "--workers", str(workers), **environment)
        assert process.url
        return process

    return started


@pytest.fixture
def fleet(start: Start) -> Process:
    return start()


def device_process(fleet: Process) -> int:
    """The child that does not listen."""
    _, port = address(fleet)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = (r[9] for r in rows if r[3] == "0A" and int(r[1].partition(":")[2], 16) == port)
    (found,) = (
        pid
        for pid in children(fleet.popen.pid)
        if f"socket:[{inode}]" not in {os.readlink(p) for p in Path(f"/proc/{pid}/fd").iterdir()}
    )
    return found


def drawn(seed: int, length: int = 64, heads: int = 4) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    shape = (1, heads, length, 16)
    return {n: draw.normal(size=shape).astype(np.float32) for n in ("query", "key", "value")}


def body(length: int, heads: int = 4) -> bytes:
    return build_attend("softmax", None, ["output"], "none", drawn(0, length, heads)).content


def statistics(fleet: Process) -> dict[str, Any]:
    (found,) = httpx.get(f"{fleet.url}/v2/models/softmax/stats").json()["model_stats"]
    return dict(found)


def outputs(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    answer = response.json()
    assert list(answer.pop("timing"))
    return answer


def test_it_is_one_process_more_and_only_where_asked_for(start: Start) -> None:
    fleet = start()
    assert len(children(fleet.popen.pid)) == WORKERS + 1
    assert device_process(fleet) in children(fleet.popen.pid)
    assert [ask(fleet.url, p) for p in ("/readyz", "/livez")] == [200, 200]
    config = httpx.get(f"{fleet.url}/v2/models/softmax/config").json()
    assert config["instance_group"][0]["count"] == 1
    for choice in ("auto", "each"):
        assert len(children(start(2, QKV_DEVICE_PROCESS=choice).popen.pid)) == 2
    assert fleet.end() == 0


@pytest.mark.parametrize("variant", list(variants().values()), ids=lambda v: v.name)
def test_answers_are_those_of_a_plain_service(
    process: Process, variant: Variant, shared: Process
) -> None:
    """Through layers and gradients too."""
    for kind, found in (("attention", examples.attention), ("gradients", examples.gradients)):
        if kind == "gradients" and variant.backward is None:
            continue
        for _, request, _ in found(variant).values():
            there, here = (
                httpx.post(f"{p.url}/v1/{kind}/{variant.name}", json=request)
                for p in (shared, process)
            )
            assert outputs(there) == outputs(here)
            assert list(there.json()["timing"]) == list(here.json()["timing"])


@pytest.fixture(scope="module")
def shared(_settings_of_the_tests_only: None) -> Any:
    with running("serve", "--port", "0", "--workers", "2", QKV_DEVICE_PROCESS="one") as ran:
        assert ran.url
        yield ran
        assert ran.end() == 0, ran.lines


def test_whatever_softmax_takes_has_the_same_answer(process: Process, shared: Process) -> None:
    with httpx.Client() as client:
        for kind in range(40):
            content = json.dumps(random_case(kind, 0).document)
            one, other = (
                client.post(p.url + PATH, content=content, headers=JSON) for p in (shared, process)
            )
            assert outputs(one) == outputs(other)
        wrong: list[Any] = [{"inputs": {}}, {"inputs": {"query": [[1]]}, "nope": 1}]
        for document in wrong:
            one, other = (client.post(p.url + PATH, json=document) for p in (shared, process))
            assert refused(one) == refused(other)


def test_batches_form_across_workers(start: Start) -> None:
    """While the device process is stopped, more wait than any one worker has connections. What has
    come from one of them may run before it has read the others': then once more."""
    fleet = start(QKV_MAX_BATCH="16")
    arrays = [drawn(seed) for seed in range(12)]
    with ExitStack() as stack:
        clients = [stack.enter_context(qkv.Client(fleet.url)) for _ in arrays]
        wanted = [
            c.attend("softmax", **a).output for c, a in zip(clients, arrays, strict=True)
        ]  # each has its connection now
        pool = stack.enter_context(ThreadPoolExecutor(len(arrays)))
        largest = 0

        def stopped() -> None:
            nonlocal largest
            before = statistics(fleet)
            device = device_process(fleet)
            os.kill(device, signal.SIGSTOP)
            runs = [
                pool.submit(c.attend, "softmax", **a) for c, a in zip(clients, arrays, strict=True)
            ]
            time.sleep(1)
            assert not any(run.done() for run in runs)
            os.kill(device, signal.SIGCONT)
            found = [run.result(PATIENCE) for run in runs]
            for run, output in zip(found, wanted, strict=True):
                assert (run.output == output).all()
            largest = max(run.timing["batch_size"] for run in found)
            assert min(run.timing["queue_ms"] for run in found) > 100
            after = statistics(fleet)
            assert after["inference_count"] - before["inference_count"] == 12
            assert after["execution_count"] - before["execution_count"] < 12

        for _ in range(10):
            stopped()
            if largest > len(arrays) / WORKERS + 1:
                return
        raise AssertionError(f"no batch of more than {largest}")


def test_a_killed_device_process_is_replaced_and_nothing_wrong_is_answered(fleet: Process) -> None:
    arrays = drawn(0)
    with qkv.Client(fleet.url) as client:
        wanted = client.attend("softmax", **arrays).output
    clients = [qkv.Client(fleet.url, retries=0) for _ in range(8)]

    def once(index: int) -> str:
        try:
            output = clients[index].attend("softmax", **arrays).output
        except qkv.QkvError as error:
            return type(error).__name__
        return "right" if (output == wanted).all() else "wrong"

    time.sleep(1.1)
    with looping(8, once) as seen:
        for _ in range(2):
            count = len(seen)
            until(lambda count=count: len(seen) > count + 200)  # type: ignore[misc]
            victim = device_process(fleet)
            os.kill(victim, signal.SIGKILL)
            until(lambda victim=victim: victim not in children(fleet.popen.pid))  # type: ignore[misc]
            until(lambda: ask(fleet.url, "/readyz") == 200)
            assert device_process(fleet) != victim
            time.sleep(1.1)
        count = len(seen)
        until(lambda: len(seen) > count + 200)
    for client in clients:
        client.close()
    assert set(seen) == {"right", "NotNow"}
    assert len(children(fleet.popen.pid)) == WORKERS + 1
    assert fleet.end() == 0


def test_it_is_not_ready_while_the_device_process_starts_again(fleet: Process) -> None:
    time.sleep(1.1)
    with httpx.Client(base_url=fleet.url, timeout=PATIENCE) as client:
        assert client.get("/readyz").status_code == 200
        os.kill(device_process(fleet), signal.SIGKILL)
        until(lambda: client.get("/readyz").status_code == 503)
        assert client.get("/livez").status_code == 200
        assert client.post(PATH, content=body(4), headers=SAFETENSORS).status_code == 503
        until(lambda: client.get("/readyz").status_code == 200)
        assert client.post(PATH, content=body(4), headers=SAFETENSORS).status_code == 200


def test_clients_that_retry_see_nothing_of_it(fleet: Process) -> None:
    arrays = drawn(0)
    clients = [qkv.Client(fleet.url, retries=8) for _ in range(4)]
    wanted = clients[0].attend("softmax", **arrays).output

    def once(index: int) -> bool:
        return bool((clients[index].attend("softmax", **arrays).output == wanted).all())

    time.sleep(1.1)
    with looping(4, once) as seen:
        until(lambda: len(seen) > 50)
        victim = device_process(fleet)
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in children(fleet.popen.pid))
        until(lambda: ask(fleet.url, "/readyz") == 200)
        count = len(seen)
        until(lambda: len(seen) > count + 50)
    assert all(seen)
    for client in clients:
        client.close()


def test_a_killed_worker_gives_back_what_it_had(start: Start) -> None:
    """Its region fits one such request; another worker in its place is asked for it again."""
    content = body(32768, 1)  # 6 MiB in, 2 MiB out
    fleet = start(1, QKV_MAX_QUEUE_BYTES=str(8 << 20))
    wanted = httpx.post(fleet.url + PATH, content=body(64), headers=SAFETENSORS).content
    for _ in range(2):
        time.sleep(1.1)
        device = device_process(fleet)
        (worker,) = set(children(fleet.popen.pid)) - {device}
        with httpx.Client(timeout=PATIENCE) as client, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.post, fleet.url + PATH, content=content, headers=SAFETENSORS)
            time.sleep(0.3)
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                asked.result(PATIENCE)
        until(lambda worker=worker: worker not in children(fleet.popen.pid))  # type: ignore[misc]
        until(lambda: ask(fleet.url, "/readyz") == 200)
        assert device_process(fleet) == device
    again = httpx.post(fleet.url + PATH, content=body(64), headers=SAFETENSORS).content
    assert again.partition(b"timing")[0] == wanted.partition(b"timing")[0]
    assert again[-4096:] == wanted[-4096:]
    assert fleet.end() == 0


def test_leavers_are_not_run(fleet: Process) -> None:
    before = statistics(fleet)["inference_count"]
    slow = big(16384, 16)
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=PATIENCE) as client:
        busy = pool.submit(client.post, fleet.url + PATH, content=slow, headers=SAFETENSORS)
        time.sleep(0.5)
        for _ in range(6):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(fleet.url + PATH, content=body(64), headers=SAFETENSORS, timeout=0.05)
        late = {"inputs": [], "parameters": {"timeout": 50_000}}
        for name, array in drawn(0, 8).items():
            late["inputs"].append(  # type: ignore[attr-defined]
                {
                    "name": name, "shape": list(array.shape), "datatype": "FP32",
                    "data": array.ravel().tolist(),
                }
            )  # fmt: skip
        refusal = httpx.post(f"{fleet.url}/v2/models/softmax/infer", json=late)
        assert refusal.status_code == 503
        assert "50 ms" in refusal.text
        assert not busy.done(), "the machine is too fast for this test"
        assert busy.result(PATIENCE).status_code == 200
    assert httpx.post(fleet.url + PATH, content=body(64), headers=SAFETENSORS).status_code == 200
    assert statistics(fleet)["inference_count"] - before == 2


def test_where_memory_is_full_it_is_503_until_it_is_not(start: Start) -> None:
    fleet = start(1, QKV_MAX_QUEUE_BYTES=str(8 << 20), QKV_MAX_BATCH="1")
    device, content = device_process(fleet), body(4096)  # 3 MiB in, 1 MiB out
    os.kill(device, signal.SIGSTOP)
    with ThreadPoolExecutor(6) as pool:
        asked = [
            pool.submit(
                httpx.post, fleet.url + PATH, content=content, headers=SAFETENSORS, timeout=PATIENCE
            )
            for _ in range(6)
        ]
        until(lambda: sum(a.done() for a in asked) == 4)
        assert ask(fleet.url, "/livez") == 200
        os.kill(device, signal.SIGCONT)
        answers = [a.result(PATIENCE) for a in asked]
    assert Counter(a.status_code for a in answers) == {200: 2, 503: 4}
    for answer in answers:
        if answer.status_code == 503:
            assert "bytes of tensors wait already" in refused(answer, 503)["detail"]
            assert int(answer.headers["retry-after"]) > 0
    for _ in range(3):
        answer = httpx.post(fleet.url + PATH, content=content, headers=SAFETENSORS)
        assert answer.status_code == 200


def test_a_thousand_requests_leave_room_for_the_largest(start: Start) -> None:
    """Some leave early; one request that takes nearly all there is comes through after them."""
    fleet = start(1, QKV_MAX_QUEUE_BYTES=str(8 << 20))
    contents = [body(n, 1) for n in (1, 5, 64, 500, 4096)]
    clients = [httpx.Client(timeout=PATIENCE) for _ in range(4)]

    def some(index: int) -> set[int]:
        found = set()
        for i in range(250):
            content = contents[(i + index) % 5]
            try:
                patience = 0.002 if i % 25 == 0 else PATIENCE
                answer = clients[index].post(
                    fleet.url + PATH, content=content, headers=SAFETENSORS, timeout=patience
                )
                found.add(answer.status_code)
            except httpx.TimeoutException:
                pass
        return found

    with ThreadPoolExecutor(4) as pool:
        assert set[int]().union(*pool.map(some, range(4))) == {200}
    for client in clients:
        client.close()
    largest = httpx.post(
        fleet.url + PATH, content=body(32600, 1), headers=SAFETENSORS, timeout=PATIENCE
    )
    assert largest.status_code == 200, largest.text


def test_a_large_request_and_its_memory_goes_back(process: Process, shared: Process) -> None:
    draw = np.random.default_rng(0)
    arrays = {
        "query": draw.normal(size=(1, 1, 1, 64)).astype(np.float32),
        "key": draw.standard_normal((1, 1, 500_000, 64), np.float32),
        "value": draw.standard_normal((1, 1, 500_000, 64), np.float32),
    }
    content = build_attend("softmax", None, ["output"], "none", arrays).content
    assert 240 << 20 < len(content) < 256 << 20
    there, here = (
        httpx.post(p.url + PATH, content=content, headers=SAFETENSORS, timeout=PATIENCE)
        for p in (shared, process)
    )
    assert there.status_code == here.status_code == 200
    assert there.content[-256:] == here.content[-256:]

    def shared_memory() -> int:
        """MiB, of the one that has most."""
        return max(
            int(line.split()[1]) >> 10
            for pid in children(shared.popen.pid)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("RssShmem")
        )

    until(lambda: shared_memory() < 100)


def test_sigterm_under_load_resets_none(fleet: Process) -> None:
    host, port = address(fleet)
    bodies = [body(4), body(256, 8), big(1024)]
    seen = list[int | OSError]()

    def keep_asking(index: int) -> None:
        with socket.create_connection((host, port), PATIENCE) as connection:
            while True:
                asked = Asked(connection, bodies[index % len(bodies)], SAFETENSORS)
                seen.append(asked.error or asked.status * asked.whole)
                if asked.error or asked.closing or not asked.status:
                    return

    with ThreadPoolExecutor(60) as pool:
        loops = [pool.submit(keep_asking, index) for index in range(60)]
        until(lambda: len(seen) > 200)
        fleet.popen.send_signal(signal.SIGTERM)
        for loop in loops:
            loop.result(PATIENCE)
    assert set(seen) <= {200, 503}, Counter(seen)
    assert fleet.wait() == 0
    assert not any("Traceback" in line or "ended after" in line for line in fleet.lines)


def test_sigterm_before_it_is_ready_ends_it_well(command: Start) -> None:
    for patience in (0.0, 0.2):
        started = command("serve", "--port", "0", "--workers", "2", QKV_DEVICE_PROCESS="one")
        until(lambda started=started: len(children(started.popen.pid)) == 3)  # type: ignore[misc]
        time.sleep(patience)
        assert started.end() == 0
        assert not any("Traceback" in line for line in started.lines), started.lines


def test_all_end_when_their_parent_is_gone(fleet: Process) -> None:
    every = children(fleet.popen.pid)
    assert len(every) == WORKERS + 1
    fleet.popen.kill()
    until(lambda: not any(map(alive, every)))


def test_a_stopped_device_process_turns_livez_red(start: Start) -> None:
    fleet = start(QKV_STUCK_S="1")
    device = device_process(fleet)
    os.kill(device, signal.SIGSTOP)
    until(lambda: ask(fleet.url, "/livez") == 503)
    os.kill(device, signal.SIGCONT)
    until(lambda: ask(fleet.url, "/livez") == 200)
    assert fleet.end() == 0
