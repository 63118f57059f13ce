"""The command `qkv describe`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qkv.cli import tensor_files
from qkv.cli.errors import one_line_errors
from qkv.cli.output import echo
from qkv.errors import InvalidContent

if TYPE_CHECKING:
    from qkv.models.describe.described_model import Described

_LISTED = 8


@click.command(short_help="Describes a model's attention layers, proven by running it.")
@click.argument("source", metavar="MODEL_DIR", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "target",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The file to write, such as MODEL_DIR/qkv.toml, where `qkv serve` reads it.",
)
def describe(source: Path, target: Path) -> None:
    """Describes the attention layers of the model in the folder MODEL_DIR.

    The folder has config.json and safetensors, as save_pretrained of transformers writes it. The
    model is built by transformers, runs with random numbers, and each layer is compared with what
    qkv computes, with these numbers and with its own. No code of the folder runs. A layer without
    a description is named with what is missing. Needs pip install '.[models]'.

    \b
    qkv describe llama -o llama/qkv.toml
    qkv serve --checkpoint llama=llama
    """
    with one_line_errors():
        tensor_files.check_target(target, (".toml",))
        try:
            from qkv.models.describe.described_model import describe as run
        except ImportError as error:
            raise InvalidContent(
                f"qkv describe needs {error.name}: pip install '.[models]'"
            ) from None
        described = run(source)
        if described.kinds:
            target.write_text(described.toml)
    for line in _lines(described):
        echo(line)
    if not described.kinds:
        raise click.ClickException("no layer is described")


def _lines(described: Described) -> list[str]:
    """Returns a line for each kind of layer, and one for each layer without a description."""
    lines = []
    for number, kind in enumerate(described.kinds, 1):
        layers = "1 layer" if len(kind.blocks) == 1 else f"{len(kind.blocks)} layers"
        more = ", ..." if len(kind.blocks) > _LISTED else ""
        lines.append(
            f"kind {number}: {layers}, error {kind.error:.1e}, up to {kind.length} tokens: "
            f"{', '.join(kind.blocks[:_LISTED])}{more}"
        )
    return [
        *lines,
        *(f"{name} is not described: it has {why}" for name, why in described.refused.items()),
    ]
