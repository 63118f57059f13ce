"""Probes: code that notes when lines run, for `tests/tools/mutants.py`."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tools.mutations import Mutant, function_lines

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_HIT: Final = '__import__("qkv._probe", fromlist=["hit"]).hit({})'


def is_imported(mutant: Mutant, text: str) -> bool:
    """True if the lines of a mutant run once, when its file is imported."""
    place = mutant.place(text) or 0
    return not function_lines(text) & set(range(place, place + len(mutant.lines)))


def add_probes(package: Path, mutants: Iterable[tuple[int, Mutant]]) -> None:
    """Adds probes to a copy of the package, and what they call.

    Args:
        package: the folder of the copy.
        mutants: the numbers that the probes note, and the mutants before whose lines they are.
            One that runs at import has probes in all functions of its file.
    """
    shutil.copy(Path(__file__).with_name("probe.py"), package / "_probe.py")
    by_file: dict[str, list[tuple[int, Mutant]]] = {}
    for number, mutant in mutants:
        by_file.setdefault(mutant.file, []).append((number, mutant))
    for file, its_mutants in by_file.items():
        path = package / file
        path.write_text(_with_probes(path.read_text(), its_mutants))


def _with_probes(text: str, mutants: list[tuple[int, Mutant]]) -> str:
    """Returns the text of a file with probes. Each is a line of its own before a statement."""
    tree, lines = ast.parse(text), text.split("\n")
    starts: set[tuple[int, int]] = set()
    for number, mutant in mutants:
        if is_imported(mutant, text):
            starts |= {(_start(s), number) for s in _first_statements(tree, lines)}
        elif place := mutant.place(text):
            starts.add((_start(_statement(tree, lines, place)), number))
    for line, number in sorted(starts, reverse=True):
        following = lines[line - 1]
        indent = following[: len(following) - len(following.lstrip())]
        lines.insert(line - 1, indent + _HIT.format(number))
    return "\n".join(lines)


def _statement(tree: ast.Module, lines: list[str], line: int) -> ast.stmt:
    """Returns the innermost statement of a line before which another can stand."""
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and _start(node) <= line <= (node.end_lineno or 0)
        and _begins_a_line(node, lines)
    ]
    return max(found, key=_start)


def _first_statements(tree: ast.Module, lines: list[str]) -> Iterator[ast.stmt]:
    """Returns the first statement of each function, after its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            first = node.body[: 2 if ast.get_docstring(node) else 1][-1]
            if _begins_a_line(first, lines):
                yield first


def _begins_a_line(statement: ast.stmt, lines: list[str]) -> bool:
    line = lines[statement.lineno - 1]
    before = line.encode()[: statement.col_offset]
    return not before.strip() and not line.lstrip().startswith("elif")


def _start(statement: ast.stmt) -> int:
    """Returns the number of the first line of a statement, decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(node.lineno for node in decorators)])
