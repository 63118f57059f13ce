"""Small changes of Python code that a test should notice: their list for a module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

_OPPOSITES: Final = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
_LOGS: Final = re.compile(r"(\w*log\w*|logging\.\w+)(\.|\()", re.IGNORECASE)
_Edit = tuple[tuple[int, int, int, int], str]  # a place in the text, and its new text


@dataclass(frozen=True)
class Mutant:
    """A change of one statement or expression.

    Attributes:
        file: path below the package.
        line: number of the first changed line, from 1.
        lines: the lines before the change.
        nth: the number of equal lines above, so that it is found in code that has moved.
        changed: the lines after the change.
    """

    file: str
    line: int
    lines: tuple[str, ...]
    nth: int
    changed: tuple[str, ...]

    @classmethod
    def from_words(cls, words: dict[str, Any]) -> Mutant:
        """Returns a mutant from a note, where tuples are lists."""
        lines, changed = tuple(words["lines"]), tuple(words["changed"])
        return cls(words["file"], words["line"], lines, words["nth"], changed)

    def __str__(self) -> str:
        rows = [*(f"- {line}" for line in self.lines), *(f"+ {line}" for line in self.changed)]
        return "\n".join([f"{self.file}:{self.line}", *rows])

    def place(self, text: str) -> int | None:
        """Returns the number of the first line in this text of the file; None: it is gone."""
        places = _places(text.split("\n"), list(self.lines))
        return places[self.nth] + 1 if self.nth < len(places) else None

    def apply(self, text: str) -> str:
        """Returns the text of the file with the change, which must have a place in it."""
        place, lines = self.place(text), text.split("\n")
        assert place is not None, self
        lines[place - 1 : place - 1 + len(self.lines)] = self.changed
        return "\n".join(lines)


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """Returns every mutant of a module. A few are no valid Python."""
    lines = text.split("\n")
    for (top, left, bottom, right), new in _edits(ast.parse(text), lines):
        before = lines[top - 1 : bottom]
        changed = (_cut(before[0], 0, left) + new + _cut(before[-1], right)).split("\n")
        if changed != before:
            nth = _places(lines, before).index(top - 1)
            yield Mutant(file, top, tuple(before), nth, tuple(changed))


def function_lines(text: str) -> set[int]:
    """Returns the numbers of the lines in functions: the others run once, at import."""
    functions = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {line for f in functions for line in range(f.body[0].lineno, (f.end_lineno or 0) + 1)}


def _edits(node: ast.AST, lines: list[str]) -> Iterator[_Edit]:
    """Returns the changes of a node and of those in it, without text that only people read."""
    if _is_skipped(node):
        return
    yield from _changes(node, lines)
    if isinstance(node, ast.Raise):  # below it is the message
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "bases"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _edits(child, lines)


def _is_skipped(node: ast.AST) -> bool:
    """True for messages (3.11 has no places in f-strings), types, names and internal checks."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom():
            return True
        case ast.If(test=test):
            return "TYPE_CHECKING" in ast.unparse(test)
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            return ast.unparse(target) == "__all__"
        case ast.Expr(value=value):
            return _LOGS.match(ast.unparse(value)) is not None
        case ast.Call(func=ast.Name(id="cast" | "TypeVar" | "NewType")):
            return True
    return False


def _changes(node: ast.AST, lines: list[str]) -> Iterator[_Edit]:
    """Returns the changes of this node itself."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield from _swapped(left, op, right, lines)
        case ast.BinOp(left=left, op=op, right=right):
            yield from _swapped(left, op, right, lines)
        case ast.BoolOp(op=op, values=[*_, left, right]):
            yield from _swapped(left, op, right, lines)
        case ast.AugAssign(target=left, op=op, value=right):
            yield from _swapped(left, op, right, lines)
            yield _span(node), "pass"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield _span(node), f"({_source(operand, lines)})"
        case ast.Constant(value=bool() as value):
            yield _span(node), str(not value)
        case ast.Constant(value=int() | float() as value):
            yield _span(node), repr(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield _span(test), "True"
            yield _span(test), "False"
        case ast.comprehension(ifs=[test, *_]):
            yield _span(test), "True"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield _span(value), "None"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise():
            yield _span(node), "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield _span(node), "pass"
        case ast.Continue():
            yield _span(node), "break"


def _swapped(left: ast.expr, op: ast.AST, right: ast.expr, lines: list[str]) -> Iterator[_Edit]:
    """Returns the change of the operator between two operands."""
    if type(op) in _OPPOSITES:
        old, new = _OPPOSITES[type(op)]
        place = (left.end_lineno or 0, left.end_col_offset or 0, right.lineno, right.col_offset)
        between = _text(place, lines)
        word = old.replace(" ", r"\s+") if old.isalpha() or " " in old else re.escape(old)
        changed = re.sub(word, lambda _: new, between, count=1)
        if changed != between:
            yield place, changed


def _span(node: ast.stmt | ast.expr) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _source(node: ast.expr, lines: list[str]) -> str:
    return _text(_span(node), lines)


def _text(place: tuple[int, int, int, int], lines: list[str]) -> str:
    top, left, bottom, right = place
    if top == bottom:
        return _cut(lines[top - 1], left, right)
    middle = lines[top : bottom - 1]
    return "\n".join([_cut(lines[top - 1], left), *middle, _cut(lines[bottom - 1], 0, right)])


def _cut(line: str, start: int, end: int | None = None) -> str:
    """Returns a part of a line. ast counts columns in bytes of UTF-8."""
    return line.encode()[start:end].decode()


def _places(lines: list[str], part: list[str]) -> list[int]:
    """Returns the indices at which equal lines begin."""
    return [i for i in range(len(lines)) if lines[i : i + len(part)] == part]
