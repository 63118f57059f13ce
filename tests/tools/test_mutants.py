"""The changes of code that `make mutants` makes, and its runs of chosen tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.paths import PACKAGE
from tools.judged_suite import Suite
from tools.mutations import mutants_of
from tools.planted_faults import PLANTED, PlantedFault

TEXT = '''"""A module with 3 lines."""
__all__ = ["f"][:1]
if TYPE_CHECKING:
    SIZE = 5
def f(x: Literal[4]) -> Literal[4]:
    _log.info("at %d", 6)
    if f"{x < 7}":
        raise ValueError("above 8", 9)
    assert x != 10
'''

CODE = """SIZE = 1
def f(x):
    if not x:
        pass
    elif x == SIZE:
        return 8
    return 9
def g(x=3):
    return 7
"""
TESTS = """import subprocess
import sys
import pytest
import qkv
@pytest.fixture(scope="module")
def seven():
    return subprocess.check_output([sys.executable, "-c", "import qkv; print(qkv.g())"])
def test_a():
    assert qkv.f(1) == 8
def test_b():
    assert qkv.f(2) == 9
def test_c(seven):
    assert seven == b"7\\n"
def test_d(seven):
    assert seven
"""


def _changes(line: str) -> list[str]:
    return [mutant.changed[0] for mutant in mutants_of("a.py", line)]


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("x = é < (2)", ["x = é <= (2)", "x = é < (3)"]),
        ("x = (a or b) in c", ["x = (a or b) not in c", "x = (a and b) in c"]),
        ("x = a - b if not c else True", [
            "x = a - b if True else True", "x = a - b if False else True",
            "x = a - b if (c) else True", "x = a + b if not c else True",
            "x = a - b if not c else False",
        ]),
        ("x.y += -z", ["x.y -= -z", "pass", "x.y += (z)"]),
        ("x[a] = b", ["pass"]),
        ("await_(1)", ["pass", "await_(2)"]),
        ("lambda: [b for b in c if d]", ["lambda: [b for b in c if True]"]),
    ],
)  # fmt: skip
def test_operators_conditions_constants_and_statements_change(
    line: str, changes: list[str]
) -> None:
    assert _changes(line) == changes


def test_returned_values_and_loops_change() -> None:
    mutants = mutants_of("a.py", "def f(x):\n    for y in x:\n        continue\n    return y\n")
    assert [mutant.changed for mutant in mutants] == [("        break",), ("    return None",)]


def test_text_types_and_internal_checks_do_not_change() -> None:
    changed = [mutant.changed[0].strip() for mutant in mutants_of("a.py", TEXT)]
    assert changed == ["if True:", "if False:", "pass"]


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name.replace(" ", "_"))
def test_planted_fault_has_its_place_in_the_code(fault: PlantedFault) -> None:
    changed = fault.apply((PACKAGE / fault.file).read_text())
    compile(changed, fault.file, "exec")


def test_mutant_is_found_in_code_that_moved() -> None:
    text = "a = 1\nb = 2\na = 1\n"
    last = list(mutants_of("a.py", text))[-1]
    assert last.apply(text) == "a = 1\nb = 2\na = 2\n"
    assert last.place("c = 3\n" + text) == 4
    assert last.place("a = 1\n") is None


@pytest.mark.rare("tests/tools")
@pytest.mark.slow
def test_tests_of_a_line_are_found_and_the_one_that_fails_is_named(tmp_path: Path) -> None:
    package, tests = tmp_path / "service" / "qkv", tmp_path / "tests"
    package.mkdir(parents=True)
    tests.mkdir()
    plugins = "-p no:schemathesis -p no:anyio -p no:hypothesispytest"  # each of five processes
    (tmp_path / "pyproject.toml").write_text(f'[tool.pytest.ini_options]\naddopts = "{plugins}"\n')
    (package / "__init__.py").write_text(CODE)
    (tests / "test_code.py").write_text(TESTS)
    mutants = list(mutants_of("__init__.py", CODE))
    suite = Suite(tests, tmp_path / "notes", package.parent)
    suite.trace(["tests/test_code.py"], mutants)
    chosen = {mutant: set(suite.choose(mutant)) for mutant in mutants}
    a, b, c, d = (f"tests/test_code.py::test_{name}" for name in "abcd")
    of_lines = {mutant.lines[0].strip(): chosen[mutant] for mutant in mutants}
    assert of_lines == {
        "SIZE = 1": {a, b, c, d},  # at import
        "if not x:": {a, b},
        "elif x == SIZE:": {a, b},
        "return 8": {a},
        "return 9": {b},
        "def g(x=3):": {a, b, c, d},
        "return 7": {c, d},  # in a process of a fixture that both use
    }
    (eight,) = (mutant for mutant in mutants if mutant.changed == ("        return 9",))
    assert suite.run(suite.choose(eight), 60).status == "survived"
    (suite.code / "qkv" / "__init__.py").write_text(eight.apply(CODE))
    outcome = suite.run([b, a], 60)
    assert (outcome.status, outcome.test) == ("killed", a)
