"""Reads all that is known of a layer: `config.json`, and the operator's file beside it.

The file is TOML: fields of a layer and parameters of a variant, for all layers, or in a table for
the blocks whose paths begin with its name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import pydantic

from qkv.attention import catalogue
from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.input_norm import InputNorm
from qkv.attention.layers.layer_options import NESTED_FIELDS, LayerOptions
from qkv.attention.layers.layer_sizes import LayerSizes, head_counts, sizes_of
from qkv.attention.layers.layout_catalogue import Layout, Shapes
from qkv.attention.layers.qk_norm import QKNorm
from qkv.errors import InvalidContent, format_value
from qkv.jobs.fields import field_error
from qkv.jobs.loaded.layer_mark import Mark, digest_of
from qkv.jobs.loaded.model_config import LayerConfig, read_config
from qkv.wire.checkpoint.checkpoint import read_document
from qkv.wire.plain_json import load_names

_MAX_CONFIG: Final = 16 << 20  # bytes of config.json
_MAX_TOML: Final = 256 << 10  # bytes of the file beside it: a line for each of 4,096 layers
_MAX_PARTS: Final = 16  # of a dotted key: tomllib takes time and memory by their square
_PART: Final = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY: Final = re.compile(
    rf"""(?<![\w\\-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{_MAX_PARTS}}}"""
)
_PARAMETERS: Final = ("causal", "scale", "softcap", "window")
_POSITIONS: Final = {"rope": "rotary", "alibi": "alibi"}
_NO_CONFIG: Final = "there is no config.json"
_OF_REQUESTS: Final = ("input", "prefix")  # fields of a layer that the file does not have
_LINES: Final = {
    "positions": 'positions = "none", rope = {base = 10000.0} or alibi = true',
    "causal": "causal = true or causal = false",
    "rope": "rope = {base = 10000.0}",
    "qk_norm": "qk_norm = {eps = 1e-6} or qk_norm = {eps = 1e-6, offset = 1}",
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
    ignore: list[str] | None = None
    mark: Mark | None = None
    longer: bool = False


class LayerSettings(NamedTuple):
    """The fields, parameters and norm of a layer, without its tensors.

    Attributes:
        options: its fields.
        parameters: of a variant.
        norm: in front of the attention; None: not known.
        norm_module: the name of its module beside the attention; None: a usual one.
        ignored: fields of the configuration that the operator's file passes over.
        mark: of a description that was proven and not changed; None: there is none.
        is_longer: requests may be longer than the description holds for.
    """

    options: LayerOptions
    parameters: Mapping[str, Any]
    norm: InputNorm | None
    norm_module: str | None
    ignored: tuple[str, ...]
    mark: Mark | None = None
    is_longer: bool = False


class MissingLines(InvalidContent):
    """Lines of the operator's file that are missing for a layer.

    Args:
        lines: an example of each line, by the name of its field.
        reasons: why they are needed.
        path: of the file.
    """

    def __init__(self, lines: Mapping[str, str], reasons: Sequence[str], path: Path) -> None:
        self.lines, self.reasons, self.path = dict(lines), list(dict.fromkeys(reasons)), path
        super().__init__(self.text(""))

    def __or__(self, other: MissingLines) -> MissingLines:
        """Returns the lines of both layers."""
        return MissingLines(self.lines | other.lines, self.reasons + other.reasons, self.path)

    def text(self, table: str) -> str:
        """Returns the reasons and the lines, for a table of layers; "": for all layers."""
        where = f' below [layers."{table}"]' if table else ""
        return (
            f"{'; '.join(self.reasons)}; write{where} into {self.path}: "
            f"{'; '.join(self.lines.values())}"
        )


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
        kinds = self._toml.pop("kinds", {})
        self._kinds = _kinds_by_block(kinds, self._toml_path)
        for fields in (self._toml, *tables.values(), *self._kinds.values()):
            self._validated(fields)
        self._unused = {f'[layers."{name}"]': "the beginning of a block's path" for name in tables}
        self._unused |= {_in_kinds(block): "the name of a layer" for block in self._kinds}
        for fields in (self._toml, *tables.values()):
            for name in fields.get("ignore", ()):
                self._unused[_ignore(name)] = "a field of config.json"
        if "positions" in self._toml:
            self._unused["positions"] = "a table of layers, because config.json gives those of all"

    def settings_of(
        self, block: str, path: str, layouts: Mapping[str, Layout], shapes: Shapes
    ) -> LayerSettings:
        """Returns what the files say about a layer.

        Args:
            block: the path of its block, or `path` if the block has several layers.
            path: of its attention.
            layouts: that its names and shapes fit.
            shapes: of its tensors, by name without the prefix.

        Raises:
            MissingLines: the files leave something open.
            InvalidContent: they are wrong.
        """
        sizes = sizes_of(next(iter(layouts.values())), shapes)
        if len(layouts) == 1 and sizes.problem:
            raise InvalidContent(sizes.problem)
        mark = self._mark_of(block, shapes)
        config = LayerConfig()  # a proven description has all that a layer needs
        if mark is None:
            config = LayerConfig(asks=self._asks_without_config(layouts))
        if mark is None and self._config is not None:
            config = read_config(self._config, path, sizes.hidden_width, self._ignored(block))
            for name in config.ignored:
                self._unused.pop(_ignore(name), None)
        file_fields = self._fields_of(block, config)
        given = {n: v for n, v in file_fields.model_dump(exclude_unset=True).items() if v != "auto"}
        layout = _layout_of(layouts, file_fields, config)
        self._check_known(given, config, [layout.name] if layout else list(layouts), sizes)
        assert layout is not None
        fields = _options(given, file_fields, config, layout)
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
        is_longer = file_fields.longer
        return LayerSettings(options, parameters, norm, module, config.ignored, mark, is_longer)

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
        fields = self._lines_of(block)
        if config.positions is None:
            self._unused.pop("positions", None)
        elif not any("positions" in table for table in self._tables_of(block)):
            fields.pop("positions", None)
        for name in accumulate(block.split("."), "{}.{}".format):
            self._unused.pop(f'[layers."{name}"]', None)
        self._unused.pop(_in_kinds(block), None)
        return self._validated(fields)

    def _mark_of(self, block: str, shapes: Shapes) -> Mark | None:
        """Returns the mark of a layer whose description is as it was proven; None: it is not."""
        lines = self._lines_of(block)
        mark = self._validated(lines).mark
        if mark is None or mark.digest != digest_of(lines, lines["mark"], shapes):
            return None
        return mark

    def _ignored(self, block: str) -> tuple[str, ...]:
        """Returns the fields of the configuration that the operator's file passes over."""
        return tuple(self._lines_of(block).get("ignore", ()))

    def _lines_of(self, block: str) -> dict[str, Any]:
        """Returns the lines of the operator's file for a block."""
        lines = dict(self._toml)
        for table in self._tables_of(block):
            lines |= table
        return lines

    def _tables_of(self, block: str) -> list[Mapping[str, Any]]:
        """Returns the tables of a block: the kind that it is of, and those with longer names last.

        A line by hand replaces one of a kind, which then is not proven any more.
        """
        names = accumulate(block.split("."), "{}.{}".format)
        return [
            *(self._kinds[name] for name in (block,) if name in self._kinds),
            *(self._tables[name] for name in names if name in self._tables),
        ]

    def _validated(self, fields: Mapping[str, Any]) -> _FileFields:
        """Returns fields of the operator's file.

        Raises:
            InvalidContent: one is unknown or wrong.
        """
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

    def _asks_without_config(self, layouts: Mapping[str, Layout]) -> dict[str, str]:
        """Returns what is open where there is no configuration."""
        has_positions = any(layout.rotary_order or layout.alibi for layout in layouts.values())
        return dict.fromkeys(("causal", "positions") if has_positions else ("causal",), _NO_CONFIG)

    def _check_known(
        self,
        given: Mapping[str, Any],
        config: LayerConfig,
        layouts: Sequence[str],
        sizes: LayerSizes,
    ) -> None:
        """Raises an error that asks for all that neither file says."""
        asks, lines = dict[str, str](), dict(_LINES)
        if len(layouts) > 1:
            asks["layout"] = f"names and shapes fit {', '.join(layouts)}"
            lines["layout"] = f'layout = "{layouts[0]}"'
        if config.fields.get("heads") is None:
            has_config = self._config is not None
            asks["heads"] = "config.json has no number of heads" if has_config else _NO_CONFIG
            counts = head_counts(layout_catalogue.known()[layouts[0]], sizes)
            lines["heads"] = f"heads = {counts[0].heads if counts else 1}"
        asks |= config.asks
        if sizes.norms and config.asks:
            asks["qk_norm"] = "the numbers of the norms of queries and keys are not known"
        if {"rope", "alibi"} & given.keys():
            asks.pop("positions", None)
        if given.get("positions") == "rotary" and not {"rope"} & {*given, *config.fields}:
            asks["rope"] = "the rotary embedding is not known"
        missing = [field for field in asks if field not in given]
        if missing:
            raise MissingLines(
                {field: lines[field] for field in missing},
                [asks[field] for field in missing],
                self._toml_path,
            )


def _kinds_by_block(kinds: object, path: Path) -> dict[str, dict[str, Any]]:
    """Returns the table of each block in `blocks` of a kind, as `qkv describe` writes them.

    Raises:
        InvalidContent: they are no such tables.
    """
    found: dict[str, dict[str, Any]] = {}
    for table in kinds.values() if isinstance(kinds, dict) else [kinds]:
        blocks = table.get("blocks") if isinstance(table, dict) else None
        is_list = isinstance(blocks, list) and all(isinstance(block, str) for block in blocks)
        if not isinstance(table, dict) or not isinstance(blocks, list) or not is_list:
            raise InvalidContent(f"{path}: kinds is wrong: expected tables with blocks, a list")
        fields = {name: value for name, value in table.items() if name != "blocks"}
        found |= dict.fromkeys(blocks, fields)
    return found


def _in_kinds(block: str) -> str:
    return f'block "{block}" of [kinds]'


def _ignore(name: str) -> str:
    return f'ignore = ["{name}"]'


def _layout_of(
    layouts: Mapping[str, Layout], file_fields: _FileFields, config: LayerConfig
) -> Layout | None:
    """Returns the layout of a layer; None: several fit, and neither file names one.

    Raises:
        InvalidContent: the operator's file names a layout that does not exist.
    """
    if file_fields.layout != "auto":
        return layout_catalogue.find(file_fields.layout, "/layout")
    if config.layout is not None:  # names and shapes may fit another one only, as GPT-BigCode's
        return layout_catalogue.known()[config.layout]
    return next(iter(layouts.values())) if len(layouts) == 1 else None


def _options(
    given: Mapping[str, Any], file_fields: _FileFields, config: LayerConfig, layout: Layout
) -> dict[str, Any]:
    """Returns the fields of a layer: those of the operator's file, else of the configuration."""
    names = LayerOptions.model_fields.keys() - _PARAMETERS
    fields = dict(config.fields) | {n: value for n, value in given.items() if n in names}
    positions = file_fields.positions or config.positions
    if file_fields.positions is not None:
        fields = {n: v for n, v in fields.items() if _POSITIONS.get(n, positions) == positions}
    elif file_fields.alibi:
        fields.pop("rope", None)
    if positions == "alibi" and "alibi" not in given:
        fields["alibi"] = layout.alibi or True
    return fields


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
