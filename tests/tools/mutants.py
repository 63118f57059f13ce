"""Changes the code in small ways, and counts the changes that a suite of tests notices.

It draws mutants by seed, of each folder of the package in turn. For each it runs all tests of its
line, in processes too, until one fails. With --against, a mutant that survives is shown to the
tests of another checkout that differ from these: what only they notice is a promise that nobody
holds any more. An interrupted run goes on from its notes, and tries mutants again whose tests did
not end in time. All of it works on copies of the code.

    python tests/tools/mutants.py [--count 150] [--seed 59] [--seconds 300] [--against CHECKOUT]
    python tests/tools/mutants.py --planted [WORD ...]

--planted plants the errors of `planted_faults.py` instead, one after the other.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice, zip_longest
from pathlib import Path
from typing import Final

from support.paths import ROOT
from tools.judged_suite import Outcome, Suite
from tools.mutations import Mutant, mutants_of
from tools.planted_faults import PLANTED
from tools.runs import read_notes

_SEED: Final = "--hypothesis-seed=0"
_SERVICE: Final = ROOT / "service"
_TABLES: Final = ("tests/server/test_faults.py", "tests/server/test_fault_endings.py")
_STATUSES: Final = ("killed", "timeout", "survived", "unfinished", "gone")


def draw(package: Path, seed: int, count: int) -> list[Mutant]:
    """Returns mutants of random lines, one of each folder in turn; "" are the modules beside them.

    Lines that no test executes are drawn too: the tests of another checkout may execute them.
    """
    folders = sorted(path.parent.name for path in package.glob("*/__init__.py"))
    drawn = [_draw_files(package, (package / f).rglob("*.py"), f"{seed} {f}") for f in folders]
    drawn.append(_draw_files(package, package.glob("*.py"), f"{seed} "))
    in_turn = (mutant for row in zip_longest(*drawn) for mutant in row if mutant)
    return list(islice(in_turn, count))


def _draw_files(package: Path, paths: Iterator[Path], seed: str) -> Iterator[Mutant]:
    """Returns mutants of random lines of some files, one of a line."""
    of_line: defaultdict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for path in sorted(paths):
        file = path.relative_to(package).as_posix()
        for mutant in mutants_of(file, path.read_text()):
            of_line[file, mutant.line].append(mutant)
    choose = random.Random(seed)
    for line in choose.sample(sorted(of_line), len(of_line)):
        mutant = choose.choice(of_line[line])
        if _compiles(package, mutant):
            yield mutant


def _compiles(package: Path, mutant: Mutant) -> bool:
    try:
        compile(mutant.apply((package / mutant.file).read_text()), "mutant", "exec")
    except SyntaxError:
        return False
    return True


def judge(suite: Suite, mutant: Mutant, limit_s: float) -> Outcome:
    """Runs the tests of a mutant. A test that fails without the mutant too is left out."""
    path = suite.code / "qkv" / mutant.file
    original = path.read_text() if path.exists() else ""
    if mutant.place(original) is None:
        return Outcome("gone")
    while chosen := suite.choose(mutant):
        path.write_text(mutant.apply(original))
        try:
            outcome = suite.run(chosen, limit_s)
        finally:
            path.write_text(original)
        if outcome.status in ("survived", "unfinished"):
            return outcome
        has_test = bool(outcome.test)  # otherwise the tests could not even begin
        check = suite.run([outcome.test] if has_test else chosen, limit_s)
        if check.status == "survived" or (not has_test and check.status == "unfinished"):
            return outcome
        suspect = outcome.test or check.test
        if not suspect:
            return Outcome("unfinished", chosen_count=len(chosen))
        print(f"left out, because it fails without a mutant: {suspect}", flush=True)
        del suite.seconds[suspect]
    return Outcome("survived")


def judge_all(
    suite: Suite, wanted: list[Mutant], noted: Path, limit_s: float
) -> dict[Mutant, Outcome]:
    """Returns the outcome of each mutant, and notes those that no earlier run has finished."""
    done = {
        Mutant.from_words(note["mutant"]): Outcome(**note["outcome"])
        for note in read_notes(noted)
        if note["outcome"]["status"] != "unfinished"
    }
    for mutant in wanted:
        if mutant not in done:
            outcome = done[mutant] = judge(suite, mutant, limit_s)
            with noted.open("a") as file:
                words = {"mutant": asdict(mutant), "outcome": asdict(outcome)}
                file.write(json.dumps(words) + "\n")
            print(f"{outcome.status:10} {mutant.file}:{mutant.line} {outcome.test}", flush=True)
    return {mutant: done[mutant] for mutant in wanted}


def report(results: dict[Mutant, Outcome], name: str) -> Iterator[str]:
    """Returns lines of a table of each folder and of the mutants that no test noticed."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for mutant, outcome in results.items():
        for row in (mutant.file.rpartition("/")[0].partition("/")[0] or "qkv", "all"):
            counts[row][outcome.status] += 1
    yield f"| {name} | " + " | ".join(_STATUSES) + " |"
    yield "| --- |" + " ---: |" * len(_STATUSES)
    for row in sorted(counts, key=lambda row: (row == "all", row)):
        yield f"| {row} | " + " | ".join(str(counts[row][status]) for status in _STATUSES) + " |"
    for mutant, outcome in results.items():
        if outcome.status not in ("killed", "timeout"):
            yield f"\n{outcome.status}, {outcome.chosen_count} tests: {mutant}"


def test_files(tests: Path) -> list[str]:
    """Returns the test files of a checkout, from its root."""
    return sorted(path.relative_to(tests.parent).as_posix() for path in tests.rglob("test_*.py"))


def changed_files(tests: Path, others: Path) -> list[str]:
    """Returns the files of `others` that `tests` does not have, or not with the same text."""
    files = {file: others.parent / file for file in test_files(others)}
    new = {file: tests.parent / file for file in files}
    return [
        file
        for file, path in files.items()
        if not new[file].exists() or new[file].read_bytes() != path.read_bytes()
    ]


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--state", type=Path, default=ROOT / ".mutants", help="the notes")
    parser.add_argument("--against", type=Path, help="another checkout, whose tests may hold more")
    parser.add_argument("--count", type=int, default=150, help="number of mutants")
    parser.add_argument("--seed", type=int, default=59, help="of the list, when it is drawn")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit for one mutant")
    parser.add_argument("-m", dest="markers", default="not gpu", help="of the tests that run")
    parser.add_argument("--planted", nargs="*", help="plant only the errors of these words")
    return parser.parse_args()


def judge_planted(notes: Path, words: list[str], limit_s: float) -> None:
    """Plants each error of `planted_faults.py` and runs the rows that must notice it."""
    suite = Suite(ROOT / "tests", notes, _SERVICE, _SEED)
    for fault in PLANTED:
        if not all(word in fault.name for word in words):
            continue
        path = suite.code / "qkv" / fault.file
        original = path.read_text()
        path.write_text(fault.apply(original))
        try:
            outcome = suite.run_words([*_TABLES, "-k", fault.rows], limit_s)
        finally:
            path.write_text(original)
        print(f"{outcome.status:10} {fault.name}: {outcome.test}", flush=True)


def main() -> None:
    """Runs the command line."""
    options = parse_arguments()
    if options.planted is not None:
        judge_planted(options.state.resolve() / "planted", options.planted, options.seconds)
        return
    state, tests = options.state.resolve(), ROOT / "tests"
    suite = Suite(tests, state / "tests", _SERVICE, _SEED)
    listed = state / "mutants.jsonl"
    if not listed.exists():
        drawn = draw(suite.code / "qkv", options.seed, options.count)
        listed.write_text("".join(json.dumps(asdict(mutant)) + "\n" for mutant in drawn))
    wanted = [Mutant.from_words(words) for words in read_notes(listed)]
    suite.trace(test_files(tests), wanted, options.markers)
    wanted = wanted[: options.count]
    results = judge_all(suite, wanted, state / "tests/results.jsonl", options.seconds)
    print(*report(results, "these tests"), sep="\n", flush=True)
    if options.against:
        missed = [mutant for mutant in wanted if results[mutant].status == "survived"]
        others = options.against.resolve() / "tests"
        old = Suite(others, state / "against", _SERVICE, _SEED)
        old.trace(changed_files(tests, others), missed, options.markers)
        results = judge_all(old, missed, state / "against/results.jsonl", options.seconds)
        print(*report(results, "missed by these, run on the others"), sep="\n")
        for mutant, outcome in results.items():
            if outcome.status in ("killed", "timeout"):
                print(f"\nnoticed only by {outcome.test}: {mutant}")


if __name__ == "__main__":
    main()
