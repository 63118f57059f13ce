"""The variants of the folder QKV_VARIANTS, for commands that run attention in this process."""

from __future__ import annotations

import os
from pathlib import Path

import click

from qkv.cli.errors import one_line_errors


def add_own_variants() -> None:
    """Adds the variants of the folder QKV_VARIANTS to the catalogue, if the variable is set."""
    if folder := os.environ.get("QKV_VARIANTS"):
        from qkv.engine.own_variants import add_folder

        add_folder(Path(folder))


def add_variants_if_set(context: click.Context, option: click.Parameter, is_set: bool) -> bool:
    """Adds them if a flag is set, such as --local, and returns the flag."""
    if is_set and not context.resilient_parsing:
        with one_line_errors():
            add_own_variants()
    return is_set
