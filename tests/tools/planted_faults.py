"""Errors in the code of processes, each of which the table of faults must notice.

A change of one line is too small for processes: most of these take away a whole reaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class PlantedFault:
    """An error in the code.

    Attributes:
        name: of the error.
        file: path below the package.
        before: a part of the file that occurs once.
        after: the part with the error.
        rows: those of the tables that must notice it, an expression of pytest's -k.
    """

    name: str
    file: str
    before: str
    after: str
    rows: str

    def apply(self, text: str) -> str:
        """Returns the text of the file with the error."""
        assert text.count(self.before) == 1, f"{self.name}: the code has changed"
        return text.replace(self.before, self.after)


_SUPERVISOR: Final = "server/supervisor.py"
_STATE: Final = "telemetry/worker_state.py"
_REMOTE: Final = "engine/remote/remote_engine.py"
_DEVICE: Final = "engine/remote/device_process.py"
_WORKER: Final = "server/worker.py"

PLANTED: Final = (
    PlantedFault(
        "no process is restarted", _SUPERVISOR,
        "self._restart_at[index] = self._started_at[index] + 1", "pass",
        "killed and two_workers",
    ),
    PlantedFault(
        "no exit is logged", _SUPERVISOR,
        'self._log_line(f"{self._describe_exit(index, status)}; restarting it")', "pass",
        "killed and two_workers",
    ),
    PlantedFault(
        "nobody answers while the only worker is stuck", _SUPERVISOR,
        "if self._stuck_polls > _STUCK_POLLS:", "if False:",
        "only_worker and stopped",
    ),
    PlantedFault(
        "clients are refused right after a pause", _SUPERVISOR,
        "_STUCK_POLLS: Final = 20", "_STUCK_POLLS: Final = 0",
        "all_processes and one_worker",
    ),
    PlantedFault(
        "a second signal changes nothing", _SUPERVISOR,
        "if self._signal_count > 1:", "if False:",
        "second",
    ),
    PlantedFault(
        "a closing terminal ends the workers", _SUPERVISOR,
        "            signal.signal(signal.SIGHUP, signal.SIG_IGN)\n",
        "            signal.signal(signal.SIGHUP, signal.SIG_DFL)\n",
        "terminal and two_workers",
    ),
    PlantedFault(
        "device processes are stopped together with the workers", _SUPERVISOR,
        "for group in (workers, self._state.processes):", "for group in (self._state.processes,):",
        "signal_under_load and (device_process or two_devices)",
    ),
    PlantedFault(
        "connections in the backlog are reset", _SUPERVISOR,
        "        listener.stop_accepting(self._listening)\n", "        self._listening.close()\n",
        "signal_under_load",
    ),
    PlantedFault(
        "a service whose device fails at the first start tries for ever", _SUPERVISOR,
        "                if not is_announced:\n                    return",
        "                if False:\n                    return",
        "first_start",
    ),
    PlantedFault(
        "nobody is told of the drain", _SUPERVISOR,
        "        self._state.drain()\n        time", "        time",
        "signal_under_load and one_worker",
    ),
    PlantedFault(
        "a service without a device is ready", "api/endpoints/health.py",
        "engine.is_ready and shared_state.is_ready", "True",
        "killed and device_process",
    ),
    PlantedFault(
        "a service without one of its workers is ready", _STATE,
        'self.worker_rows["ready"].all()', 'self.worker_rows["ready"].any()',
        "killed and two_workers",
    ),
    PlantedFault(
        "no process is ever stuck", _STATE,
        "is_stuck = (heartbeat > 0) &", "is_stuck = (heartbeat < 0) &",
        "stopped and two_workers and one_of",
    ),
    PlantedFault(
        "jobs of a device process that has ended are lost", _REMOTE,
        "if link is None or transfer.is_second_attempt:", "if True:",
        "killed and two_devices",
    ),
    PlantedFault(
        "a device process outlives the supervisor", _DEVICE,
        "        loop.add_reader(self._parent_alive_fd, self._on_parent_exit)\n", "",
        "death and device_process",
    ),
    PlantedFault(
        "a device process with a failed device goes on", _DEVICE,
        "        await self._engine.failed.wait()\n        self._is_ending.set()\n",
        "        await self._engine.failed.wait()\n",
        "only_device_fails",
    ),
    PlantedFault(
        "a worker outlives the supervisor", _WORKER,
        "        loop.add_reader(self._parent_alive_fd, self._on_supervisor_exit)\n", "",
        "death and one_worker",
    ),
    PlantedFault(
        "a worker with a failed device goes on", _WORKER,
        "        await self._runtime.engine.failed.wait()\n        self.stop()\n",
        "        await self._runtime.engine.failed.wait()\n",
        "device_of_a_worker and two_workers",
    ),
)  # fmt: skip
