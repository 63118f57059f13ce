"""Valid requests, and corruptions that make them invalid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from support.json_requests import EYE, TENSORS, random_layer, tensors
from support.known_requests import DTYPES, Case, as_array, as_json


def valid(name: str) -> dict[str, Any]:
    """Returns a valid request for a corruption."""
    draw = np.random.default_rng(7)
    mask = np.where(draw.random((4, 1, 5)) < 0.7, 0.5, -np.inf).astype(np.float32)
    document: dict[str, Any]
    if name == "lists":
        document = Case(tensors(2), {"causal": True, "scale": 0.5}, encoding="lists").document
        document["inputs"]["mask"] = [[True, True, False, True, True]] * 3
        document["inputs"]["key_lengths"] = [4]
    elif name == "base64":
        parameters = {"window": [2, None], "query_offset": "end", "dropout": 0.1, "seed": 3}
        more = {"mask": mask, "key_lengths": np.array([3, 5])}
        document = Case(tensors(4) | more, parameters).document
    elif name == "x":
        document = {
            "inputs": {"x": [[[1, 2, 3, 4.5], [0, -1, 0, 2]]]},
            "layer": random_layer("v1", 4, 6) | {"heads": 2},
            "parameters": {"softcap": 5},
        }
    else:
        embeddings = {
            n: as_json(np.ones((2, 4), "f4"), "base64") for n in ("query", "key", "value")
        }
        document = {"inputs": embeddings, "layer": random_layer("v2", 4, 6, bias=True)}
    return document


DOCUMENTS = ("lists", "base64", "x", "embeddings")
Draw = Callable[[st.SearchStrategy[Any]], Any]
Corruption = Callable[[Draw, dict[str, Any]], "dict[str, Any] | bytes | None"]
CORRUPTIONS: dict[str, tuple[tuple[str, ...], Corruption]] = {}


def corruption(*documents: str) -> Callable[[Corruption], Corruption]:
    """Registers a corruption of these documents; of all documents if none is named."""

    def add(function: Corruption) -> Corruption:
        CORRUPTIONS[function.__name__] = (documents or DOCUMENTS, function)
        return function

    return add


ONE = st.sampled_from
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
NOT_A_TENSOR: list[Any] = [
    None, "", "x", {}, {"a": 1}, [None], [[1, None]], [[1, "x"]], [[1, [2]]], [[1], 2], [[], [1]],
    [{}], [[1, True]], [[0.5, False]], True, [[True]], 5, [1, 2], [], [[]], [[[]]],
]  # fmt: skip


def tensors_of(document: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Returns the places of the required tensors."""
    groups = [document["inputs"], document.get("layer", {}).get("tensors", {})]
    return [(g, n) for g in groups for n in g if n not in ("mask", "key_lengths")]


@corruption()
def tensor_is_missing(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE([t for t in tensors_of(document) if not t[1].endswith("bias")]))
    del group[name]


@corruption()
def tensor_has_another_name(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE([t for t in tensors_of(document) if not t[1].endswith("bias")]))
    group[name + draw(TEXT) + "~/"] = group.pop(name)


@corruption()
def unknown_tensor(draw: Draw, document: dict[str, Any]) -> None:
    group = draw(ONE(tensors_of(document)))[0]
    # names that belong to no module of a layer are ignored
    begin = "" if group is document["inputs"] else "W_query."
    end = draw(TEXT.filter(lambda n: n not in ("mask", "weight", "bias")))
    if begin + end not in group:
        group[begin + end] = EYE
    else:
        group["W_query.?" if begin else "?"] = EYE


@corruption()
def tensor_is_no_tensor(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    junk = draw(ONE(NOT_A_TENSOR))
    group[name] = 5 if name.endswith("bias") and junk == [1, 2] else junk


@corruption("lists", "x")
def row_is_longer(draw: Draw, document: dict[str, Any]) -> None:
    name = draw(ONE([n for n in document["inputs"] if n != "key_lengths"]))
    row = document["inputs"][name]
    while isinstance(row[0], list):
        row = draw(ONE(row))
    row.append(row[0])


@corruption("lists")
def number_is_no_number(draw: Draw, document: dict[str, Any]) -> None:
    row = document["inputs"][draw(ONE(TENSORS))]
    while isinstance(row[0], list):
        row = draw(ONE(row))
    row[draw(ONE(range(len(row))))] = draw(ONE([None, "", "nan", "1", {}, [], [1], True, False]))


@corruption("lists", "x")
def number_is_too_large(draw: Draw, document: dict[str, Any]) -> None:
    row = document["inputs"][draw(ONE([n for n in document["inputs"] if n in (*TENSORS, "x")]))]
    while isinstance(row[0], list):
        row = draw(ONE(row))
    row[0] = draw(ONE([1e39, -1e39, 1e308]))


@corruption("base64")
def axis_is_longer(draw: Draw, document: dict[str, Any]) -> None:
    name, axis = draw(
        ONE([("query", 0), ("query", 1), ("query", 3)])
        | st.tuples(ONE(["key", "value"]), ONE([0, 1, 2]))
    )
    lengthen_axis(document["inputs"], name, axis)


@corruption("x", "embeddings")
def layer_does_not_fit(draw: Draw, document: dict[str, Any]) -> None:
    inputs, weights = document["inputs"], document["layer"]["tensors"]
    group, name = draw(ONE([(g, n) for g in (inputs, weights) for n in g]))
    if group is inputs and "x" in inputs:
        inputs["x"] = [[[1, 2, 3, 4, 5]]]
    else:
        into = -1 if group is inputs or document["layer"]["layout"] == "v2" else 0
        lengthen_axis(group, name, 0 if name.endswith("bias") else into)


def lengthen_axis(group: dict[str, Any], name: str, axis: int) -> None:
    array = as_array(group[name])
    more = np.repeat(array, 2, axis)
    keep = [slice(None)] * array.ndim
    keep[axis] = slice(array.shape[axis] + 1)
    group[name] = as_json(more[tuple(keep)], "base64")


@corruption()
def axis_is_empty(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    array = as_array(group[name])
    shape = list(array.shape)
    shape[draw(ONE(range(len(shape))))] = 0
    group[name] = as_json(np.zeros(shape, "f4"), draw(ONE(["lists", "base64"])))


@corruption()
def too_many_axes(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    array = as_array(group[name]).astype(np.float32)
    more = array.reshape((1,) * draw(st.integers(5, 8)) + array.shape)
    group[name] = as_json(more, draw(ONE(["lists", "base64"])))


@corruption("base64", "embeddings")
def rank_differs_from_the_query(draw: Draw, document: dict[str, Any]) -> None:
    name = draw(ONE(["key", "value"]))
    array = as_array(document["inputs"][name])
    document["inputs"][name] = as_json(draw(ONE([array[0], array[None]])), "base64")


@corruption("base64", "embeddings")
def dtypes_are_mixed(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    other = draw(ONE(["float64", "float16", "bfloat16", "int64", "bool"]))
    group[name] = as_json(as_array(group[name]).astype(DTYPES[other]), "base64")


@corruption("base64", "embeddings")
def base64_is_damaged(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    data = group[name]["data"]
    at = draw(st.integers(0, len(data) - 1))
    ways = {
        "cut": data[:at],
        "more": data + data[: 4 + at],
        "odd": data[:at] + draw(ONE("*-_ \n.ä€")) + data[at + 1 :],
        "none": draw(ONE([None, 5, [], {}, True])),
    }
    group[name]["data"] = ways[draw(ONE(list(ways)))]


@corruption("base64", "embeddings")
def declaration_is_invalid(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    tensor = group[name]
    key, bad = draw(
        st.tuples(st.just("dtype"), ONE(["int8", "float", "<f4", "", None, 4, ["float32"], {}]))
        | st.tuples(
            st.just("shape"),
            ONE(
                [None, 4, "4", {}, [-1], [2**63], [2**60], [2.0], [True], ["2"], [None], [[2]], []]
            ),
        )
        | st.tuples(TEXT.filter(lambda n: n not in tensor), st.none())
    )
    tensor[key] = bad


@corruption("base64", "embeddings")
def declaration_is_incomplete(draw: Draw, document: dict[str, Any]) -> None:
    group, name = draw(ONE(tensors_of(document)))
    del group[name][draw(ONE(["dtype", "shape", "data"]))]


@corruption("lists", "base64")
def mask_does_not_fit(draw: Draw, document: dict[str, Any]) -> None:
    masks = [
        [[0, 1, 0, 1, 0]], [[1, 1, 1, 1, 1]], 1, [True, False], [[True] * 6], [[True] * 5] * 2,
        [[[[[True]]]]], [["x"]], [None], None, "true", [[]], [], {}, [[1, True, 0, 0, 0]],
        as_json(np.zeros((1, 5), np.int64), "base64"), as_json(np.zeros((7, 5), "f4"), "base64"),
    ]  # fmt: skip
    document["inputs"]["mask"] = draw(ONE(masks))


@corruption("lists", "base64")
def key_lengths_do_not_fit(draw: Draw, document: dict[str, Any]) -> None:
    count = 1 if document["inputs"]["key_lengths"] == [4] else 2
    number = draw(ONE([-1, 6, 2**62, 2**63, 1.5, "NaN", "Infinity", True, None, "3", [3], 1e300]))
    lengths = [[number] * count, [3] * (count + 1), 3, [], "3", None, {}, [[3] * count]]
    lengths.append(as_json(np.full(count, 3.0, "f4"), "base64"))
    lengths.append(as_json(np.full(count, -1), "base64"))
    document["inputs"]["key_lengths"] = draw(ONE(lengths))


BAD_PARAMETERS: dict[str, list[Any]] = {
    "causal": [None, 0, 1, "true", [], {}],
    "query_offset": [None, 1.5, "start", "", True, [0], {}, 2**31, -(2**31) - 1, 2**63],
    "scale": ["1", True, [], {}, "NaN", "Infinity", 1e10, -1e300],
    "softcap": [0, -1, 1e10, "1", False, [], {}, "Infinity"],
    "window": [1, "1", [], [1], [1, 2, 3], [-1, 1], [1, -1], [1.5, 1], ["1", 1], [True, 1], {}],
    "dropout": [None, 1, 1.0, -0.1, "0", True, [], {}, 2],
    "seed": [None, -1, 1.5, "1", True, [], {}],
}  # fmt: skip


@corruption()
def parameter_is_invalid(draw: Draw, document: dict[str, Any]) -> None:
    name = draw(ONE(list(BAD_PARAMETERS)))
    document.setdefault("parameters", {})[name] = draw(ONE(BAD_PARAMETERS[name]))


@corruption()
def unknown_parameter(draw: Draw, document: dict[str, Any]) -> None:
    name = draw(
        TEXT.filter(lambda n: n not in BAD_PARAMETERS) | ONE(["Causal", "is_causal", "a/b~"])
    )
    document.setdefault("parameters", {})[name] = draw(ONE([None, 1, True, [], {}]))


BAD_FIELDS: dict[str, list[Any]] = {
    "parameters": [None, [], 1, "causal", True, [["causal", True]]],
    "outputs": [[], "output", ["nothing"], [1], [None], [["output"]], {}, 1, True, ["output", ""]],
    "weights": ["some", "", "Full", None, 1, True, [], {}, {"rows": "all"}, {"nothing": 1}],
    "dtype": ["float", "int64", "bool", "", None, 32, [], {}, True],
    "encoding": ["list", "", "safetensors", 64, [], {}, True],
    "layer": ["mine", "", 1, True, [], 1.5],
    "inputs": [None, [], 1, "query", True, {}, [EYE]],
}


@corruption()
def field_is_invalid(draw: Draw, document: dict[str, Any]) -> None:
    name = draw(ONE(list(BAD_FIELDS)))
    document[name] = draw(ONE(BAD_FIELDS[name]))


@corruption()
def unknown_field(draw: Draw, document: dict[str, Any]) -> None:
    known = (*BAD_FIELDS, "inputs")
    name = draw(TEXT.filter(lambda n: n not in known) | ONE(["Inputs", "query", "a/b~c", ""]))
    document[name] = draw(ONE([None, 1, True, [], {}, EYE]))


@corruption("lists", "base64")
def weights_requested_and_none(draw: Draw, document: dict[str, Any]) -> None:
    document |= {"outputs": ["output", "weights"], "weights": "none"}


BAD_LAYER: dict[str, list[Any]] = {
    "layout": ["v3", "", "V1", None, 1, [], {}, True],
    "heads": [0, -1, 4, 5, 7, 65537, 2**62, True, "2", 1.0, [2], {}],
    "tensors": [None, [], 1, "W", {}, True],
}


@corruption("x", "embeddings")
def layer_is_invalid(draw: Draw, document: dict[str, Any]) -> None:
    name = draw(ONE(list(BAD_LAYER)))
    document["layer"][name] = draw(ONE(BAD_LAYER[name]))


@corruption("x", "embeddings")
def layer_has_missing_or_unknown_fields(draw: Draw, document: dict[str, Any]) -> None:
    layer = document["layer"]
    if draw(st.booleans()):
        del layer[draw(ONE(["layout", "tensors"]))]
    else:
        layer[draw(TEXT.filter(lambda n: n not in ("layout", "tensors", "heads")))] = None


@corruption("x")
def x_beside_its_roles(draw: Draw, document: dict[str, Any]) -> None:
    inputs = document["inputs"]
    inputs[draw(ONE(TENSORS))] = inputs["x"]


@corruption("lists")
def x_without_a_layer(draw: Draw, document: dict[str, Any]) -> None:
    inputs = document["inputs"]
    inputs["x"] = inputs["query"] if draw(st.booleans()) else inputs.pop("query")


@corruption("x")
def projection_in_two_spellings(draw: Draw, document: dict[str, Any]) -> None:
    weights = document["layer"]["tensors"]
    name = draw(ONE(["W_key", "W_value"]))
    weights[f"{name}s"] = weights[name]


@corruption()
def body_is_cut(draw: Draw, document: dict[str, Any]) -> bytes:
    body = json.dumps(document).encode()
    return body[: draw(st.integers(0, len(body) - 1))]


@corruption()
def body_has_trailing_bytes(draw: Draw, document: dict[str, Any]) -> bytes:
    more: bytes = draw(ONE([b"}", b"x", b"{}", b"\0", b",", b"\xff"]))
    return json.dumps(document).encode() + more


@corruption()
def body_is_no_object(draw: Draw, document: dict[str, Any]) -> bytes:
    return json.dumps(draw(ONE([[document], [], None, 1, "x", json.dumps(document)]))).encode()


@corruption()
def duplicate_name(draw: Draw, document: dict[str, Any]) -> bytes:
    body = json.dumps(document)
    found: re.Match[str] = draw(ONE(list(re.finditer(r'"\w+": ', body))))
    return f"{body[: found.start()]}{found[0]}0, {body[found.start() :]}".encode()


@corruption()
def bytes_are_no_utf8(draw: Draw, document: dict[str, Any]) -> bytes:
    body = json.dumps(document).encode()
    at = draw(st.integers(0, len(body) - 1))
    odd: bytes = draw(ONE([b"\xff", b"\x80", b"\xc3(", b"\xed\xa0\x80"]))
    return body[:at] + odd + body[at + 1 :]
