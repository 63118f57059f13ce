"""The command `qkv verify`."""

from __future__ import annotations

import shlex
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import (
    PARAMETERS,
    SIZES,
    drop_unset,
    parse_parameters,
)
from qkv.cli.oracle import check_case_suffix
from qkv.cli.output import echo
from qkv.cli.own_variants import add_own_variants
from qkv.cli.service import line_width
from qkv.errors import InvalidContent, QkvError
from qkv.tensors import DTYPES, RawTensor
from qkv.wire import json
from qkv.wire.message import Message

if TYPE_CHECKING:
    from qkv.testing import Check, Report


def _split(
    context: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> list[str] | None:
    """Returns the names of an option that is repeated, or has a list with commas."""
    return [name.strip() for text in texts for name in text.split(",")] or None


@click.command(short_help="Judges the results of a kernel in any language.")
@click.argument("variant")
@click.argument("case", required=False, type=click.Path(path_type=Path))
@click.argument("results", required=False, type=click.Path(path_type=Path))
@click.option(
    "--exec",
    "program",
    metavar="COMMAND",
    help="Run a program on all families, in place of CASE and RESULTS.  {in} and {out} stand for "
    "the paths of its files.",
)
@PARAMETERS
@click.option(
    "--dtype", multiple=True, callback=_split, metavar="NAME,...", help="Dtypes.  [default: all]"
)
@click.option(
    "--families",
    multiple=True,
    callback=_split,
    metavar="NAME,...",
    help="Families of inputs.  [default: all but the strict ones]",
)
@click.option(
    "--skip", multiple=True, callback=_split, metavar="NAME,...", help="Families to leave out."
)
@click.option("--strict", is_flag=True, help="Add the strict families: `qkv oracle --list`.")
@SIZES
@click.option(
    "--gradients", is_flag=True, help="Require gradients.  [default: judged if there are any]"
)
@click.option("--seed", type=int, metavar="N", help="Seed of the inputs.  [default: 0]")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="The time that one run may take.  [default: 60]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify(
    variant: str,
    case: Path | None,
    results: Path | None,
    program: str | None,
    parameters: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Compares the results of a kernel with VARIANT in float64, and names its bug.

    CASE is a file of `qkv oracle`, RESULTS the file that the kernel wrote for it: output, and
    optionally grad_query, grad_key and grad_value. It is .safetensors, .npz or .json. An .npz file
    has no bfloat16: float32 numbers are taken if bfloat16 holds them exactly.

    With --exec, a program is run on each dtype and family, without a shell. Parameters given with
    -p are in the cases. A program that does not take a case exits with status 77.

    The exit status is 0 if all checks passed, 1 if one failed or none ran.

    \b
    qkv verify softmax case.safetensors mine.safetensors
    qkv verify --exec './my_kernel {in} {out}' softmax -p causal=true
    qkv verify --exec 'python kernel.py {in} {out}' softmax --dtype float16
    """
    if program is None:
        if case is None or results is None:
            raise click.UsageError("CASE and RESULTS are missing, or --exec.")
        _refuse_options_of_exec(parameter=parameters or None, **options)
        report = _verify_file(variant, case, results)
    else:
        if case is not None:
            raise click.UsageError(f"--exec takes no CASE and RESULTS: got {str(case)!r}.")
        report = _verify_program(variant, program, parameters, **options)
    echo(json.dump(report.to_json()) if as_json else _wrap(str(report)))
    if program is not None and report.failures and not as_json:
        # not wrapped, so that it can be copied
        command = _oracle_command(report.failures[0], variant, parameters, options)
        echo(f"  to write the worst case: {command}")
    sys.exit(0 if report.passed else 1)


def _refuse_options_of_exec(**options: Any) -> None:
    """Checks that no option of --exec is given.

    Raises:
        UsageError: one is.
    """
    if unused := [n for n, value in drop_unset(**options).items() if value is not False]:
        raise click.UsageError(f"--{unused[0]} needs --exec: a case has its own.")


def _verify_file(variant: str, case: Path, results: Path) -> Report:
    """Judges the results in a file."""
    with one_line_errors():
        check_case_suffix(case)
        message, outputs = tensor_files.read(case, "inputs"), tensor_files.read(results, "outputs")
        add_own_variants()
        from qkv.testing.case_file import CaseFile, read_results
        from qkv.testing.judgement import judge

        with _errors_name(case):
            spec, call = CaseFile.from_message(message)
        if spec.variant != variant:
            raise click.ClickException(
                f"{case}: the variant is wrong: got {spec.variant!r}, expected {variant!r}"
            )
        with _errors_name(results):
            if results.suffix == ".npz" and spec.dtype == "bfloat16":
                outputs = _to_bfloat16(outputs)
            tensors = read_results(outputs, call)
            return judge(call, tensors, family=spec.family, seed=spec.seed, function=str(results))


def _verify_program(
    variant: str,
    command: str,
    parameters: tuple[str, ...],
    *,
    dtype: list[str] | None,
    families: list[str] | None,
    skip: list[str] | None,
    strict: bool,
    sizes: dict[str, int] | None,
    gradients: bool,
    seed: int | None,
    timeout: float | None,
) -> Report:
    """Runs a program on all families."""
    with one_line_errors():
        add_own_variants()
        from qkv.testing.program import Program
        from qkv.testing.verification import verify_runner

        program = Program(command, needs_gradients=gradients, **drop_unset(timeout_s=timeout))
        given = drop_unset(dtype=dtype, families=families, skip=skip, sizes=sizes, seed=seed)
        values = parse_parameters(parameters)
        with _exit_on_stop_signals():
            return verify_runner(program, variant, values, name=command, strict=strict, **given)


@contextmanager
def _exit_on_stop_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into `SystemExit`, so that a program and its files are removed.

    A signal that is ignored, as under nohup, stays so.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, stop)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _oracle_command(
    check: Check, variant: str, parameters: tuple[str, ...], options: dict[str, Any]
) -> str:
    """Returns the command that writes the inputs of a check."""
    words = ["qkv", "oracle", variant, "--family", check.family, "--dtype", check.dtype]
    if options["seed"]:
        words += ["--seed", str(options["seed"])]
    if sizes := options["sizes"]:
        words += ["--sizes", ",".join(f"{letter}={n}" for letter, n in sizes.items())]
    words += [word for each in parameters for word in ("-p", each)]
    return shlex.join([*words, "-o", "case.safetensors"])


def _wrap(text: str) -> str:
    """Returns a report, with its lines wrapped in a terminal."""
    return "\n".join(map(_wrap_line, text.splitlines()))


def _wrap_line(line: str) -> str:
    if (width := line_width()) is None or len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Puts the path of a file before the errors of its content."""
    try:
        yield
    except QkvError as error:
        error.detail, error.pointer = f"{path}: {error.detail}", None
        raise


def _to_bfloat16(message: Message) -> Message:
    """Returns the message with the float32 numbers of results as bfloat16.

    Raises:
        InvalidContent: bfloat16 does not hold them.
    """
    tensors = dict(message.tensors)
    for name, raw in tensors.items():
        if raw.dtype != "float32" or not (name == "output" or name.startswith("grad_")):
            continue
        wide = raw.numpy()
        narrow = wide.astype(DTYPES["bfloat16"])
        same = (narrow.astype("f4") == wide) | np.isnan(wide)
        if not same.all():
            raise InvalidContent(
                f"outputs.{name:.60} is not bfloat16: got {wide[~same][0]!s} in float32, expected "
                "numbers that bfloat16 holds exactly"
            )
        tensors[name] = RawTensor.from_numpy(narrow)
    return replace(message, tensors=tensors)
