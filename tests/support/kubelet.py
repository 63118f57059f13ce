"""A kubelet and a controller of endpoints for real `qkv serve` processes.

They take every value from the manifests. Periods of probes and the sleep before SIGTERM are divided
by `FACTOR`. Times that a process needs are not: to start, to respond to a probe, and to stop.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx

from support.kustomization import DEPLOY, build
from support.ports import free_port
from support.processes import Process

FACTOR: Final = 5
"""Periods and the sleep are divided by this number."""


class Endpoints:
    """The pods that are ready and do not terminate, with the history of changes.

    A proxy or a client sees each change after a delay.
    """

    def __init__(self) -> None:
        self._history: list[tuple[float, tuple[Pod, ...]]] = [(float("-inf"), ())]
        self._lock = threading.Lock()

    def seen(self, delay_s: float) -> tuple[Pod, ...]:
        """Returns the pods as they were before a delay."""
        then = time.monotonic() - delay_s
        return next(pods for at, pods in reversed(self._history) if at <= then)

    def update(self, pod: Pod) -> None:
        """Adds a pod, or removes it."""
        with self._lock:
            others = tuple(other for other in self._history[-1][1] if other is not pod)
            now = (*others, pod) if pod.is_ready and not pod.is_terminating else others
            if set(now) != set(self._history[-1][1]):
                self._history.append((time.monotonic(), now))


class Pod:
    """A process of `qkv serve`, and the kubelet that probes and stops it.

    Args:
        endpoints: what it enters when it is ready, and leaves when it terminates.
        spec: specification of the pod in the manifest.
        environment: settings in addition to those of the manifest.

    Attributes:
        port: its port on 127.0.0.1.
        is_ready: True if its readiness probe passes.
        is_terminating: True once it is deleted: at once it is no endpoint.
        faults: what the kubelet would report.
    """

    def __init__(self, endpoints: Endpoints, spec: dict[str, Any], **environment: str) -> None:
        self._endpoints, self._spec = endpoints, spec
        (self._container,) = spec["containers"]
        variables = {v["name"]: v["value"] for v in self._container["env"] if "value" in v}
        self.port = free_port()
        # each pod has an address of its own; here they share one
        variables |= {"QKV_METRICS_PORT": str(free_port()), **environment}
        self.process = Process(("serve", "--port", str(self.port)), variables)
        self.is_ready = self.is_terminating = False
        self._stopping = threading.Event()
        self.faults: list[str] = []
        self._probes = threading.Thread(target=self._run_probes)
        self._probes.start()

    @property
    def is_stopping(self) -> bool:
        """True once SIGTERM is sent: a sleep after the pod was deleted."""
        return self._stopping.is_set()

    def delete(self) -> None:
        """Deletes the pod as the kubelet does: the hook, SIGTERM, and SIGKILL if it must."""
        sleep_s = self._container["lifecycle"]["preStop"]["sleep"]["seconds"]
        self.is_terminating = True
        self._endpoints.update(self)
        time.sleep(sleep_s / FACTOR)
        self._stopping.set()
        self.process.popen.send_signal(signal.SIGTERM)
        try:
            self.process.popen.wait(self._spec["terminationGracePeriodSeconds"] - sleep_s)
        except subprocess.TimeoutExpired:
            self.faults.append("SIGKILL after the grace period")
        self.kill()
        if status := self.process.popen.returncode:
            self.faults.append(f"exit status {status}")
        self.faults += self.process.lines[2:]  # after the two lines of the start

    def kill(self) -> None:
        """Ends the process, if it still runs, and the probes."""
        self.process.popen.kill()
        self.process.wait()
        self._probes.join()

    def _run_probes(self) -> None:
        """Runs the startup probe until it passes, then the others until the process ends."""
        if not self._passes("startupProbe"):
            self.faults.append("the startup probe failed")
            return
        liveness = threading.Thread(target=self._repeat, args=("livenessProbe",))
        liveness.start()
        self._repeat("readinessProbe")
        liveness.join()

    def _passes(self, name: str) -> bool:
        """Returns True once a probe passes; False if it fails too often or the process ends."""
        probe = self._container[name]
        deadline = time.monotonic() + probe["failureThreshold"] * probe["periodSeconds"]
        while not self._request(name):
            if time.monotonic() > deadline or self.process.popen.poll() is not None:
                return False
            time.sleep(probe["periodSeconds"] / FACTOR)
        return True

    def _repeat(self, name: str) -> None:
        """Repeats a probe until SIGTERM or the end of the process, and acts on its results."""
        probe, failed_count = self._container[name], 0
        while not self._stopping.is_set() and self.process.popen.poll() is None:
            failed_count = 0 if self._request(name) else failed_count + 1
            if self._stopping.is_set():
                return
            if name == "readinessProbe" and failed_count in (0, probe["failureThreshold"]):
                self.is_ready = failed_count == 0
                self._endpoints.update(self)
            if name == "livenessProbe" and failed_count == probe["failureThreshold"]:
                self.faults.append("the liveness probe failed")
            self._stopping.wait(probe["periodSeconds"] / FACTOR)

    def _request(self, name: str) -> bool:
        """Sends a probe on a new connection; returns True if it passes."""
        probe = self._container[name]
        url = f"http://127.0.0.1:{self.port}{probe['httpGet']['path']}"
        try:
            return 200 <= httpx.get(url, timeout=probe["timeoutSeconds"]).status_code < 400
        except httpx.TransportError:
            return False


class Cluster:
    """Pods of the Deployment of an overlay, and their endpoints.

    Args:
        overlay: its folder in deploy/.
        environment: settings in addition to those of the manifest.

    Attributes:
        endpoints: the pods that clients may use.
        pods: all pods that were ever started.
    """

    def __init__(self, overlay: str, **environment: str) -> None:
        (deployment,) = (r for r in build(DEPLOY / overlay) if r["kind"] == "Deployment")
        self._spec, self._environment = deployment["spec"]["template"]["spec"], environment
        self.endpoints = Endpoints()
        self.pods: list[Pod] = []

    @property
    def longest_delay_s(self) -> float:
        """Seconds until every proxy has seen a change: half the sleep before SIGTERM."""
        (container,) = self._spec["containers"]
        seconds: float = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        return seconds / FACTOR / 2

    @property
    def faults(self) -> list[str]:
        """The faults of all pods."""
        return [fault for pod in self.pods for fault in pod.faults]

    def start(self, count: int) -> None:
        """Starts pods, and waits until every client sees them.

        Raises:
            AssertionError: a startup probe fails.
        """
        new = [Pod(self.endpoints, self._spec, **self._environment) for _ in range(count)]
        self.pods += new
        while not set(new) <= set(self.endpoints.seen(self.longest_delay_s)):
            assert self.faults == []
            time.sleep(0.05)

    def replace(self, draw: random.Random) -> None:
        """Starts as many pods as there are, and then deletes the old ones at random times."""
        old = self.endpoints.seen(0)
        self.start(len(old))
        with ThreadPoolExecutor(len(old)) as pool:
            deleted = []
            for pod in old:
                deleted.append(pool.submit(pod.delete))
                time.sleep(draw.random() / 2)
            for each in deleted:
                each.result()


@contextlib.contextmanager
def running_cluster(overlay: str, **environment: str) -> Iterator[Cluster]:
    """Returns a cluster, and ends its processes afterwards."""
    cluster = Cluster(overlay, **environment)
    try:
        yield cluster
    finally:
        for pod in cluster.pods:
            pod.kill()
