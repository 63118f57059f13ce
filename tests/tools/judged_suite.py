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
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import pytest

from tools.mutations import Mutant
from tools.probes import add_probes, is_imported
from tools.runs import Runs, read_notes


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
        seconds: the tests that ran to their end, and the seconds of each.
    """

    def __init__(self, tests: Path, notes: Path, service: Path, *options: str) -> None:
        self.code = notes / "code"
        self.seconds: dict[str, float] = {}
        self._root, self._notes, self._options = tests.resolve().parent, notes, options
        self._tests: defaultdict[Mutant, set[str]] = defaultdict(set)
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

    def trace(self, files: Iterable[str], mutants: list[Mutant], markers: str = "not gpu") -> None:
        """Runs tests with probes in the lines of mutants, and reads the notes.

        A run that was interrupted goes on with the folder of tests in which it was.

        Args:
            files: paths of test files from the root of the checkout.
            mutants: of the code; one that is gone from it has no tests.
            markers: of the tests, an expression of pytest.
        """
        by_folder: defaultdict[str, list[str]] = defaultdict(list)
        for file in sorted(files):
            by_folder["/".join(file.split("/")[:-1][:2])].append(file)
        package = self.code / "qkv"
        here = [
            m for m in mutants if (path := package / m.file).exists() and m.place(path.read_text())
        ]
        add_probes(package, [(mutants.index(mutant), mutant) for mutant in here])
        for folder, its_files in by_folder.items():
            noted = self._notes / "lines" / folder.replace("/", ".")
            if not (noted / "whole").exists():
                shutil.rmtree(noted, ignore_errors=True)
                noted.mkdir(parents=True)
                words = ["-n", "2", "--dist", "loadfile", "-m", markers, "--noted", str(noted)]
                self._start(*words, *its_files).wait()
                (noted / "whole").touch()
        self._copy_code(self._notes / "service")
        for noted in sorted(self._notes.glob("lines/*/*.jsonl")):
            runs = Runs(read_notes(noted))
            self.seconds |= runs.seconds
            for number, tests in runs.of_lines(noted.with_suffix(".hits")).items():
                self._tests[mutants[number]] |= tests

    def choose(self, mutant: Mutant) -> list[str]:
        """Returns the tests of a mutant's lines: those of its folder first, quick ones first.

        A line outside functions runs once, at import: it has the tests of all functions of its
        file, and those of its folder.
        """
        names, folder = set(self._tests[mutant]), self._folder_of(mutant.file)
        if is_imported(mutant, (self.code / "qkv" / mutant.file).read_text()):
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
        noted = self._notes / "run"
        shutil.rmtree(noted, ignore_errors=True)
        noted.mkdir()
        start = time.monotonic()
        process = self._start("-n", "0", "-x", "--noted", str(noted), *words)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_group(process)
        status, test = self._status(code, read_notes(noted / ".jsonl"))
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
        # a process of xdist may run this, as in the test of this module
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
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
                env=inherited | variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends pytest and the servers that its tests have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
