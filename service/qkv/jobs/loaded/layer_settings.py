"""Reads all that is known of a layer: `config.json`, and the operator's file beside it.

The file is TOML: fields of a layer and parameters of a variant, for all layers, or in a table for
the blocks whose paths begin with its name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import pydantic

from qkv.attention import catalogue
from qkv.attention.layers.input_norm import InputNorm
from qkv.attention.layers.layer_options import NESTED_FIELDS, LayerOptions
from qkv.attention.layers.layout_catalogue import Layout
from qkv.attention.layers.qk_norm import QKNorm
from qkv.errors import InvalidContent, format_value
from qkv.jobs.fields import field_error
from qkv.jobs.loaded.model_config import LayerConfig, read_config
from qkv.wire.checkpoint.checkpoint import read_document
from qkv.wire.plain_json import load_names

__all__ = ["LayerSettings", "ModelFiles", "NormFields"]

_MAX_CONFIG: Final = 16 << 20  # bytes of config.json
_MAX_TOML: Final = 256 << 10  # bytes of the file beside it: a line for each of 4,096 layers
_MAX_PARTS: Final = 16  # of a dotted key: tomllib takes time and memory by their square
_PART: Final = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY: Final = re.compile(
    rf"""(?<![\w\\-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{_MAX_PARTS}}}"""
)
_PARAMETERS: Final = ("causal", "scale", "softcap", "window")
_POSITIONS: Final = {"rope": "rotary", "alibi": "alibi"}
_OF_REQUESTS: Final = ("input", "prefix")  # fields of a layer that the file does not have
_EXAMPLES: Final = {
    "positions": 'positions = "none", rope = {base = 10000.0} or alibi = true',
    "window": "window = [4095, 0] or window = false",
    "softcap": "softcap = 50.0 or softcap = false",
    "scale": "scale = 0.125 or scale = false",
}


class NormFields(pydantic.BaseModel):
    """The norm in front of the attention, as the operator's file gives it."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    module: str
    kind: Literal["layer", "rms"]
    eps: Annotated[float, pydantic.Field(ge=0, le=1)]
    offset: Literal[0, 1] = 0


class _FileFields(LayerOptions):
    """The fields of the operator's file. False says that the model has no such parameter."""

    layout: str = "auto"
    positions: Literal["none", "rotary", "alibi"] | None = None
    causal: bool | None = None
    scale: Annotated[float, pydantic.Field(gt=0, le=1e6)] | Literal[False] | None = None
    input_norm: NormFields | None = None


class LayerSettings(NamedTuple):
    """The fields, parameters and norm of a layer, without its tensors.

    Attributes:
        options: its fields.
        parameters: of a variant.
        norm: in front of the attention; None: not known.
        norm_module: the name of its module beside the attention; None: a usual one.
    """

    options: LayerOptions
    parameters: Mapping[str, Any]
    norm: InputNorm | None
    norm_module: str | None


class ModelFiles:
    """The configuration of a model, and the operator's file beside it.

    Args:
        source: the path of the checkpoint in the settings: a file or a folder.

    Raises:
        InvalidContent: one of the files is no configuration.
        OSError: one cannot be read.
    """

    def __init__(self, source: Path) -> None:
        folder = source if source.is_dir() else source.parent
        self._toml_path = folder / "qkv.toml" if source.is_dir() else source.with_suffix(".toml")
        self._config = _read(folder / "config.json", _MAX_CONFIG, load_names)
        self._toml = _read(self._toml_path, _MAX_TOML, _parse_toml) or {}
        tables = self._toml.pop("layers", {})
        if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
            raise InvalidContent(f"{self._toml_path}: layers is wrong: expected tables of layers")
        self._tables: dict[str, dict[str, Any]] = tables
        self._unused = {f'[layers."{name}"]': "the beginning of a block's path" for name in tables}
        if "positions" in self._toml:
            self._unused["positions"] = "a table of layers, because config.json gives those of all"

    def settings_of(
        self, block: str, path: str, layouts: Mapping[str, Layout], width: int | None
    ) -> LayerSettings:
        """Returns what the files say about a layer.

        Args:
            block: the path of its block, or `path` if the block has several layers.
            path: of its attention.
            layouts: that its names and shapes fit.
            width: of its embeddings; None: not known.

        Raises:
            InvalidContent: the files are wrong, or leave something open.
        """
        config = LayerConfig()
        if self._config is not None:
            config = read_config(self._config, path, width)
        file_fields = self._fields_of(block, config)
        given = file_fields.model_dump(exclude_unset=True)
        layout = self._layout(block, layouts, file_fields, config)
        self._check_known(block, given, config, layout)
        names = LayerOptions.model_fields.keys() - _PARAMETERS
        fields = dict(config.fields) | {n: value for n, value in given.items() if n in names}
        positions = file_fields.positions or config.positions
        if file_fields.positions is not None:
            fields = {n: v for n, v in fields.items() if _POSITIONS.get(n, positions) == positions}
        elif file_fields.alibi:
            fields.pop("rope", None)
        if positions == "alibi" and "alibi" not in given:
            fields["alibi"] = layout.alibi or True
        if file_fields.positions == "rotary" and "rope" not in fields:
            raise self._ask(block, "the rotary embedding is not known", "rope = {base = 10000.0}")
        parameters = dict(config.parameters)
        parameters |= {name: given[name] for name in _PARAMETERS if name in given}
        parameters = {name: value for name, value in parameters.items() if value is not False}
        _check_parameters(parameters)
        norm, module = _norm_of(config, file_fields)
        try:
            options = LayerOptions.model_validate({**fields, "layout": layout.name})
        except pydantic.ValidationError as error:
            problem = field_error(error, list(LayerOptions.model_fields), nested=NESTED_FIELDS)
            raise InvalidContent(f"config.json: {problem.detail}") from None
        return LayerSettings(options, parameters, norm, module)

    def check_all_used(self) -> None:
        """Checks that the operator's file says nothing that belongs to no layer.

        Raises:
            InvalidContent: it does.
        """
        for name, expected in self._unused.items():
            raise InvalidContent(
                f"{self._toml_path}: {name:.300} is used by no layer: expected {expected}"
            )

    def _fields_of(self, block: str, config: LayerConfig) -> _FileFields:
        """Returns the fields of the operator's file for a layer.

        Only a table replaces positions of the configuration: a model with two parts may have the
        positions of one there.
        """
        fields = dict(self._toml)
        if config.positions is None:
            self._unused.pop("positions", None)
        else:
            fields.pop("positions", None)
        for name in accumulate(block.split("."), "{}.{}".format):
            if name in self._tables:
                fields |= self._tables[name]
                self._unused.pop(f'[layers."{name}"]', None)
        known = [name for name in _FileFields.model_fields if name not in _OF_REQUESTS]
        for name in _OF_REQUESTS:
            if name in fields:
                raise InvalidContent(
                    f"{self._toml_path}: unknown field {name!r}; known are {', '.join(known)}"
                )
        try:
            return _FileFields.model_validate(fields)
        except pydantic.ValidationError as error:
            problem = field_error(error, known, nested=NESTED_FIELDS)
            raise InvalidContent(f"{self._toml_path}: {problem.detail}") from None

    def _layout(
        self,
        block: str,
        layouts: Mapping[str, Layout],
        file_fields: _FileFields,
        config: LayerConfig,
    ) -> Layout:
        named = file_fields.layout if file_fields.layout != "auto" else config.layout
        if named is not None and named in layouts:
            return layouts[named]
        if len(layouts) == 1 and file_fields.layout == "auto":
            return next(iter(layouts.values()))
        raise self._ask(
            block,
            f"names and shapes fit {', '.join(layouts)}",
            f'layout = "{next(iter(layouts))}"',
        )

    def _check_known(
        self, block: str, given: Mapping[str, Any], config: LayerConfig, layout: Layout
    ) -> None:
        """Raises an error that asks for what neither file says."""
        if config.fields.get("heads") is None and "heads" not in given:
            whose = "there is no config.json" if self._config is None else "config.json has none"
            raise self._ask(
                block, f"the number of heads is not known, because {whose}", "heads = 12"
            )
        asks = dict(config.asks)
        if self._config is None and (layout.rotary_order or layout.alibi):
            asks["positions"] = "the positions are not known, because there is no config.json"
        if {"rope", "alibi"} & given.keys():
            asks.pop("positions", None)
        for field, reason in asks.items():
            if field not in given:
                raise self._ask(block, reason, _EXAMPLES[field])

    def _ask(self, block: str, reason: str, example: str) -> InvalidContent:
        # the fields of a block without a name are those of all layers
        table = f' below [layers."{_without_number(block)}"]' if block else ""
        return InvalidContent(f"{reason}; write {example}{table} into {self._toml_path}")


def _without_number(block: str) -> str:
    """Returns the part of the path of a block that the blocks beside it have too."""
    numbered = re.fullmatch(r"(.+)\.[0-9]+(\..*)?", block)
    return block if numbered is None else numbered[1]


def _norm_of(config: LayerConfig, file_fields: _FileFields) -> tuple[InputNorm | None, str | None]:
    if (given := file_fields.input_norm) is not None:
        numbers = QKNorm(eps=given.eps, offset=given.offset)
        return InputNorm(numbers, given.kind == "layer"), given.module
    return config.norm, None


def _check_parameters(parameters: Mapping[str, Any]) -> None:
    """Checks parameters as a request for softmax would, which has all that a model may give.

    Raises:
        InvalidContent: one is wrong.
    """
    parsed = catalogue.find("softmax").parse(parameters)
    for name, value in parameters.items():
        read = getattr(parsed, name)
        if value != (list(read) if isinstance(read, tuple) else read):  # JSON has no inf
            raise InvalidContent(
                f"parameter {name!r} is invalid: got {format_value(value)}, expected finite numbers"
            )


def _parse_toml(text: bytes) -> dict[str, Any]:
    """Parses TOML.

    Raises:
        ValueError: it is not TOML, or a key is too long. The message has no part of the text, which
            may be any file.
    """
    try:
        document = text.decode()
        if _LONG_KEY.search(document):
            raise ValueError(f"a dotted key is too long: expected at most {_MAX_PARTS} parts")
        return tomllib.loads(document)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at .*\)$", str(error))
        raise ValueError(f"it is not TOML {place[0] if place else ''}".rstrip()) from None


def _read(path: Path, max_bytes: int, parse: Callable[[bytes], object]) -> dict[str, Any] | None:
    """Returns the object in a file; None if there is none."""
    if not path.exists():
        return None
    try:
        document = parse(read_document(path, max_bytes))
    except (ValueError, RecursionError) as error:
        raise InvalidContent(f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise InvalidContent(f"{path}: expected an object")
    return document
