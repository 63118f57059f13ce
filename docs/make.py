"""Generates docs/variants.md with its pictures, the README's list and the table of settings.

It also generates the examples of the OpenAPI document.

`python docs/make.py` or `make docs` writes them; tests compare them with `build_files`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
SETTINGS: Final = {
    "Address and access": (
        "host", "port", "api_keys", "api_keys_file", "metrics_port", "cors_origins",
        "allowed_hosts",
    ),
    "Processes and devices": (
        "workers", "device", "devices", "device_process", "threads", "max_batch", "verify_batches",
        "tf32",
    ),
    "Variants and layers": (
        "variants", "checkpoints", "strict_checkpoints", "max_checkpoint_bytes", "preload",
        "max_device_layer_bytes",
    ),
    "Bounds of a request": ("max_body_bytes", "max_response_bytes", "max_scores"),
    "The queue": ("max_queue", "max_queue_bytes", "max_queue_flops"),
    "Times": (
        "read_timeout_s", "write_timeout_s", "request_timeout_s", "drain_s", "stuck_s",
        "stuck_device_s",
    ),
    "The log": ("request_log",),
}  # fmt: skip

_FLOATING: Final = "float64 or float32 or float16 or bfloat16"
_PARAMETERS: Final = "| parameter | values | default | meaning |\n| --- | --- | --- | --- |"
_BOUNDS: Final = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def build_files() -> dict[str, str]:
    """Returns the text of every generated page, by its path from the root."""
    every = list(catalogue.variants().values())
    return {
        "README.md": _with_part("README.md", _summary(every)),
        "docs/settings.md": _with_part("docs/settings.md", _settings()),
        "docs/variants.md": "\n".join(_page(every)) + "\n",
    }


def _with_part(path: str, lines: Iterator[str]) -> str:
    """Returns the text of a page with these lines as its generated part."""
    before, rest = (ROOT / path).read_text().split(BEGIN)
    return before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END, 1)[1]


def _settings() -> Iterator[str]:
    """Yields a table of the settings of each group.

    Raises:
        KeyError: a setting is in no group.
    """
    fields = dict(Settings.model_fields)
    for group, names in SETTINGS.items():
        yield f"### {group}\n\n| setting | default | meaning |\n| --- | --- | --- |"
        for name in names:
            field = fields.pop(name)
            default = _default(name, field.default)
            yield f"| `QKV_{name.upper()}` | {default} | {field.description} |"
        yield ""
    if fields:
        raise KeyError(f"settings without a group in docs/make.py: {', '.join(fields)}")


def _default(name: str, value: object) -> str:
    """Returns a default as a reader would say it: unset, false, 16 GiB, 2^50."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        if name.endswith("_bytes"):
            return f"{value / 2**30:g} GiB" if value >= 2**30 else f"{value / 2**20:g} MiB"
        number = _number(value)
        return number if "^" in number else f"`{value:g}`"
    return f"`{value}`"


def draw_pictures() -> dict[str, str]:
    """Returns the picture of every variant that has a matrix of weights, and others, by path."""
    beside = variant_pictures.to_svg(variant_pictures.draw_delta_beside_softmax())
    return {"docs/gated.svg": beside} | {
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
        "This page describes what every variant computes, takes, returns and costs. To choose one, "
        "see also [benchmarks](benchmarks.md) and [accuracy](accuracy.md).\n"
    )
    yield ", ".join(f"[{variant.name}](#{variant.name})" for variant in variants) + "\n"
    yield (
        "The pictures, also at `GET /v1/variants/{variant}/picture`, show the weights over all "
        f"keys, and causal. {variant_pictures.INPUT} {variant_pictures.COLOURS}\n"
    )
    rows = Counter(row for variant in variants for row in _parameter_rows(variant).values())
    shared = {
        name: row
        for variant in variants
        for name, row in _parameter_rows(variant).items()
        if rows[row] > 1
    }
    yield "## Shared names\n"
    yield (
        "Letters are [axes](http.md#letters); C is `chunk` - 1, W is E + 1, F is D + 1, N is at "
        "least S, and those of `gated` are [heads](state.md#gated-and-delta-rules). Where no dtype "
        "is named, inputs are *floating*: float64, float32, float16 or bfloat16. Every floating "
        "input has a gradient, in a state `state.sums` alone. `output` is of the inputs' dtype, "
        "any other output float32, or float64 for float64 inputs. The tensors of a "
        "[state](state.md) are optional inputs, and outputs with the same names and shapes. The "
        "first [steps](http.md#steps) are the inputs, with zeros for padding. A parameter that a "
        "variant refuses is an error that says why.\n"
    )
    yield "These parameters mean the same in every variant that names them:\n"
    yield _PARAMETERS
    yield from shared.values()
    for variant in variants:
        yield from _section(variant, shared)


def _parameter_rows(variant: Variant) -> dict[str, str]:
    """Returns a row for each parameter of a variant, by name."""
    rows = {}
    for name, schema in catalogue.describe(variant)["parameters"]["properties"].items():
        default = f"`{json.dumps(schema['default'])}`" if "default" in schema else "none"
        meaning = _cell(schema.get("description", ""))
        rows[name] = f"| `{name}` | {_cell(_values(schema))} | {default} | {meaning} |"
    return rows


def _section(variant: Variant, shared: Mapping[str, str]) -> Iterator[str]:
    """Yields the section of one variant in docs/variants.md; `shared` are rows of parameters."""
    description = catalogue.describe(variant)
    yield f"\n## {variant.name}\n\n{description['summary']}\n"
    if variant_pictures.has_matrix(variant):
        yield f"![The weights of {variant.name}](../{PICTURES}/{variant.name}.svg)\n"
    yield "| | |\n| --- | --- |"
    yield f"| formula | {_code(description['formula'])} |"
    yield from (f"| {word} | {_cell(description[word])} |" for word in ("paper", "cost", "weights"))
    for word, tensors in _tensors(variant).items():
        if tensors:
            yield f"| {word} | {', '.join(tensors)} |"
    own = {n: row for n, row in _parameter_rows(variant).items() if row != shared.get(n)}
    if others := [name for name in _parameter_rows(variant) if name not in own]:
        yield f"| [shared parameters](#shared-names) | {_names(others)} |"
    if description["refuses"]:
        yield f"| [refused parameters](#shared-names) | {_names(sorted(description['refuses']))} |"
    if own:
        yield f"\n{_PARAMETERS}"
    yield from own.values()
    if description["steps"]:
        yield "\n| step | shape | part of the formula | meaning |\n| --- | --- | --- | --- |"
        inputs = {name: spec["shape"] for name, spec in description["inputs"].items()}
        steps = description["steps"]["names"]
        yield from (_step_row(step) for step in steps if step["axes"] != inputs.get(step["name"]))


def _tensors(variant: Variant) -> dict[str, list[str]]:
    """Returns the tensors of a variant with their shapes, by what they are for."""
    description = catalogue.describe(variant)
    inputs: list[str] = []
    optional: list[str] = []
    state: list[str] = []
    for name, spec in description["inputs"].items():
        notes = ["broadcastable"] * spec["broadcasts"]
        notes += ["last axis optional"] * variant.tensors[name].may_omit_last
        dtypes = " or ".join(spec["dtypes"]).replace(_FLOATING, "floating")
        notes += [dtypes] * (dtypes != "floating")
        tensor = " ".join([f"`{name}` ({','.join(spec['shape'])})", *notes])
        is_state = name.startswith("state.")
        (state if is_state else optional if spec["optional"] else inputs).append(tensor)
    outputs = [
        f"`{name}` ({','.join(spec['shape'])})"
        for name, spec in description["outputs"].items()
        if not name.startswith("state.")
    ]
    return {"inputs": inputs, "optional inputs": optional, "outputs": outputs, "state": state}


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _step_row(step: Mapping[str, Any]) -> str:
    """Returns the row of a step, with the inputs and parameters that it needs."""
    symbol = "" if step["symbol"] is None else _code(step["symbol"])
    needs = " or ".join(f"`{name}`" for name in step["needs"])
    meaning = _cell(step["summary"]) + (f" Only with {needs}." if needs else "")
    return f"| `{step['name']}` | ({','.join(step['axes'])}) | {symbol} | {meaning} |"


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
    """Returns a bound as a reader would write it: 1e9, not 1000000000.0, and 2^31."""
    if not isinstance(value, int):
        return f"{value:g}".replace("e+0", "e")
    power = abs(value).bit_length() - 1
    if power > 20 and abs(value) == 2**power:
        return f"{'-' * (value < 0)}2^{power}"
    return str(value)


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
