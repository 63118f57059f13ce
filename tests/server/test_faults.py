"""Every row of the table of faults, in each of its topologies, with real processes and signals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Final

import pytest

from support.faults import FAULTS, Fault
from support.faulty_processes import CLIENTS, TOPOLOGIES, Service, watch
from support.processes import Process, running_command, wait_until

GOOD: Final = frozenset({"client right", "patient client right", "readyz 200", "livez 200"})
Services = Callable[[str, int], Service]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Returns a service of a topology; one serves all faults, because it recovers from each."""
    started: dict[tuple[str, int], Service] = {}
    with ExitStack() as stack:

        def command(*words: str, **variables: str) -> Process:
            return stack.enter_context(running_command(*words, **variables))

        def service_of(name: str, stuck_s: int) -> Service:
            if (name, stuck_s) not in started:
                broken = tmp_path_factory.mktemp("faults") / "broken"
                started[name, stuck_s] = Service(command, TOPOLOGIES[name], broken, stuck_s)
            return started[name, stuck_s]

        yield service_of
        for service in started.values():  # all at once: each drains for a second
            service.process.popen.terminate()
        for service in started.values():
            assert service.process.wait() == 0


@pytest.mark.slow
@pytest.mark.representative
@pytest.mark.parametrize(
    ("fault", "topology"),
    [
        pytest.param(fault, topology, id=f"{fault.name}-{topology}".replace(" ", "_"))
        for topology in TOPOLOGIES
        for fault in FAULTS
        if topology in fault.topologies
    ],
)
def test_clients_and_operators_see_what_the_table_says(
    services: Services, fault: Fault, topology: str
) -> None:
    service = services(topology, fault.stuck_s)
    wait_until(lambda: service.is_whole)
    lines = service.process.lines
    line_count, restarts = len(lines), sum(service.metric("restarts_total"))
    with watch(service) as seen:
        wait_for_all(seen)
        before = len(seen)
        fault.make(service)
        wait_until(lambda: service.is_whole)
        wait_for_all(seen)
        healed, ran = len(seen), service.metric("requests_total")
        wait_for_all(seen)
        # each device gets work again, once its process has started
        wait_until(
            lambda: all(a > b for a, b in zip(service.metric("requests_total"), ran, strict=True))
        )
    counts = Counter(seen[before:])
    unusual = counts.keys() - GOOD
    assert fault.must_see <= unusual <= fault.must_see | fault.may_see, counts
    # a connection that the process had, and none afterwards
    assert counts["client disconnected"] <= CLIENTS, counts
    assert set(seen[healed:]) == GOOD
    logged = [line.split(" ", 2) for line in lines[line_count:] if " WARNING " in line]
    again = len(logged) - len(fault.log) if fault.fails_again else 0
    patterns = [*fault.log, *fault.log[-1:] * again]
    assert len(logged) == len(patterns), lines[line_count:]
    for (time_text, level, message), pattern in zip(logged, patterns, strict=True):
        assert datetime.fromisoformat(time_text).utcoffset() == timedelta(0)
        assert level == "WARNING"
        assert re.fullmatch(pattern, message)
    assert sum(service.metric("restarts_total")) == restarts + fault.restarts + again


def wait_for_all(seen: list[str], count: int = 4) -> None:
    """Waits until clients and probes have seen everything good again."""
    start = len(seen)
    wait_until(lambda: all(Counter(seen[start:])[good] >= count for good in GOOD))
