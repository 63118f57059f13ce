"""The command `qkv oracle`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.options import (
    PARAMETERS,
    SIZES,
    TARGET,
    parse_parameters,
)
from qkv.cli.output import echo
from qkv.cli.own_variants import add_own_variants
from qkv.cli.service import report
from qkv.errors import InvalidContent
from qkv.tensors import FLOATING

CASE_SUFFIXES: Final = (".safetensors", ".json")


def _list_families(context: click.Context, option: click.Parameter, is_set: bool) -> None:
    """Prints the families, and ends the command."""
    if not is_set or context.resilient_parsing:
        return
    with one_line_errors():
        from qkv.testing.families import FAMILIES
    width = max(map(len, FAMILIES))
    for name, family in FAMILIES.items():
        echo(f"{name:{width}}  {family.text}{' (strict)' * family.is_strict}")
    context.exit()


@click.command(short_help="Writes inputs on which a kernel is judged.")
@click.argument("variant")
@TARGET
@click.option(
    "--family",
    default="normal",
    show_default=True,
    metavar="NAME",
    help="The family of inputs.  --list shows them.",
)
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_families,
    help="List the families, and exit.",
)
@click.option(
    "--dtype",
    type=click.Choice(FLOATING),
    default="float32",
    show_default=True,
    help="Dtype of the inputs.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the inputs.")
@SIZES
@PARAMETERS
def oracle(
    variant: str,
    target: Path,
    family: str,
    dtype: str,
    seed: int,
    sizes: dict[str, int] | None,
    parameters: tuple[str, ...],
) -> None:
    """Writes a case: inputs of VARIANT, on which a kernel in any language is judged.

    A kernel reads the file and writes its results; `qkv verify` judges them. The same options draw
    the same numbers. The file has the tensors of a run, and grad_output for a backward pass.
    It is .safetensors, with the parameters and the case as JSON under `qkv` in its metadata, or
    .json; it is also a SOURCE of `qkv attend` and `qkv gradients`.

    \b
    qkv oracle softmax --family steep --seed 7 -o case.safetensors
    ./my_kernel case.safetensors mine.safetensors
    qkv verify softmax case.safetensors mine.safetensors
    """
    with one_line_errors():
        check_case_suffix(target)
        tensor_files.check_target(target, CASE_SUFFIXES)
        add_own_variants()
        from qkv.testing.case_file import CaseFile
        from qkv.testing.case_spec import CaseSpec

        values: dict[str, Any] = parse_parameters(parameters)
        spec = CaseSpec(variant, family, dtype, values, sizes or {}, seed)
        message = CaseFile.draw(spec).to_message()
        tensor_files.write(target, message, "inputs")
    report(message, target)


def check_case_suffix(path: Path) -> None:
    """Checks that the format of a file can hold a case.

    Raises:
        InvalidContent: it is .npz.
    """
    if path.suffix == ".npz":
        raise InvalidContent(
            f"{path}: an .npz file cannot hold a case, since it has no fields and no bfloat16: "
            f"expected {' or '.join(CASE_SUFFIXES)}"
        )
