"""The command `qkv variants`."""

from __future__ import annotations

from typing import Any

import click

from qkv.cli.errors import one_line_errors
from qkv.cli.options import API_KEY, LOCAL, URL
from qkv.cli.output import echo
from qkv.cli.service import send
from qkv.client.request_builders import build_variants
from qkv.wire import json


@click.command(short_help="Lists the variants, or describes one.")
@click.argument("name", required=False)
@URL
@API_KEY
@LOCAL
def variants(name: str | None, url: str, api_key: str | None, local: bool) -> None:
    """Lists the variants, or describes the variant NAME."""
    with one_line_errors():
        if local:
            from qkv.local import variants as list_locally

            catalogue = list_locally()
        else:
            catalogue = send(url, api_key, build_variants())
    if name is None:
        width = max(len(v["variant"]) for v in catalogue)
        for v in catalogue:
            echo(f"{v['variant']:{width}}  {v['summary']}")
        return
    matching = [v for v in catalogue if v["variant"] == name]
    if not matching:
        raise click.ClickException(
            f"no variant {name!r}: expected one of {', '.join(v['variant'] for v in catalogue)}"
        )
    _describe(matching[0])


def _describe(variant: dict[str, Any]) -> None:
    echo(f"{variant['variant']}: {variant['summary']}\n")
    for label in ("formula", "paper", "cost"):
        echo(f"  {label:9}{variant[label]}")
    echo("\ninputs")
    for name, spec in variant["inputs"].items():
        optional = " (optional)" if spec["optional"] else ""
        echo(f"  {name:14}({', '.join(spec['shape'])}){optional}")
    echo("\nparameters")
    for name, schema in variant["parameters"]["properties"].items():
        echo(
            f"  {name:14}{json.dump(schema.get('default')).decode():7}"
            f"{schema.get('description', '')}"
        )
    echo(f"\noutputs\n  {', '.join(variant['outputs'])}")
