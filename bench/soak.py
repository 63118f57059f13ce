"""Soak test: two clients send mixed requests to a service for twenty minutes.

The requests have every variant, small and large, in every format. Some are malformed, too large or
cancelled. Every response is compared with the float64 reference. A short report has counts, times
and the growth of memory; the exit status is 1 if a check failed.

    python bench/soak.py [--minutes 20] [--seed 0]
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
from questions import LENGTHS, Question, questions
from service import Service, serving

CALLERS: Final = 2
LIMIT: Final = 4 << 20  # QKV_MAX_BODY_BYTES of the service
ANSWER: Final = 16 << 20  # and its QKV_MAX_ANSWER_BYTES
RISE: Final = 0.03
"""Largest rise of flat memory, as a fraction: of the line through samples after the first third."""

_PATIENCE_S: Final = 120
_SAMPLE_S: Final = 1.0
_JUDGED_S: Final = 300  # in a shorter test the service still warms up
_DEEDS: Final = {"ask": 80, "spoil": 8, "leave": 8, "too large": 4}
_SHOWN: Final = 10
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST, as if the client was killed


@dataclass
class Seen:
    """Results of the clients.

    Attributes:
        counts: number of each action and its status, such as "ask 200".
        faults: failed checks.
        seconds: times of correct responses, by format.
        memory: samples of seconds since the start, and resident bytes.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    memory: list[tuple[float, int]] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        """Adds the results of another client."""
        self.counts += other.counts
        self.faults += other.faults
        for form, seconds in other.seconds.items():
            self.seconds[form] += seconds


class Slope(NamedTuple):
    """Straight line through the memory after the first third.

    Attributes:
        held: median of these samples, in bytes.
        rise: rise of the line from its beginning to its end, as a fraction of `held`.
        hourly: rise in an hour, in bytes.
    """

    held: float
    rise: float
    hourly: float


def slope(memory: Sequence[tuple[float, int]]) -> Slope:
    """Fits a line by least squares to all samples after the first third, in which caches fill."""
    at, held = np.array(memory[len(memory) // 3 :], float).T
    steepness = float(np.polyfit(at - at[0], held, 1)[0]) if len(at) > 1 else 0.0
    median = float(np.median(held))
    return Slope(median, steepness * float(at[-1] - at[0]) / median, steepness * 3600)


def medians(memory: Sequence[tuple[float, int]]) -> list[float]:
    """Returns the median bytes of the first, second and last third."""
    held = np.array(memory)[:, 1]
    return [float(np.median(part)) for part in np.array_split(held, 3)]


class Caller:
    """A client that sends mixed requests over one connection until a time."""

    def __init__(
        self, address: tuple[str, int], asked: Sequence[Question], seed: int, until: float
    ) -> None:
        self._address, self._asked, self._until = address, asked, until
        self._draw = random.Random(seed)
        self._connection = http.client.HTTPConnection(*address, timeout=_PATIENCE_S)
        self.seen = Seen()

    def run(self) -> Seen:
        """Sends requests until the end of its time; returns the results."""
        deeds = {
            "ask": self._ask, "spoil": self._spoil, "leave": self._leave, "too large": self._exceed,
        }  # fmt: skip
        while time.monotonic() < self._until:
            (deed,) = self._draw.choices(list(_DEEDS), list(_DEEDS.values()))
            try:
                deeds[deed](self._draw.choice(self._asked))
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                self._count(deed, type(error).__name__, f"{deed}: {error!r}")
        self._connection.close()
        return self.seen

    def _ask(self, question: Question) -> None:
        begun = time.perf_counter()
        status, headers, body = self._post(question.path, question.headers, question.body)
        seconds = time.perf_counter() - begun
        fault = (
            question.fault(body, headers) if status == 200 else f"{question.name}: {body!r:.300}"
        )
        self._count("ask", str(status), fault)
        if fault is None:
            self.seen.seconds[question.form].append(seconds)

    def _spoil(self, question: Question) -> None:
        """Sends a body with changed, missing or additional bytes; it may still be valid."""
        body = bytearray(question.body)
        for _ in range(self._draw.randint(1, 3)):
            at = self._draw.randrange(min(len(body), 2000))  # the part with more than numbers
            match self._draw.randrange(3):
                case 0:
                    body[at] ^= 1 << self._draw.randrange(8)
                case 1:
                    del body[at : at + self._draw.randint(1, 9)]
                case 2:
                    body[at:at] = self._draw.randbytes(self._draw.randint(1, 9))
        status, headers, answer = self._post(question.path, question.headers, bytes(body))
        good = status == 200 or (400 <= status < 500 and _is_problem(headers, answer))
        self._count("spoil", str(status), None if good else f"malformed: {status} {answer!r:.300}")

    def _leave(self, question: Question) -> None:
        """Disconnects in the middle of the body, or after the body without reading the response."""
        head = f"POST {question.path} HTTP/1.1\r\nHost: here\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in question.headers.items()
        )
        whole = f"{head}Content-Length: {len(question.body)}\r\n\r\n".encode() + question.body
        most = len(whole) if self._draw.random() < 0.5 else self._draw.randrange(len(whole))
        with socket.create_connection(self._address, _PATIENCE_S) as leaving:
            if self._draw.random() < 0.5:
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            leaving.sendall(whole[:most])
        self._count("leave", "left", None)

    def _exceed(self, question: Question) -> None:
        """Exceeds the limit of a body, compressed or not, or of a response."""
        path, headers = question.path, dict(question.headers)
        match self._draw.randrange(3):
            case 0:
                body = question.body.ljust(LIMIT + 1)
            case 1:
                body = gzip.compress(bytes(4 * LIMIT), 1)
                headers["Content-Encoding"] = "gzip"
            case _:  # the weights exceed the limit of a response
                long = {"value": [[0.0]] * 2049, "query": [[0.0]] * 2049, "key": [[0.0]] * 2049}
                path, headers = "/v1/attention/softmax", {"Content-Type": "application/json"}
                body = json.dumps({"inputs": long}).encode()
        try:
            status, came, answer = self._post(path, headers, body)
        except (
            BrokenPipeError,
            ConnectionResetError,
        ):  # rejected before its end
            self._connection.close()
            self._count("too large", "cut short", None)
            return
        good = status == 413 and _is_problem(came, answer)
        self._count("too large", str(status), None if good else f"too large: {status}")

    def _post(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        self._connection.request("POST", path, body, dict(headers))
        answer = self._connection.getresponse()
        named = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, named, answer.read()

    def _count(self, deed: str, what: str, fault: str | None) -> None:
        self.seen.counts[f"{deed} {what}"] += 1
        if fault is not None:
            self.seen.faults.append(fault)


def _is_problem(headers: Mapping[str, str], body: bytes) -> bool:
    """True if an error response has a description, in the format of either protocol."""
    said = json.loads(body)
    return bool(said.get("error") or (said.get("detail") and "problem" in headers["content-type"]))


def internal(address: tuple[str, int]) -> int:
    """Returns the number of internal errors in /metrics, those of cancelled requests included."""
    connection = http.client.HTTPConnection(*address, timeout=_PATIENCE_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(r'requests_total\{[^}]*outcome="internal"[^}]*\} (\S+)', text)
    assert found, "/metrics has no series of internal errors"
    return int(sum(map(float, found)))


def soak(service: Service, asked: Sequence[Question], seconds: float, seed: int = 0) -> Seen:
    """Runs the clients for some seconds; returns their results and the memory."""
    begun, seen = time.monotonic(), Seen()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_SAMPLE_S):
            seen.memory.append((time.monotonic() - begun, service.resident))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with ThreadPoolExecutor(CALLERS) as pool:
            callers = [
                Caller(service.address, asked, seed * CALLERS + number, begun + seconds)
                for number in range(CALLERS)
            ]
            for ended in [pool.submit(caller.run) for caller in callers]:
                seen.add(ended.result())
        if failed := internal(service.address):
            seen.faults.append(f"/metrics counts {failed} internal errors")
    finally:
        over.set()
        watching.join()
    return seen


def report(seen: Seen, seconds: float, workers: int) -> tuple[str, bool]:
    """Returns the report, and True if all checks passed."""
    lines = [f"{seconds / 60:.1f} minutes, {CALLERS} clients, {workers} workers"]
    lines.append(", ".join(f"{what}: {count:,}" for what, count in sorted(seen.counts.items())))
    every = [s for some in seen.seconds.values() for s in some]
    for form, some in {"all": every, **{f: seen.seconds.get(f, []) for f in FORMATS}}.items():
        if some:
            p50, p99 = np.percentile(some, [50, 99]) * 1e3
            lines.append(
                f"{form}: {len(some):,} correct responses, p50 {p50:.2f} ms, p99 {p99:.2f} ms"
            )
    good = bool(every) and not seen.faults
    lines.append(f"failed checks: {len(seen.faults):,}")
    lines += [f"  {fault}" for fault in seen.faults[:_SHOWN]]
    if len(seen.memory) > 3:
        line = slope(seen.memory)
        is_judged = seconds >= _JUDGED_S
        verdict = (
            ("flat" if line.rise <= RISE else "NOT FLAT") if is_judged else "too short to judge"
        )
        good &= not is_judged or line.rise <= RISE
        held = [f"{median / 2**20:.0f}" for median in medians(seen.memory)]
        lines.append(
            f"memory (PSS of all processes): {', '.join(held)} MiB (medians of thirds), a rise of "
            f"{line.rise:+.2%} after the first third, {line.hourly / 2**20:+.1f} MiB an hour: "
            f"{verdict} (flat is at most {RISE:.0%})"
        )
    return "\n".join(lines), good


def main() -> None:
    """Starts a service, runs the soak test and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    asked = list(questions(LENGTHS, given.seed))
    limits = {"QKV_MAX_BODY_BYTES": str(LIMIT), "QKV_MAX_ANSWER_BYTES": str(ANSWER)}
    with serving(**limits) as service:
        seen = soak(service, asked, given.minutes * 60, given.seed)
        text, good = report(seen, given.minutes * 60, service.workers)
        print(text)
        if not good:
            print("\n".join(service.said))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
