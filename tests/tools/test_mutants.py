"""The changes of code that `make mutants` makes, and its runs of chosen tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.paths import PACKAGE
from tools.judged_suite import Suite
from tools.mutations import function_lines, mutants_of
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


def test_lines_of_functions_are_those_of_their_bodies() -> None:
    assert function_lines("a = 1\n@b(2)\ndef f(c=3):\n    return c\n") == {4}


@pytest.mark.slow
def test_run_names_the_test_that_fails(tmp_path: Path) -> None:
    package, tests = tmp_path / "service" / "qkv", tmp_path / "tests"
    package.mkdir(parents=True)
    tests.mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (package / "__init__.py").write_text("SIZE = 1\n")
    (tests / "test_size.py").write_text(
        "import qkv\ndef test_b():\n    assert qkv.SIZE == 1\ndef test_a():\n    pass\n"
    )
    names = ["tests/test_size.py::test_a", "tests/test_size.py::test_b"]
    suite = Suite(tests, tmp_path / "notes", package.parent)
    assert suite.run(names, 60).status == "survived"
    (suite.code / "qkv" / "__init__.py").write_text("SIZE = 2\n")
    outcome = suite.run(names, 60)
    assert (outcome.status, outcome.test) == ("killed", names[1])
    assert suite.run(names[:1], 60).status == "survived"
