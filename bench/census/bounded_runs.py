"""Examines models one by one, each in a process with bounds of time and memory.

The outcomes are kept in a file, so that a run that was interrupted goes on where it ended.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Generic, TypeVar, cast

import pydantic

from census.census import Case, DescribedOutcome, Outcome

_ROOT: Final = Path(__file__).parent.parent.parent
_SOURCES: Final = ("service/qkv", "bench/census")
_SECONDS: Final = 120.0
_BYTES: Final = 6 << 30
_FORK: Final = multiprocessing.get_context("fork")  # a child has imported transformers already

_Found = TypeVar("_Found", bound=Outcome | DescribedOutcome)


class BoundedRuns(Generic[_Found]):
    """Runs of a census.

    Args:
        examine: returns the outcome of a model.
        kind: of the outcome.
        file: keeps the outcomes of these sources; None: nothing is kept.
        seconds: of a model.
        max_bytes: of the memory that its process may allocate.
    """

    def __init__(
        self,
        examine: Callable[[Case], _Found],
        kind: type[_Found],
        file: Path | None = None,
        *,
        seconds: float = _SECONDS,
        max_bytes: int = _BYTES,
    ) -> None:
        self._examine, self._kind, self._file = examine, kind, file
        self._json = pydantic.TypeAdapter(kind)
        self._seconds, self._max_bytes = seconds, max_bytes

    def run(self, cases: Sequence[Case], minutes: float = float("inf")) -> Iterator[_Found]:
        """Yields the outcomes of models: those that are kept at once, then the others.

        Args:
            cases: the models.
            minutes: after which no other model begins.
        """
        end = time.monotonic() + 60 * minutes
        kept = self._kept()
        yield from (kept[case.name] for case in cases if case.name in kept)
        for case in cases:
            if case.name in kept:
                continue
            if time.monotonic() > end:
                return
            outcome = self._in_process(case)
            if self._file is not None:
                with self._file.open("ab") as file:
                    file.write(self._json.dump_json(outcome) + b"\n")
            yield outcome

    def _kept(self) -> dict[str, _Found]:
        """Returns the outcomes in the file; begins it anew if the sources have changed."""
        if self._file is None:
            return {}
        first = digest_of_sources().encode()
        lines = self._file.read_bytes().splitlines() if self._file.exists() else []
        if lines[:1] != [first]:
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_bytes(first + b"\n")
            return {}
        outcomes = [self._json.validate_json(line) for line in lines[1:]]
        return {outcome.case.name: outcome for outcome in outcomes}

    def _in_process(self, case: Case) -> _Found:
        here, there = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=self._child, args=(case, there))
        process.start()
        there.close()
        try:
            if not here.poll(self._seconds):
                return self._stopped(case, f"it takes more than {self._seconds:g} s")
            found: _Found = here.recv()
        except EOFError:
            process.join()
            return self._stopped(case, f"its process ended with {process.exitcode}")
        finally:
            process.kill()
            process.join()
            here.close()
        return found

    def _child(self, case: Case, there: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self._max_bytes, self._max_bytes))
        try:
            outcome = self._examine(case)
        except Exception as error:  # whatever a model does
            outcome = self._stopped(case, f"{type(error).__name__}: {error}"[:300])
        there.send(outcome)

    def _stopped(self, case: Case, problem: str) -> _Found:
        return cast("_Found", self._kind.of_problem(case, problem))


def digest_of_sources() -> str:
    """Returns a digest of the code that an outcome depends on."""
    digest = hashlib.sha256()
    for path in sorted(p for folder in _SOURCES for p in (_ROOT / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
