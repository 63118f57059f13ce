"""`qkv check-variant`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from qkv.cli.errors import one_line_errors
from qkv.cli.output import echo


@click.command(short_help="Checks a variant's file against its contract.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def check_variant(file: Path) -> None:
    """Checks a variant's FILE against its contract, and prints one line for each check.

    The file may be anywhere; in attention/variants it is also served. The exit status is 1 if a
    check fails.
    """
    with one_line_errors():
        from qkv.local import check_variant as run_checks

        failures = count = 0
        for name, status, reason in run_checks(file):
            count += status != "skip"
            failures += status == "FAIL"
            echo(f"{status}  {name}{': ' if reason else ''}{reason.rstrip()}")
    echo(f"{file.stem}: {count} checks, {failures} failed")
    sys.exit(1 if failures else 0)
