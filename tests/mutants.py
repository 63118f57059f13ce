"""Changes the code in small ways, and counts the changes that a suite of tests notices.

It draws mutants by seed from the lines that tests execute. For each mutant it runs tests of its
line until one fails. A second run goes on from the notes of the first, and tries mutants again
whose tests did not end in time. All of it works on a copy of the code. Needs coverage.py, which
`make mutants` installs beside the notes.

    python tests/mutants.py [--state .mutants] [--count 100] [--tests FOLDER --name old]

Another suite, such as that of an older checkout, is judged by the same mutants with its own name.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Final

from support.judged_suite import IN_PROCESSES, Outcome, Suite, read_notes
from support.mutations import Mutant, mutants_of

FOLDERS: Final = ("attention", "wire", "jobs", "engine", "api", "server")
_DRAWN: Final = 100  # mutants of each folder in the list; a run takes the first ones of all
_CHEAP: Final = "not (process or browser or install or slow)"
_EXAMPLES: Final = ("--hypothesis-profile=fast", "--hypothesis-seed=0")
_CHECKOUT: Final = Path(__file__).parent.parent


def draw(suite: Suite, seed: int) -> list[Mutant]:
    """Returns mutants of lines that tests execute, one of each folder in turn."""
    drawn = {folder: _draw_folder(suite, folder, seed) for folder in FOLDERS}
    return [mutants[i] for i in range(_DRAWN) for mutants in drawn.values() if i < len(mutants)]


def _draw_folder(suite: Suite, folder: str, seed: int) -> list[Mutant]:
    """Returns mutants of random lines, one of a line."""
    of_line: defaultdict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for path in sorted((suite.code / "qkv" / folder).rglob("*.py")):
        file = path.relative_to(suite.code / "qkv").as_posix()
        executed = suite.tests_of_lines(file)
        for mutant in mutants_of(file, path.read_text()):
            if mutant.line in executed or file.startswith(IN_PROCESSES):
                of_line[file, mutant.line].append(mutant)
    choose = random.Random(f"{seed} {folder}")
    lines = choose.sample(sorted(of_line), len(of_line))
    mutants = (choose.choice(of_line[line]) for line in lines)
    return list(islice((mutant for mutant in mutants if _compiles(suite, mutant)), _DRAWN))


def _compiles(suite: Suite, mutant: Mutant) -> bool:
    try:
        compile(mutant.apply((suite.code / "qkv" / mutant.file).read_text()), "mutant", "exec")
    except SyntaxError:
        return False
    return True


def judge(suite: Suite, mutant: Mutant, limit_s: float) -> Outcome:
    """Runs tests of a mutant. A test that fails without the mutant too is left out."""
    path = suite.code / "qkv" / mutant.file
    original = path.read_text() if path.exists() else ""
    place = mutant.place(original)
    if place is None:
        return Outcome("gone")
    # Two thirds: the rest is for the start of Python and the collection.
    while chosen := suite.choose(mutant, place, limit_s * 2 / 3):
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
    suite: Suite, wanted: list[dict[str, Any]], noted: Path, limit_s: float
) -> list[dict[str, Any]]:
    """Returns the result of each mutant, and notes those that no earlier run has finished."""
    done = {
        json.dumps(result["mutant"]): result
        for result in read_notes(noted)
        if result["outcome"]["status"] != "unfinished"  # the machine had other work
    }
    for words in wanted:
        if json.dumps(words) not in done:
            before, after = tuple(words["lines"]), tuple(words["changed"])
            mutant = Mutant(words["file"], words["line"], before, words["nth"], after)
            outcome = judge(suite, mutant, limit_s)
            result = done[json.dumps(words)] = {"mutant": words, "outcome": asdict(outcome)}
            with noted.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{outcome.status:10} {mutant.file}:{mutant.line} {outcome.test}", flush=True)
    return [done[json.dumps(words)] for words in wanted]


def report(results: list[dict[str, Any]], name: str) -> Iterator[str]:
    """Returns lines of a table of each folder and of the mutants that no test noticed."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        folder = result["mutant"]["file"].partition("/")[0]
        for row in (folder, "all"):
            counts[row][result["outcome"]["status"]] += 1
    statuses = ("killed", "timeout", "survived", "unfinished", "gone")
    yield f"| {name} | " + " | ".join(statuses) + " |"
    yield "| --- |" + " ---: |" * len(statuses)
    for row in (*FOLDERS, "all"):
        yield f"| {row} | " + " | ".join(str(counts[row][status]) for status in statuses) + " |"
    for result in results:
        status, mutant = result["outcome"]["status"], result["mutant"]
        if status not in ("killed", "timeout"):
            yield f"\n{status}: {mutant['file']}:{mutant['line']}"
            yield from (f"- {line}" for line in mutant["lines"])
            yield from (f"+ {line}" for line in mutant["changed"])


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--state", type=Path, default=_CHECKOUT / ".mutants", help="the notes")
    parser.add_argument("--tests", type=Path, default=_CHECKOUT / "tests", help="the suite")
    parser.add_argument("--name", default="tests", help="of the suite, in the notes")
    parser.add_argument("--count", type=int, default=100, help="number of mutants")
    parser.add_argument("--seed", type=int, default=33, help="of the list, when it is drawn")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for one mutant")
    parser.add_argument("-m", dest="markers", default=_CHEAP, help="pytest's expression of markers")
    options = parser.parse_args()
    notes = options.state.resolve() / options.name
    suite = Suite(options.tests, notes, _CHECKOUT / "service", *_EXAMPLES)
    suite.trace(options.markers)
    count = len(suite.seconds)
    print(f"{count:,} tests pass, {suite.failed_count} fail and are left out", flush=True)
    listed = options.state / "mutants.jsonl"
    if not listed.exists():
        drawn = draw(suite, options.seed)
        listed.write_text("".join(json.dumps(asdict(mutant)) + "\n" for mutant in drawn))
    wanted = read_notes(listed)[: options.count]
    results = judge_all(suite, wanted, notes / "results.jsonl", options.seconds)
    for line in report(results, options.name):
        print(line)


if __name__ == "__main__":
    main()
