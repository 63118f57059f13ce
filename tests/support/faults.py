"""The faults of a service of several processes: what breaks, and what clients and operators see."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import httpx

from support import failing_device
from support.faulty_processes import TOPOLOGIES, Service
from support.known_requests import assert_problem
from support.processes import TIMEOUT_S, wait_until
from support.service_processes import PATH, TINY_BODY, address
from support.small_requests import body, post


@dataclass(frozen=True)
class Fault:
    """A row of the table: one fault in some topologies, from which the service recovers.

    Clients that try again always get right outputs, and nobody ever gets wrong ones.

    Attributes:
        name: of the fault.
        topologies: those in which the rest of the row holds.
        make: breaks the service; returns once the fault is over, or is the supervisor's.
        must_see: what clients without a second attempt and probes see.
        may_see: what they see too, if they look at that moment.
        log: patterns of the new lines of the log, in their order. The last one may come more
            often, with a restart each, if `fails_again`.
        restarts: of device processes, by the metric.
        fails_again: a start may begin before the fault is over, on a machine with other work.
        stuck_s: seconds after which a process counts as stuck. Where the fault is none of that
            kind they are many, because a process that starts is silent for a while.
    """

    name: str
    topologies: tuple[str, ...]
    make: Callable[[Service], None]
    must_see: frozenset[str] = frozenset()
    may_see: frozenset[str] = frozenset()
    log: tuple[str, ...] = ()
    restarts: int = 0
    fails_again: bool = False
    stuck_s: int = 60


def stop_until_stuck(service: Service, pids: list[int]) -> None:
    """Stops processes until the service counts one as stuck, and a while longer: the supervisor
    ends none."""

    def wait() -> None:
        service.wait_until_seen("livez 503")
        time.sleep(1.5)

    service.pause(pids, wait)


def stop_only_worker(service: Service) -> None:
    """Stops the only worker; the supervisor refuses new connections meanwhile, with any body."""

    def wait() -> None:
        service.wait_until_seen("livez 503")
        for method, path, content in (
            ("GET", "/livez", b""), ("GET", "/readyz", b""), ("POST", PATH, TINY_BODY),
            ("POST", PATH, bytes(1 << 24)),
        ):  # fmt: skip
            url = service.process.url + path
            response = httpx.request(method, url, content=content, timeout=TIMEOUT_S)
            assert_problem(response, 503)
            assert int(response.headers["retry-after"]) > 0
        time.sleep(1.5)

    service.pause(service.workers, wait)


def stop_all(service: Service) -> None:
    """Stops all processes for longer than every limit, as a machine that sleeps does.

    A request of which a part has arrived is served afterwards.
    """
    with socket.create_connection(address(service.process), TIMEOUT_S) as upload:
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(TINY_BODY)}\r\n\r\n"
        )
        upload.sendall(head.encode() + TINY_BODY[:9])
        every = [service.process.popen.pid, *service.pids]
        service.pause(every, lambda: time.sleep(_STUCK_S + 0.3))
        upload.sendall(TINY_BODY[9:])
        assert upload.recv(4096).startswith(b"HTTP/1.1 200 ")


def fail_requests(service: Service) -> None:
    """Sends requests that fail, and others for which memory runs out unless they are alone."""
    numbers = (failing_device.POISON, failing_device.GREEDY) * 8

    def status(number: float) -> int:
        return post(service.process.url, body(number, rows=8)).status_code

    with ThreadPoolExecutor(len(numbers)) as pool:
        assert list(pool.map(status, numbers)) == [500, 200] * 8


def break_starts(service: Service) -> None:
    """Ends a device process and lets its next two starts fail."""
    lines = service.process.lines
    count = len(lines)
    service.broken.touch()
    try:
        service.end_one(service.devices)
        wait_until(lambda: sum("restarting" in line for line in lines[count:]) >= 3)
        up = service.metric("up")
        assert sum(up) == len(up) - 1
    finally:
        service.broken.unlink()


_STUCK_S: Final = 2
_ALL: Final = tuple(TOPOLOGIES)
_ONE, _TWO, _DEVICE, _DEVICES = ((name,) for name in TOPOLOGIES)
_NUMBERED: Final = r"device process \d \(cpu\)"
_KILLED: Final = r"exited by SIGKILL, perhaps out of memory, after \d+\.\d s; restarting it"
_FAILED: Final = r"exited with status 1 after \d+\.\d s; restarting it"
_CUT: Final = frozenset({"client disconnected", "readyz disconnected", "livez disconnected"})
_HELD: Final = frozenset({"readyz disconnected", "livez disconnected"})  # too late for a probe
_UNREADY: Final = frozenset({"readyz 503"})
_REFUSED: Final = frozenset({"client 503"})
_STUCK: Final = frozenset({"livez 503"})

FAULTS: Final = (
    Fault("some requests fail", _ONE + _DEVICE, fail_requests),
    Fault(
        "the only worker is killed", _ONE,
        lambda s: s.end_one(s.workers),
        may_see=_CUT | _UNREADY,
        log=(rf"worker \d {_KILLED}",),
    ),
    Fault(
        "one of two workers is killed", _TWO + _DEVICE + _DEVICES,
        lambda s: s.end_one(s.workers),
        must_see=_UNREADY,
        may_see=_CUT,
        log=(rf"worker \d {_KILLED}",),
    ),
    Fault(
        "the only worker is stopped", _ONE,
        stop_only_worker,
        must_see=_STUCK,
        may_see=_UNREADY | _REFUSED | _HELD,  # each may have a request in the worker
        stuck_s=_STUCK_S,
    ),
    Fault(
        "one of two workers is stopped", _TWO + _DEVICE + _DEVICES,
        lambda s: stop_until_stuck(s, s.workers[:1]),
        must_see=_STUCK,
        may_see=_HELD,
        stuck_s=_STUCK_S,
    ),
    Fault(
        "the only device process is killed", _DEVICE,
        lambda s: s.end_one(s.devices),
        must_see=_UNREADY,
        may_see=_REFUSED,
        log=(rf"the device process {_KILLED}",),
        restarts=1,
    ),
    Fault(
        "one of two device processes is killed", _DEVICES,
        lambda s: s.end_one(s.devices),
        log=(rf"{_NUMBERED} {_KILLED}",),
        restarts=1,
    ),
    Fault(
        "a device process is stopped", _DEVICE + _DEVICES,
        lambda s: stop_until_stuck(s, s.devices[:1]),
        must_see=_STUCK,
        stuck_s=_STUCK_S,
    ),
    Fault("all processes are stopped", _ALL, stop_all, may_see=_STUCK, stuck_s=_STUCK_S),
    Fault(
        "the device of a worker fails", _ONE + _TWO,
        Service.break_device,
        may_see=_CUT | _UNREADY | _REFUSED,
        log=(rf"worker \d {_FAILED}",),
    ),
    Fault(
        "the only device fails", _DEVICE,
        Service.break_device,
        must_see=_UNREADY,
        may_see=_REFUSED,
        log=(rf"the device process {_FAILED}",),
        restarts=1,
    ),
    Fault(
        "one request makes both devices fail", _DEVICES,
        Service.break_device,
        may_see=_UNREADY | _REFUSED,
        log=(rf"{_NUMBERED} {_FAILED}",) * 2,
        restarts=2,
    ),
    Fault(
        "the only device process fails at each start", _DEVICE,
        break_starts,
        must_see=_UNREADY | _REFUSED,
        log=(rf"the device process {_KILLED}", *(rf"the device process {_FAILED}",) * 2),
        restarts=3,
        fails_again=True,
    ),
    Fault(
        "one of two device processes fails at each start", _DEVICES,
        break_starts,
        log=(rf"{_NUMBERED} {_KILLED}", *(rf"{_NUMBERED} {_FAILED}",) * 2),
        restarts=3,
        fails_again=True,
    ),
)  # fmt: skip
