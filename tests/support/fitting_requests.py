"""Requests whose tensors fit together, for a generator that knows only the OpenAPI document.

A schema describes single tensors, not that S is the same in key and value. Generated values that do
not depend on the tensors are kept: parameters, outputs, dtype, encoding.
"""

from __future__ import annotations

import json as stdlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from qkv.attention import catalogue
from qkv.attention.signature import Input, fixed_size
from qkv.attention.variant import Variant
from qkv.tensors import FLOATING, RawTensor
from qkv.wire import json, open_inference, safetensors
from qkv.wire.message import Message
from support.drawn_requests import GATES
from support.known_requests import DTYPES, Array, as_json

_ROLES: Final = ("query", "key", "value")
_FIELDS: Final = ("outputs", "weights", "dtype", "encoding")
_GATES: Final = {gate for names in GATES.values() for gate in names}
_WIDTH: Final = 8  # width of a layer's projections


class Fitting:
    """Draws requests that fit a path; the same seed draws the same.

    Args:
        path: that of the operation, with the model name filled in.
        seed: the seed of the numbers.
    """

    def __init__(self, path: str, seed: int) -> None:
        self._path, self._draw = path, np.random.default_rng(seed)
        self._form: str | None = None  # encoding of tensors; None: any

    def document(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a JSON body in place of one that fits the schema."""
        if self._path == "/v1/convert":
            return self._conversion(given)
        if self._path == "/v1/compare":
            return self._comparison(given)
        if self._path == "/v1/sweep":
            return self._sweep(given)
        if self._path.startswith("/v1/verify"):
            return self._case(given)
        variant = self._variant
        if self._path.startswith("/v2"):
            return self._inference(variant, given)
        return self._run(variant, given)

    def body(self) -> tuple[bytes, int | None]:
        """Returns a binary body, and for the Open Inference Protocol the length of its JSON."""
        self._form = "base64"
        if self._path == "/v1/convert":
            fields = self._conversion({})
            return self._file(fields, "tensors", fields.pop("tensors")), None
        if self._path == "/v1/compare":
            fields = self._comparison({})
            return self._file(fields, "inputs", fields.pop("inputs")), None
        if self._path.startswith("/v1/verify"):
            return self._file(self._case({}), "outputs", {}), None
        variant = self._variant
        if self._path.startswith("/v2"):
            arrays = self._inputs(variant)
            raw = {name: RawTensor.from_numpy(array) for name, array in arrays.items()}
            binary = raw if self._chance() else {}
            chunks, length = open_inference.encode(Message({}, raw), "inputs", binary)
            return b"".join(chunks), length
        fields = self._run(variant, {})
        return self._file(fields, "inputs", fields.pop("inputs")), None

    @property
    def _variant(self) -> Variant:
        """The path's variant, or softmax if the path names no variant."""
        every = catalogue.variants()
        return every.get(self._path.split("/")[3], every["softmax"])

    def _file(self, fields: dict[str, Any], group: str, tensors: dict[str, Any]) -> bytes:
        text = json.dump({group: tensors, **fields})
        message = json.decode(text, group)
        return b"".join(safetensors.encode(message, group))

    def _chance(self) -> bool:
        return bool(self._draw.random() < 0.5)

    def _size(self, most: int = 5) -> int:
        return int(self._draw.integers(1, most + 1))

    def _numbers(self, shape: Sequence[int], dtypes: Sequence[str] = ("float32",)) -> Array:
        dtype = str(self._draw.choice(list(dtypes)))
        if dtype == "bool":
            return self._draw.random(shape) < 0.7
        return self._draw.normal(size=shape).astype(DTYPES[dtype])

    def _inputs(self, variant: Variant, rule: str = "linear") -> dict[str, Array]:
        sizes = {letter: self._size() for letter in "BGLSDEMIOR"}
        sizes["H"] = sizes["G"] * self._size(3)
        sizes |= {"V": sizes["G"], "T": sizes["G"], "J": sizes["H"], "Z": 1}
        sizes["N"] = sizes["S"] + self._size()
        return {
            spec.name: self._input(spec, sizes)
            for spec in variant.inputs.values()
            if not spec.is_optional
            or (spec.name in GATES[rule] if spec.name in _GATES else self._chance())
        }

    def _input(self, spec: Input, sizes: Mapping[str, int]) -> Array:
        shape = [fixed_size(letter) or sizes[letter] for letter in spec.letters]
        if spec.broadcasts:
            shape = [1 if self._chance() else n for n in shape]
        if spec.name == "key_lengths":
            return self._draw.integers(0, sizes["S"] + 1, shape)
        # one dtype for all: JSON lists get the dtype of the request, base64 keeps its own
        return self._numbers(shape, [d for d in spec.dtypes if d in ("float32", "bool")])

    def _run(self, variant: Variant, given: Mapping[str, Any]) -> dict[str, Any]:
        rule = (given.get("parameters") or {}).get("rule", "linear")
        arrays = self._inputs(variant, rule)
        fields: dict[str, Any] = {name: given[name] for name in _FIELDS if name in given}
        if "parameters" in given:
            fields["parameters"] = dict(given["parameters"])
            if any(name.endswith("_projection") for name in arrays):
                fields["parameters"].pop("rank", None)  # the projection determines the rank
        if fields.get("outputs"):
            self._fit_state(variant, arrays, fields)
        if "weights" in fields:
            fields["weights"] = self._form_of_weights(variant, arrays, fields["weights"])
            if fields["weights"] != "full":  # other forms restrict the outputs
                fields.pop("outputs", None)
        shape = self._output(variant, arrays)
        # lists get the dtype in `dtype`; base64 is float32, the default
        form = self._form or ("lists" if "dtype" in fields or self._chance() else "base64")
        if set(_ROLES) <= arrays.keys() and self._chance():
            fields["layer"] = self._layer(arrays, form)
            shape = [*arrays["query"].shape[:2], _WIDTH]
        if self._path.startswith("/v1/gradients"):
            arrays["grad_output"] = self._numbers(shape)
        return {"inputs": {name: as_json(a, form) for name, a in arrays.items()}, **fields}

    def _fit_state(
        self, variant: Variant, arrays: dict[str, Array], fields: dict[str, Any]
    ) -> None:
        """Asks for a whole state, and for all steps, instead of parts; with what a state needs."""
        asked = (n.partition(".")[0] for n in fields["outputs"])
        fields["outputs"] = [*dict.fromkeys(asked)]
        if "state" not in fields["outputs"]:
            return
        fields["parameters"] = {**fields.get("parameters", {}), **variant.state_needs}
        if "L" in variant.inputs.get("query", variant.inputs["value"]).letters:
            B, H, _, D = arrays["query"].shape
            arrays["query"] = self._numbers((B, H, arrays["key"].shape[2], D))

    def _form_of_weights(self, variant: Variant, arrays: Mapping[str, Array], given: Any) -> Any:
        """Returns the form with rows and keys that exist."""
        if not isinstance(given, dict):
            return given
        rows, keys = arrays[next(iter(arrays))].shape[-2], self._sizes(variant, arrays)
        most = keys[variant.outputs["weights"].letters[-1]]
        return {
            name: [row % rows for row in value]
            if name == "rows"
            else min(value, most)
            if name == "top_k"
            else value
            for name, value in given.items()
        }

    def _output(self, variant: Variant, arrays: Mapping[str, Array]) -> list[int]:
        sizes = self._sizes(variant, arrays)
        sizes |= {"H": sizes.get("H", sizes.get("J", 1))}
        return [fixed_size(x) or sizes[x] for x in variant.outputs["output"].letters]

    def _sizes(self, variant: Variant, arrays: Mapping[str, Array]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, array in arrays.items():
            if not variant.inputs[name].broadcasts:
                sizes |= dict(zip(variant.inputs[name].letters, array.shape, strict=True))
        return sizes

    def _layer(self, arrays: dict[str, Array], form: str) -> dict[str, Any]:
        """Returns a layer around the variant; its embeddings replace query, key and value."""
        B, _, L, _ = arrays["query"].shape
        S, M = arrays["key"].shape[-2], self._size()
        for name in _ROLES:
            arrays[name] = self._numbers((B, L if name == "query" else S, M))
        for name in arrays.keys() & _GATES:
            arrays[name] = arrays[name][:, 0]  # the layer has one head, and the request no axis
        arrays.pop("mask", None)
        for name in arrays.keys() & {"alibi_slopes", "sinks"}:
            arrays[name] = arrays[name][:1]  # the layer has one head
        layout = str(self._draw.choice(["v1", "v2"]))
        return {"layout": layout, "tensors": self._weights(layout, M, form)}

    def _weights(self, layout: str, width: int, form: str) -> dict[str, Any]:
        shape, suffix = ((width, _WIDTH), "") if layout == "v1" else ((_WIDTH, width), ".weight")
        return {f"W_{role}{suffix}": as_json(self._numbers(shape), form) for role in _ROLES}

    def _comparison(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a comparison of variants that take the same inputs, with parameters that fit."""
        fields = {n: given[n] for n in ("dtype", "encoding", "rows") if n in given}
        B, H, N, D = (self._size() for _ in "BHND")
        arrays = {name: self._numbers((B, H, N, D)) for name in _ROLES}
        form = self._form or ("lists" if "dtype" in fields or self._chance() else "base64")
        names = [
            "efficient",
            "gated",
            "linear",
            "linformer",
            "mean",
            "sigmoid",
            "softmax",
            "taylor",
        ]
        fields |= {"variants": self._draw.choice(names, self._size(3)).tolist(), "repeats": 1}
        if self._chance():
            fields["anchor"] = {"variant": "softmax", "parameters": {"causal": self._chance()}}
        return {"inputs": {name: as_json(a, form) for name, a in arrays.items()}, **fields}

    def _sweep(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a sweep that is fast."""
        small = {"batch": 1, "heads": 2, "width": self._size(), "repeats": self._size(2)}
        lengths = [int(n) for n in self._draw.choice(64, 2, replace=False) + 1]
        fields = {n: given[n] for n in ("dtype", "seed") if n in given}
        return {"variants": ["softmax", "linear"], "lengths": lengths, **small, **fields}

    def _case(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a request that draws a small case; only the service knows its digest."""
        fields = {n: given[n] for n in ("seed", "dtype", "gradients", "encoding") if n in given}
        family = "grouped heads" if "key" in self._variant.inputs and self._chance() else "normal"
        return {"family": family, "sizes": {"B": self._size()}, **fields}

    def _conversion(self, given: Mapping[str, Any]) -> dict[str, Any]:
        given_fields = {
            n: given[n] for n in ("from", "to", "bias", "dtype", "encoding") if n in given
        }
        fields = {"from": "v1", "to": "v2"} | given_fields
        if fields["from"] not in ("v1", "v2"):
            fields["from"] = "auto"  # the tensors are those of v2
        if given.get("heads") or fields["to"] in ("neox", "bloom", "falcon", "phi3"):
            fields["heads"] = int(self._draw.choice([1, 2, 4, 8]))
        if (fields["from"] == "v1") == (fields["to"] == "v1") or fields["to"] == "mha":
            fields.pop("bias", None)  # there is no way from or to v1, or a bias leaves no square
        # the query of mha is square; the last row of a weight may become a bias
        width = _WIDTH if fields["to"] == "mha" else self._size() + 1
        form = self._form or ("lists" if "dtype" in fields or self._chance() else "base64")
        return fields | {"tensors": self._weights(fields["from"], width, form)}

    def _inference(self, variant: Variant, given: Mapping[str, Any]) -> dict[str, Any]:
        fields = {name: given[name] for name in ("id",) if name in given}
        arrays = self._inputs(variant)
        if given.get("outputs"):
            names = sorted(variant.outputs)[: len(given["outputs"])]
            fields["outputs"] = [{"name": name} for name in names]
        if given.get("parameters") is not None:
            causal = {"causal": True} if "causal" in variant.parameters.model_fields else {}
            fields["parameters"] = causal | {"binary_data_output": self._chance(), "priority": 1}
        entries = [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": open_inference.DATATYPES[array.dtype.name],
                "data": array.ravel().tolist(),
            }
            for name, array in arrays.items()
        ]
        return fields | {"inputs": entries}


def decode_document(document: Any) -> Message:
    """Returns the request of a JSON document."""
    return json.decode(stdlib.dumps(document).encode(), "inputs")


def with_other_numbers(message: Message, seed: int) -> Message:
    """Returns a request with the same fields, names, dtypes and shapes."""
    random = np.random.default_rng(seed)

    def other(raw: RawTensor) -> RawTensor:
        if raw.dtype in FLOATING:
            array = random.normal(size=raw.shape).astype(DTYPES[raw.dtype])
        else:  # booleans, and lengths that are in range
            array = random.choice(raw.numpy().ravel(), raw.shape)
        return RawTensor.from_numpy(array, is_untyped=raw.is_untyped)

    tensors = {name: other(raw) for name, raw in message.tensors.items()}
    layer = {name: other(raw) for name, raw in message.layer.items()}
    return Message(message.fields, tensors, layer, message.encoding)
