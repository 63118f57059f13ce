"""A service of several processes that break, and clients and probes that watch it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import httpx
import numpy as np

import qkv
from support.failing_device import STICKY
from support.paths import ROOT
from support.processes import TIMEOUT_S, Process, wait_until
from support.service_processes import (
    PATH,
    SAFETENSORS,
    child_pids,
    device_process_pids,
    repeat_in_threads,
    status_of,
)
from support.small_requests import body, outputs

CLIENTS: Final = 4
"""Clients that send a request once; as many others try again until it succeeds."""
MAX_DELAY_S: Final = 0.2
"""Seconds after which the others try again, where the service asks for 5: they send more during a
fault, and a test need not wait for their last delay."""


@dataclass(frozen=True)
class Topology:
    """The processes of a service.

    Attributes:
        words: arguments of `qkv serve`.
        variables: its environment.
        count: number of its processes, without the supervisor.
    """

    words: tuple[str, ...]
    count: int
    variables: dict[str, str] = field(default_factory=dict)


TOPOLOGIES: Final = {
    "one worker": Topology(("--workers", "1"), 1),
    "two workers": Topology(("--workers", "2"), 2, {"QKV_DEVICE_PROCESS": "each"}),
    "device process": Topology(
        ("--workers", "2"), 3, {"QKV_DEVICE_PROCESS": "one", "DEVICE": "pretended"}
    ),
    "two devices": Topology(("--workers", "2", "--devices", "cpu,cpu"), 4),
}


class Service:
    """A service that runs `support.faulty_service`.

    Args:
        command: the fixture that starts commands.
        topology: its processes.
        broken: a file; a device that starts while it exists fails.
        stuck_s: seconds after which a process counts as stuck.
        port: its port; "0": any.

    Attributes:
        seen: what clients and probes see, while they watch.
    """

    def __init__(
        self,
        command: Callable[..., Process],
        topology: Topology,
        broken: Path,
        stuck_s: int,
        port: str = "0",
    ) -> None:
        paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            "PYTHONPATH": os.pathsep.join(paths), "BROKEN": str(broken),
            "QKV_STUCK_S": str(stuck_s), "QKV_STUCK_DEVICE_S": str(stuck_s),
            "QKV_READ_TIMEOUT_S": str(stuck_s), "QKV_DRAIN_S": "3600",
        }  # fmt: skip
        self.topology, self.broken = topology, broken
        self.seen: list[str] = []
        self.process = command(
            *("serve", "--port", port, *topology.words),
            **{"module": "support.faulty_service"} | variables | topology.variables,
        )

    @property
    def pids(self) -> list[int]:
        """The processes, without the supervisor."""
        return child_pids(self.process.popen.pid)

    @property
    def is_forked(self) -> bool:
        """True once the supervisor handles signals and has started its processes.

        Before, it runs others: an import another program, and a search for devices a fork.
        """
        supervisor = Path(f"/proc/{self.process.popen.pid}")
        status = (supervisor / "status").read_text()
        handled = int(status.partition("SigCgt:")[2].split()[0], 16)
        if not handled >> (signal.SIGTERM - 1) & 1:
            return False
        try:
            names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.pids]
        except (FileNotFoundError, ProcessLookupError):  # one of those ended at this moment
            return False
        return names == [(supervisor / "cmdline").read_bytes()] * self.topology.count

    @property
    def devices(self) -> list[int]:
        """The processes that have a device alone."""
        return device_process_pids(self.process)

    @property
    def workers(self) -> list[int]:
        """The processes that serve."""
        devices = self.devices
        return [pid for pid in self.pids if pid not in devices]

    def status_of(self, path: str) -> int:
        """Returns the status of a GET on a new connection; 0 without a response."""
        return status_of(self.process.url, path)

    @property
    def is_whole(self) -> bool:
        """True if all processes run, and the probes are good."""
        return (
            len(self.pids) == self.topology.count
            and self.status_of("/readyz") == self.status_of("/livez") == 200
        )

    def end_one(self, pids: list[int]) -> None:
        """Kills a process and waits until it is gone."""
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: pids[0] not in self.pids)

    def wait_until_seen(self, what: str) -> None:
        """Waits until a client or a probe sees something."""
        start = len(self.seen)
        wait_until(lambda: what in self.seen[start:])

    def pause(self, pids: list[int], wait: Callable[[], None]) -> None:
        """Stops processes while a function waits, and continues those that still exist."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            wait()
        finally:
            for pid in pids:
                if pid == self.process.popen.pid or pid in self.pids:
                    os.kill(pid, signal.SIGCONT)

    def break_device(self) -> None:
        """Sends a request after which its device can run nothing more."""
        before = self.pids
        httpx.post(
            self.process.url + PATH, content=body(STICKY), headers=SAFETENSORS, timeout=TIMEOUT_S
        )
        wait_until(lambda: bool(set(before) - set(self.pids)))

    def metric(self, name: str) -> list[float]:
        """Returns the values of a metric of the device processes."""
        text = httpx.get(self.process.url + "/metrics", timeout=TIMEOUT_S).text
        # prometheus_client takes 20 ms for all metrics, and tests ask until a number grows
        found = re.findall(rf"^qkv_device_process_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return list(map(float, found))


@contextmanager
def watch(service: Service) -> Iterator[list[str]]:
    """Sends requests and probes all the time; yields what they see, such as "client right".

    Half of the clients keep their connections, the others open one for each request.
    """
    url = service.process.url
    bodies = [body(1.0, rows=8 << seed, seed=seed) for seed in range(CLIENTS)]
    with ExitStack() as stack:
        kept = [None if index % 2 else 0 for index in range(CLIENTS)]  # connections; None: no limit
        clients = [
            stack.enter_context(
                httpx.Client(timeout=TIMEOUT_S, limits=httpx.Limits(max_keepalive_connections=n))
            )
            for n in kept
        ]
        expected = [send(clients[0], url, content) for content in bodies]
        patient = stack.enter_context(qkv.Client(url, retries=1000))
        sooner = SimpleNamespace(sleep=lambda delay_s: time.sleep(min(delay_s, MAX_DELAY_S)))
        stack.enter_context(mock.patch("qkv.client.client.time", sooner))
        arrays = random_arrays()
        wanted = patient.attend("softmax", **arrays).output

        def once(index: int) -> str:
            # the machine has other work; a process needs 0.3 s to start, in which probes look often
            time.sleep(0.02 if index >= 2 * CLIENTS else 0.06)
            if index >= 2 * CLIENTS:
                path = ("readyz", "livez")[index - 2 * CLIENTS]
                return f"{path} {service.status_of('/' + path) or 'disconnected'}"
            if index >= CLIENTS:
                is_right = (patient.attend("softmax", **arrays).output == wanted).all()
                return f"patient client {'right' if is_right else 'wrong'}"
            try:
                found = send(clients[index], url, bodies[index])
            except httpx.TransportError:
                return "client disconnected"
            if isinstance(found, int):
                return f"client {found}"
            return "client right" if found == expected[index] else "client wrong"

        with repeat_in_threads(2 * CLIENTS + 2, once) as service.seen:
            yield service.seen


def send(http: httpx.Client, url: str, content: bytes) -> bytes | int:
    """Returns the bytes of the output, or the status of an error."""
    response = http.post(url + PATH, content=content, headers=SAFETENSORS, timeout=TIMEOUT_S)
    return outputs(response) if response.status_code == 200 else int(response.status_code)


def random_arrays() -> dict[str, Any]:
    """Returns tensors of a request of some size."""
    draw = np.random.default_rng(0)
    return {
        name: draw.normal(size=(1, 4, 256, 16)).astype(np.float32)
        for name in ("query", "key", "value")
    }
