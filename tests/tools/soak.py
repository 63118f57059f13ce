"""Soak test: two clients send mixed requests to a service for twenty minutes.

The requests have every variant, small and large, in every format. Some are malformed, too large or
cancelled. Every response is compared with the float64 reference. A short report has counts, times
and the growth of memory; the exit status is 1 if a check failed.

    python tests/tools/soak.py [--minutes 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import random
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from bodies import FORMATS
from service import Service, running_service

from tools.soak_requests import LENGTHS, SoakRequest, generate_soak_requests

CLIENTS: Final = 2
MAX_BODY_BYTES: Final = 4 << 20  # QKV_MAX_BODY_BYTES of the service
MAX_RESPONSE_BYTES: Final = 16 << 20  # and its QKV_MAX_RESPONSE_BYTES
MAX_RISE: Final = 0.03
"""Largest rise of flat memory, as a fraction: of the line through samples after the first third."""

_TIMEOUT_S: Final = 120
_SAMPLE_PERIOD_S: Final = 1.0
_MIN_TREND_S: Final = 300  # in a shorter test the service still warms up
_ACTIONS: Final = {"valid": 80, "malformed": 8, "cancelled": 8, "too large": 4}  # per cent
_MAX_SHOWN_FAILURES: Final = 10
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST, as if the client was killed


@dataclass
class SoakResults:
    """Results of the clients.

    Attributes:
        counts: number of requests by action and status, such as "valid 200".
        failures: failed checks.
        latencies_s: times of correct responses, by format.
        memory: samples of seconds since the start, and bytes of the processes without files.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    latencies_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    memory: list[tuple[float, int]] = field(default_factory=list)

    def add(self, other: SoakResults) -> None:
        """Adds the results of another client."""
        self.counts += other.counts
        self.failures += other.failures
        for wire_format, latencies_s in other.latencies_s.items():
            self.latencies_s[wire_format] += latencies_s


class MemoryTrend(NamedTuple):
    """Straight line through the memory after the first third.

    Attributes:
        median_bytes: median of these samples.
        rise: rise of the line from its beginning to its end, as a fraction of `median_bytes`.
        hourly_bytes: rise in an hour.
    """

    median_bytes: float
    rise: float
    hourly_bytes: float


def fit_trend(memory: Sequence[tuple[float, int]]) -> MemoryTrend:
    """Fits a line by least squares to all samples after the first third, in which caches fill."""
    at_s, resident = np.array(memory[len(memory) // 3 :], float).T
    slope = float(np.polyfit(at_s - at_s[0], resident, 1)[0]) if len(at_s) > 1 else 0.0
    median = float(np.median(resident))
    return MemoryTrend(median, slope * float(at_s[-1] - at_s[0]) / median, slope * 3600)


def compute_medians(memory: Sequence[tuple[float, int]]) -> list[float]:
    """Returns the median bytes of the first, second and last third."""
    resident = np.array(memory)[:, 1]
    return [float(np.median(part)) for part in np.array_split(resident, 3)]


class SoakClient:
    """A client that sends mixed requests over one connection until a deadline."""

    def __init__(
        self, address: tuple[str, int], requests: Sequence[SoakRequest], seed: int, deadline: float
    ) -> None:
        self._address, self._requests, self._deadline = address, requests, deadline
        self._random = random.Random(seed)
        self._connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)
        self.results = SoakResults()

    def run(self) -> SoakResults:
        """Sends requests until the deadline; returns the results."""
        actions = {
            "valid": self._send_valid,
            "malformed": self._send_malformed,
            "cancelled": self._cancel,
            "too large": self._send_too_large,
        }
        while time.monotonic() < self._deadline:
            (action,) = self._random.choices(list(_ACTIONS), list(_ACTIONS.values()))
            try:
                actions[action](self._random.choice(self._requests))
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                self._count(action, type(error).__name__, f"{action}: {error!r}")
        self._connection.close()
        return self.results

    def _send_valid(self, request: SoakRequest) -> None:
        """Sends a request and checks its response."""
        start = time.perf_counter()
        status, headers, body = self._post(request.path, request.headers, request.body)
        latency_s = time.perf_counter() - start
        if status == 200:
            failure = request.find_error(body, headers)
        else:
            failure = f"{request.name}: {body!r:.300}"
        self._count("valid", str(status), failure)
        if failure is None:
            self.results.latencies_s[request.wire_format].append(latency_s)

    def _send_malformed(self, request: SoakRequest) -> None:
        """Sends a body with changed, missing or additional bytes; it may still be valid."""
        body = bytearray(request.body)
        for _ in range(self._random.randint(1, 3)):
            at = self._random.randrange(min(len(body), 2000))  # the part with more than numbers
            match self._random.randrange(3):
                case 0:
                    body[at] ^= 1 << self._random.randrange(8)
                case 1:
                    del body[at : at + self._random.randint(1, 9)]
                case 2:
                    body[at:at] = self._random.randbytes(self._random.randint(1, 9))
        status, headers, response = self._post(request.path, request.headers, bytes(body))
        is_correct = status == 200 or (400 <= status < 500 and _is_problem(headers, response))
        failure = None if is_correct else f"malformed: {status} {response!r:.300}"
        self._count("malformed", str(status), failure)

    def _cancel(self, request: SoakRequest) -> None:
        """Disconnects in the middle of the body, or after the body without reading the response."""
        head = f"POST {request.path} HTTP/1.1\r\nHost: localhost\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in request.headers.items()
        )
        data = f"{head}Content-Length: {len(request.body)}\r\n\r\n".encode() + request.body
        size = len(data) if self._random.random() < 0.5 else self._random.randrange(len(data))
        with socket.create_connection(self._address, _TIMEOUT_S) as connection:
            if self._random.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.sendall(data[:size])
        self._count("cancelled", "by client", None)

    def _send_too_large(self, request: SoakRequest) -> None:
        """Exceeds the limit of a body, compressed or not, or of a response."""
        path, headers = request.path, dict(request.headers)
        match self._random.randrange(3):
            case 0:
                body = request.body.ljust(MAX_BODY_BYTES + 1)
            case 1:
                body = gzip.compress(bytes(4 * MAX_BODY_BYTES), 1)
                headers["Content-Encoding"] = "gzip"
            case _:  # the weights exceed the limit of a response
                inputs = {"value": [[0.0]] * 2049, "query": [[0.0]] * 2049, "key": [[0.0]] * 2049}
                path, headers = "/v1/attention/softmax", {"Content-Type": "application/json"}
                body = json.dumps({"inputs": inputs}).encode()
        try:
            status, response_headers, response = self._post(path, headers, body)
        except (BrokenPipeError, ConnectionResetError):  # rejected before its end
            self._connection.close()
            self._count("too large", "reset", None)
            return
        is_correct = status == 413 and _is_problem(response_headers, response)
        self._count("too large", str(status), None if is_correct else f"too large: {status}")

    def _post(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        self._connection.request("POST", path, body, dict(headers))
        response = self._connection.getresponse()
        lower_case = {name.lower(): value for name, value in response.getheaders()}
        return response.status, lower_case, response.read()

    def _count(self, action: str, status: str, failure: str | None) -> None:
        self.results.counts[f"{action} {status}"] += 1
        if failure is not None:
            self.results.failures.append(failure)


def _is_problem(headers: Mapping[str, str], body: bytes) -> bool:
    """True if an error response has a description, in the format of either protocol."""
    problem = json.loads(body)
    has_detail = problem.get("detail") and "problem" in headers["content-type"]
    return bool(problem.get("error") or has_detail)


def count_internal_errors(address: tuple[str, int]) -> int:
    """Returns the number of internal errors in /metrics, those of cancelled requests included."""
    connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    values = re.findall(r'requests_total\{[^}]*outcome="internal"[^}]*\} (\S+)', text)
    assert values, "/metrics has no series of internal errors"
    return int(sum(map(float, values)))


def run_soak(
    service: Service, requests: Sequence[SoakRequest], duration_s: float, seed: int = 0
) -> SoakResults:
    """Runs the clients for some seconds; returns their results and the memory."""
    start, results = time.monotonic(), SoakResults()
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(_SAMPLE_PERIOD_S):
            results.memory.append((time.monotonic() - start, service.own_bytes))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [
                SoakClient(service.address, requests, seed * CLIENTS + number, start + duration_s)
                for number in range(CLIENTS)
            ]
            for future in [pool.submit(client.run) for client in clients]:
                results.add(future.result())
        if count := count_internal_errors(service.address):
            results.failures.append(f"/metrics counts {count} internal errors")
    finally:
        stop.set()
        sampler.join()
    return results


def format_report(results: SoakResults, duration_s: float, workers: int) -> tuple[str, bool]:
    """Returns the report, and True if all checks passed."""
    lines = [f"{duration_s / 60:.1f} minutes, {CLIENTS} clients, {workers} workers"]
    lines.append(", ".join(f"{name}: {count:,}" for name, count in sorted(results.counts.items())))
    all_latencies_s = [s for latencies_s in results.latencies_s.values() for s in latencies_s]
    by_format = {name: results.latencies_s.get(name, []) for name in FORMATS}
    for name, latencies_s in {"all": all_latencies_s, **by_format}.items():
        if latencies_s:
            p50, p99 = np.percentile(latencies_s, [50, 99]) * 1e3
            lines.append(
                f"{name}: {len(latencies_s):,} correct responses, p50 {p50:.2f} ms, "
                f"p99 {p99:.2f} ms"
            )
    is_passed = bool(all_latencies_s) and not results.failures
    lines.append(f"failed checks: {len(results.failures):,}")
    lines += [f"  {failure}" for failure in results.failures[:_MAX_SHOWN_FAILURES]]
    if len(results.memory) > 3:
        trend = fit_trend(results.memory)
        is_flat = trend.rise <= MAX_RISE
        if duration_s >= _MIN_TREND_S:
            verdict = "flat" if is_flat else "NOT FLAT"
            is_passed &= is_flat
        else:
            verdict = "not checked, the test was too short"
        medians = [f"{median / 2**20:.0f}" for median in compute_medians(results.memory)]
        lines.append(
            f"memory (PSS of all processes without files): {', '.join(medians)} MiB (medians of "
            f"thirds), a rise of {trend.rise:+.2%} after the first third, "
            f"{trend.hourly_bytes / 2**20:+.1f} MiB an hour: {verdict} (flat is at most "
            f"{MAX_RISE:.0%})"
        )
    return "\n".join(lines), is_passed


def main() -> None:
    """Starts a service, runs the soak test and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    requests = list(generate_soak_requests(LENGTHS, arguments.seed))
    limits = {
        "QKV_MAX_BODY_BYTES": str(MAX_BODY_BYTES),
        "QKV_MAX_RESPONSE_BYTES": str(MAX_RESPONSE_BYTES),
    }
    duration_s = arguments.minutes * 60
    with running_service(**limits) as service:
        results = run_soak(service, requests, duration_s, arguments.seed)
        text, is_passed = format_report(results, duration_s, service.workers)
        print(text)
        if not is_passed:
            print("\n".join(service.stderr_lines))
    sys.exit(0 if is_passed else 1)


if __name__ == "__main__":
    main()
