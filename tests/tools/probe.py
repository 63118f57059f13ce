"""What the probes of `tests/tools/probes.py` call: it notes that a line runs, and when.

Its copy is a module of the copied package. Processes that tests start have the variables too.
"""

import os
import time

_PAUSE_S = 0.01  # of another process, between two notes of a line
_noted: dict[int, tuple[str, float]] = {}


def hit(number: int) -> None:
    """Notes that the line of this number runs: once for each phase of a test.

    A process that a test has started does not know the later tests that use it: it notes a time
    again and again.
    """
    folder = os.environ.get("JUDGED_HITS")
    if not folder:
        return
    now, phase = time.time(), os.environ.get("PYTEST_CURRENT_TEST", "")
    is_of_pytest = os.environ.get("JUDGED_PID") == str(os.getpid())
    before, at = _noted.get(number, (None, 0.0))
    if before == phase and (is_of_pytest or now < at + _PAUSE_S):
        return
    _noted[number] = phase, now
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    with open(os.path.join(folder, f"{worker}.hits"), "ab", buffering=0) as file:
        file.write(f"{number} {now}\n".encode())
