"""Generates docs/variants.md with its pictures, the README's list and the table of settings.

It also generates the examples of the OpenAPI document.

`python docs/make.py` or `make docs` writes them; tests compare them with `build_files`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import variant_pictures

from qkv.attention import catalogue
from qkv.attention.variant import Variant
from qkv.settings import Settings

ROOT: Final = Path(__file__).parent.parent
PICTURES: Final = "service/qkv/attention/variants/pictures"
BEGIN: Final = "<!-- made by `make docs` -->\n"
END: Final = "<!-- end -->\n"

_BOUNDS: Final = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def build_files() -> dict[str, str]:
    """Returns the text of every generated page, by its path from the root."""
    every = list(catalogue.variants().values())
    return {
        "README.md": _with_part("README.md", _summary(every)),
        "docs/running.md": _with_part("docs/running.md", _settings()),
        "docs/variants.md": "\n".join(_page(every)) + "\n",
    }


def _with_part(path: str, lines: Iterator[str]) -> str:
    """Returns the text of a page with these lines as its generated part."""
    before, rest = (ROOT / path).read_text().split(BEGIN)
    return before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END, 1)[1]


def _settings() -> Iterator[str]:
    """Yields the table of the settings."""
    yield "| setting | default | meaning |\n| --- | --- | --- |"
    for name, field in Settings.model_fields.items():
        yield f"| `QKV_{name.upper()}` | `{field.default}` | {field.description} |"


def draw_pictures() -> dict[str, str]:
    """Returns the picture of every variant that has a matrix of weights, and others, by path."""
    beside = variant_pictures.to_svg(variant_pictures.draw_delta_beside_softmax())
    return {"docs/variants/gated.svg": beside} | {
        f"{PICTURES}/{variant.name}.svg": variant_pictures.to_svg(variant_pictures.draw(variant))
        for variant in catalogue.variants().values()
        if variant_pictures.has_matrix(variant)
    }


def _summary(variants: list[Variant]) -> Iterator[str]:
    """Yields the README's list of the variants."""
    yield from (f"- [{v.name}](docs/variants.md#{v.name}): {v.summary}" for v in variants)


def _page(variants: list[Variant]) -> Iterator[str]:
    """Yields the parts of docs/variants.md."""
    yield "# The variants\n"
    yield (
        "This page describes every variant of attention that the service has: its formula, cost, "
        "inputs, outputs and parameters, and what it does not accept, each with the reason. For "
        "choosing one, [speed](speed.md) and [accuracy](accuracy.md) have measured figures. "
        "`make docs` writes the page from the files in `service/qkv/attention/variants`.\n"
    )
    yield (
        "The pictures show the weights of every variant for the same input, with default "
        "parameters. "
        f"{variant_pictures.INPUT} {variant_pictures.COLOURS} "
        "`GET /v1/variants/{variant}/picture` returns the same picture.\n"
    )
    yield from (f"- [{v.name}](#{v.name}): {v.summary}" for v in variants)
    for variant in variants:
        yield from _section(variant)


def _section(variant: Variant) -> Iterator[str]:
    """Yields the section of one variant in docs/variants.md."""
    description = catalogue.describe(variant)
    yield f"\n## {variant.name}\n\n{description['summary']}\n"
    if variant_pictures.has_matrix(variant):
        yield f"![The weights of {variant.name}](../{PICTURES}/{variant.name}.svg)\n"
    yield "| | |\n| --- | --- |"
    yield f"| formula | {_code(description['formula'])} |"
    yield from (f"| {word} | {_cell(description[word])} |" for word in ("paper", "cost", "weights"))
    if description["gradients"]:
        yield f"| gradients | {', '.join(f'`{name}`' for name in description['gradients'])} |"
    yield "\n| input | shape | dtypes |\n| --- | --- | --- |"
    for name, spec in description["inputs"].items():
        notes = [", broadcastable"] * spec["broadcasts"] + [", optional"] * spec["optional"]
        notes += [", last axis optional"] * variant.tensors[name].may_omit_last
        shape = f"({', '.join(spec['shape'])}){''.join(notes)}"
        yield f"| `{name}` | {shape} | {', '.join(spec['dtypes'])} |"
    yield "\n| output | shape | dtype |\n| --- | --- | --- |"
    for name, spec in description["outputs"].items():
        yield f"| `{name}` | ({', '.join(spec['shape'])}) | {spec['dtype']} |"
    if description["steps"]:
        yield "\n| step | shape | part of the formula | meaning |\n| --- | --- | --- | --- |"
        yield from map(_step_row, description["steps"]["names"])
    if properties := description["parameters"]["properties"]:
        yield "\n| parameter | values | default | meaning |\n| --- | --- | --- | --- |"
    for name, schema in properties.items():
        default = f"`{json.dumps(schema['default'])}`" if "default" in schema else "none"
        meaning = _cell(schema.get("description", ""))
        yield f"| `{name}` | {_cell(_values(schema))} | {default} | {meaning} |"
    if description["refuses"]:
        yield "\n| not accepted | reason |\n| --- | --- |"
    yield from (f"| `{name}` | {_cell(why)} |" for name, why in description["refuses"].items())


def _step_row(step: Mapping[str, Any]) -> str:
    """Returns the row of a step, with the inputs and parameters that it needs."""
    symbol = "" if step["symbol"] is None else _code(step["symbol"])
    needs = " or ".join(f"`{name}`" for name in step["needs"])
    meaning = _cell(step["summary"]) + (f" Only with {needs}." if needs else "")
    return f"| `steps.{step['name']}` | ({', '.join(step['axes'])}) | {symbol} | {meaning} |"


def _values(schema: Mapping[str, Any]) -> str:
    """Returns the values that a JSON schema accepts, in a few words."""
    if "anyOf" in schema:
        return " or ".join(_values(branch) for branch in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        known = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{json.dumps(value)}`" for value in known)
    if "prefixItems" in schema:
        return f"[{', '.join(_values(item) for item in schema['prefixItems'])}]"
    bounds = [
        f" {sign} {_number(schema[name])}" for name, sign in _BOUNDS.items() if name in schema
    ]
    return f"{schema.get('type', 'any')}{' and'.join(bounds)}"


def _number(value: float) -> str:
    """Returns a bound as a reader would write it: 1e9, not 1000000000.0."""
    return f"{value:g}".replace("e+0", "e") if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    """Escapes text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


def main() -> None:
    """Writes the files, and removes pictures of variants that no longer exist."""
    files = build_files() | draw_pictures()
    (ROOT / PICTURES).mkdir(exist_ok=True)
    for old in (ROOT / PICTURES).glob("*.svg"):
        if f"{PICTURES}/{old.name}" not in files:
            old.unlink()
    for path, text in files.items():
        (ROOT / path).write_text(text)
    import openapi_examples  # beside this file: tests run `build_files` from elsewhere

    openapi_examples.write()


if __name__ == "__main__":
    main()
