"""A suite of tests that `mutants.py` judges: what its tests execute, and runs of some."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any, Final

import pytest

from tools.mutations import Mutant, function_lines

_PROCESS: Final = """import os
if "COVERAGE_PROCESS_START" in os.environ:
    try:
        import coverage
    except ImportError:  # an environment of its own
        pass
    else:
        coverage.process_startup()
"""
"""sitecustomize.py beside the code: traces the processes that traced tests start."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run of tests.

    Attributes:
        status: "survived"; "killed"; "timeout" if a test did not end, which is a kill too;
            "unfinished" if tests passed until the time was over; "gone" if no line is left.
        test: the test that failed or did not end; empty: none had begun.
        seconds: of the run.
        chosen_count: number of tests that were to run.
    """

    status: str
    test: str = ""
    seconds: float = 0.0
    chosen_count: int = 0


class Suite:
    """A folder of tests, and notes about its tests.

    Args:
        tests: the folder, in a checkout with pyproject.toml.
        notes: the folder of the notes.
        service: the folder of the code; a run that goes on uses the code that it began with.
        options: further options of pytest.

    Attributes:
        code: a copy of the code, which comes first on the path of the tests.
        seconds: the tests that pass without a mutant, and the seconds of each.
        failed: tests that fail without a mutant, and are left out.
    """

    def __init__(self, tests: Path, notes: Path, service: Path, *options: str) -> None:
        self.code = notes / "code"
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self._root, self._notes = tests.resolve().parent, notes
        self._lines, self._options = notes / "lines", options
        self._copy_code(service)

    def _copy_code(self, service: Path) -> None:
        """Copies the code twice: a later run uses the same code, without an earlier mutant."""
        original = self._notes / "service"
        if not original.exists():
            shutil.copytree(service, original, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.rmtree(self.code, ignore_errors=True)
        shutil.copytree(original, self.code, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(Path(__file__).with_name("line_tests.py"), self.code)
        # By default Python compares times in seconds: it would run the code before a quick change.
        mode = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.code, quiet=1, invalidation_mode=mode)

    def trace(self, files: Iterable[str], markers: str = "not gpu") -> None:
        """Runs tests with the lines that each executes, and reads the notes.

        A run that was interrupted goes on with the folder of tests in which it was.

        Args:
            files: paths of test files from the root of the checkout.
            markers: of the tests, an expression of pytest.
        """
        by_folder: defaultdict[str, list[str]] = defaultdict(list)
        for file in sorted(files):
            by_folder["/".join(file.split("/")[:-1][:2])].append(file)
        customised = self.code / "sitecustomize.py"
        customised.write_text(_PROCESS)
        for folder, its_files in by_folder.items():
            lines = self._lines / folder.replace("/", ".")
            if not (lines / "whole").exists():
                shutil.rmtree(lines, ignore_errors=True)
                lines.mkdir(parents=True)
                words = ["-n", "2", "--dist", "loadfile", "-m", markers, "--lines", str(lines)]
                words += ["--of", str(self.code / "qkv"), "--noted", str(lines / "tests.jsonl")]
                self._start(*words, *its_files).wait()
                (lines / "whole").touch()
        customised.unlink()
        self._read_outcomes()

    def _read_outcomes(self) -> None:
        outcomes: defaultdict[str, set[str]] = defaultdict(set)
        seconds: Counter[str] = Counter()
        for note in self._traced("tests.jsonl"):
            if note["event"] != "start":
                outcomes[note["test"]].add(note["outcome"])
                seconds[note["test"]] += note["seconds"]
        self.seconds = {name: seconds[name] for name in outcomes if outcomes[name] == {"passed"}}
        self.failed = [name for name, found in outcomes.items() if "failed" in found]

    def _traced(self, pattern: str) -> Iterator[dict[str, Any]]:
        for file in self._lines.glob(f"*/{pattern}"):
            yield from read_notes(file)

    @cached_property
    def _sharing(self) -> dict[str, set[str]]:
        """The tests that use the same shared processes as a test."""
        shared = {note["test"]: set(note["shared"]) for note in self._traced("shared.*.jsonl")}
        by_fixture: defaultdict[str, set[str]] = defaultdict(set)
        for test, fixtures in shared.items():
            for fixture in fixtures:
                by_fixture[fixture].add(test)
        return {
            test: set().union(*(by_fixture[fixture] for fixture in fixtures))
            for test, fixtures in shared.items()
        }

    @cache  # noqa: B019 - one suite for each process
    def tests_of_lines(self, file: str) -> dict[int, set[str]]:
        """Returns the tests that execute each line of a file, here or in a process.

        The lines of a process that tests share have all these tests: it executed them for the
        first one, or for any other.
        """
        from coverage import CoverageData

        tests: defaultdict[int, set[str]] = defaultdict(set)
        path = str(self.code / "qkv" / file)
        for part in [*self._lines.glob("*/lines.*"), *self._lines.glob("*/processes.*")]:
            if part.suffix == ".ini":
                continue
            data = CoverageData(part)
            data.read()
            is_process = part.name.startswith("processes.")
            for line, contexts in data.contexts_by_lineno(path).items():
                for test in contexts:
                    tests[line] |= self._sharing.get(test, {test}) if is_process else {test}
        return tests

    def choose(self, mutant: Mutant, place: int) -> list[str]:
        """Returns all tests of the mutant's lines: those of its folder first, quick ones first.

        A line outside functions runs once, at import: it has the tests of all functions of its
        file, and those of its folder.
        """
        executed = self.tests_of_lines(mutant.file)
        rows = set(range(place, place + len(mutant.lines)))
        of_functions = function_lines((self.code / "qkv" / mutant.file).read_text())
        is_imported = not rows & of_functions
        names = set().union(*(executed.get(r, ()) for r in (of_functions if is_imported else rows)))
        folder = self._folder_of(mutant.file)
        if is_imported:
            names |= {name for name in self.seconds if name.startswith(folder)}
        return self._order(names, folder)

    def _order(self, names: Collection[str], folder: str) -> list[str]:
        """Returns one case of each function, then a second; first of the folder, quickest first."""
        cases: Counter[str] = Counter()
        ranks: dict[str, int] = {}
        seconds = self.seconds
        known = [name for name in names if name in seconds]
        for name in sorted(known, key=lambda n: (not n.startswith(folder), seconds[n], n)):
            function = name.partition("[")[0]
            ranks[name] = cases[function]
            cases[function] += 1
        return sorted(ranks, key=ranks.__getitem__)  # is stable

    def _folder_of(self, file: str) -> str:
        """Returns the folder of tests for a file: the deepest one that has tests."""
        folders = (Path("tests", folder).as_posix() + "/" for folder in Path(file).parents)
        return next((f for f in folders if any(n.startswith(f) for n in self.seconds)), "tests/")

    def run(self, chosen: list[str], limit_s: float) -> Outcome:
        """Runs tests until one fails or the time is over."""
        listed = self._notes / "chosen.json"
        listed.write_text(json.dumps(chosen))
        files = dict.fromkeys(name.partition("::")[0] for name in chosen)
        outcome = self.run_words(["--chosen", str(listed), *files], limit_s)
        return replace(outcome, chosen_count=len(chosen))

    def run_words(self, words: list[str], limit_s: float) -> Outcome:
        """Runs the tests that words of pytest's command line select, as `run` does."""
        noted = self._notes / "run.jsonl"
        noted.unlink(missing_ok=True)
        start = time.monotonic()
        process = self._start("-n", "0", "-x", "--noted", str(noted), *words)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_group(process)
        status, test = self._status(code, read_notes(noted))
        return Outcome(status, test, time.monotonic() - start)

    def _status(self, code: int | None, notes: list[dict[str, Any]]) -> tuple[str, str]:
        """Returns the status of a run and its last test, from pytest's exit code or None."""
        if failed := [note["test"] for note in notes if note.get("outcome") == "failed"]:
            return "killed", failed[0]  # also if a process that is left keeps pytest from its end
        if code is not None:
            no_failure = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
            return "survived" if code in no_failure else "killed", ""
        if not notes:
            return "timeout", ""
        last = [note for note in notes if note["event"] == "start"][-1]
        # A machine that has other work may be three times as slow, and the start takes seconds.
        longest = 10 + 3 * self.seconds.get(last["test"], 0.0)
        if notes[-1]["event"] != "teardown" and time.time() - last["at"] > longest:
            return "timeout", last["test"]
        return "unfinished", ""

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        """Starts pytest in the checkout of the tests, with the copy of the code."""
        examples = self._notes / "hypothesis"  # not those that an earlier mutant has failed
        shutil.rmtree(examples, ignore_errors=True)
        path = [str(self.code), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            "PYTHONPATH": os.pathsep.join(path),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(examples),
            "OMP_NUM_THREADS": "1",
        }
        options = ["-p", "line_tests", "-p", "no:cacheprovider", *self._options]
        with open(self._notes / "pytest.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", *options, *words],
                cwd=self._root,
                env=os.environ | variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def read_notes(file: Path) -> list[dict[str, Any]]:
    """Returns the notes of a file. The last line of a process that was killed may be a part."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends pytest and the servers that its tests have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
