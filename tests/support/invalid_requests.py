"""The table of invalid requests to /v1: a valid request, a place in it, values refused there."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Final

from support.compare_requests import INPUTS, X

SOFTMAX: Final = "/v1/attention/softmax"
SQUARE: Final = [[1, 0], [0, 1]]
V1: Final = {"W_query": SQUARE, "W_key": SQUARE, "W_value": SQUARE}
V2: Final = {f"{name}.weight": SQUARE for name in V1}
BYTES: Final = {"dtype": "float32", "shape": [1, 2], "data": "AAAAAAAAAAA="}
NUMBERS: Final = {"dtype": "int64", "shape": [1], "data": "AQAAAAAAAAA="}
ROLES: Final = ("query", "key", "value")
CASE: Final = {
    "variant": "softmax", "family": "normal", "dtype": "float32", "parameters": {}, "sizes": {},
    "seed": 1, "digest": "0",
}  # fmt: skip
VALID: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "run": (SOFTMAX, {"inputs": dict.fromkeys(ROLES, SQUARE)}),
    "bytes": (SOFTMAX, {"inputs": dict.fromkeys(ROLES, BYTES)}),
    "linear": ("/v1/attention/linear", {"inputs": dict.fromkeys(ROLES, SQUARE)}),
    "item": ("/v1/attention/linear_layer", {"inputs": {"x": [1, -2], "weight": SQUARE}}),
    "layer": (SOFTMAX, {"inputs": {"x": SQUARE}, "layer": {"layout": "v1", "tensors": V1}}),
    "roles": (SOFTMAX, {
        "inputs": dict.fromkeys(ROLES, SQUARE),
        "layer": {"layout": "v2", "tensors": V2 | {"W_key.bias": [1, 2]}},
    }),
    "convert": ("/v1/convert", {"from": "v1", "to": "v2", "tensors": V1}),
    "compare": ("/v1/compare", {"inputs": INPUTS, "variants": ["linear", "mean"]}),
    "sweep": ("/v1/sweep", {"variants": ["mean"], "lengths": [8]}),
    "draw": ("/v1/verify/softmax", {}),
    "judge": ("/v1/verify/softmax", {"case": CASE, "outputs": {"output": [1]}}),
    "layers": ("/v1/layers", {"shapes": {"a": [1]}}),
}  # fmt: skip


class Missing:
    """Value of a place that is removed."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()


@dataclass(frozen=True)
class Refused:
    """Values that the service refuses at one place of a valid request.

    Attributes:
        request: name of the valid request.
        place: JSON pointer of the place; "" for values that are several fields.
        values: each is refused by itself.
        blamed: pointer of the problem, if it is not the place.
        words: part of the detail.
        status: status of the response.
        schema_accepts: True if the fault depends on tensors or on several fields, which no schema
            of generators covers.
    """

    request: str
    place: str
    values: tuple[Any, ...]
    blamed: str | None = None
    words: str = ""
    status: int = 422
    schema_accepts: bool = False

    @property
    def path(self) -> str:
        """Path of the request."""
        return VALID[self.request][0]

    @property
    def pointer(self) -> str:
        """Pointer of the problem."""
        return self.place if self.blamed is None else self.blamed

    def body(self, value: Any) -> dict[str, Any]:
        """Returns the valid request with the value at the place."""
        body = copy.deepcopy(VALID[self.request][1])
        if not self.place:
            return body | dict(value)
        *names, last = (n.replace("~1", "/").replace("~0", "~") for n in self.place.split("/")[1:])
        node: Any = body
        for name in names:
            node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
        if value is MISSING:
            del node[last]
        else:
            node[int(last) if isinstance(node, list) else last] = value
        return body

    def __str__(self) -> str:
        return self.request + self.place


def refused(request: str, place: str, *values: Any, **how: Any) -> Refused:
    """Returns a row of the table."""
    return Refused(request, place, values, **how)


def misfit(request: str, place: str, *values: Any, **how: Any) -> Refused:
    """Returns a row whose fault no schema covers."""
    return Refused(request, place, values, schema_accepts=True, **how)


NO_TEXT: Final[tuple[Any, ...]] = (None, 1, True, [], {})
NO_TENSOR: Final[tuple[Any, ...]] = (
    None, "", "x", {}, {"a": 1}, [None], [[1, None]], [[1, "x"]], [{}],
    [[1, True]], [[0.5, False]], True, [[True]], ["nan", "1"],
)  # fmt: skip
EMPTY: Final = BYTES | {"shape": [0, 2], "data": ""}


def heads(*counts: int) -> dict[str, Any]:
    """Returns query, key and value with these numbers of heads."""
    return {name: [[[[1, 0]]] * H] for name, H in zip(ROLES, counts, strict=True)}


NO_SHAPE: Final[tuple[Any, ...]] = (
    None,
    4,
    "4",
    {},
    [-1],
    [2.5],
    [True],
    ["2"],
    [None],
    [[2]],
    [1] * 9,
)

RUNS: Final = (
    refused("run", "/inputs", None, [], 1, "query", True, [SQUARE], {}, MISSING),
    *(refused("run", f"/inputs/{n}", MISSING, blamed="/inputs", words=n) for n in ROLES),
    refused("run", "/inputs/query~1~0", SQUARE, words="query/~"),
    refused("run", "/inputs/nope", SQUARE, words="'nope'"),
    refused("run", "/inputs/x", SQUARE),
    refused("run", "/inputs/query", *NO_TENSOR),
    refused("run", "/nope", None, 1, {}, SQUARE, words="'nope'"),
    refused("run", "/a~1b~0c", None, words="'a/b~c'"),
    refused("run", "/", None),
    misfit("run", "", {"outputs": ["weights"], "weights": "none"}, blamed="/weights"),
    misfit("run", "", {"outputs": ["output"], "weights": "stats"}, blamed="/weights"),
    misfit("run", "", {"outputs": ["scores"], "weights": {"pool": 2}}, blamed="/weights"),
    refused("run", "/outputs", [], "output", {}, 1, True),
    refused("run", "/outputs", ["nothing"], [1], [None], [["output"]], blamed="/outputs/0"),
    refused("run", "/outputs", ["output", "output"], ["output", ""], blamed="/outputs/1"),
    refused("run", "/weights", "half", "", "Full", "top_k", *NO_TEXT, ["stats"], {"bins": 1},
            words="top_k"),
    refused("run", "/weights/rows", [], 0, "all"),
    refused("run", "/weights/rows", [-1], [0.5], ["1"], blamed="/weights/rows/0"),
    misfit("run", "/weights/rows", [0, 2], blamed="/weights/rows/1", words="L=2"),
    refused("run", "/weights/top_k", 0, 1.5, "1", True),
    misfit("run", "/weights/top_k", 3, words="S=2"),
    refused("run", "/weights/pool", 0, -1, "4", None),
    refused("run", "/weights", {"pool": 1, "top_k": 1}),
    refused("item", "/weights/rows", [0], words="(B, I)"),
    refused("run", "/dtype", "float", "int64", "bool", "", 32, *NO_TEXT),
    refused("run", "/encoding", "raw", "", "safetensors", *NO_TEXT[1:]),
    refused("run", "/layer", "mine", "", 1.5, 1, True, [],
            words="expected an object with a name, or with layout, heads and tensors"),
    refused("run", "/parameters", None, [], 1, "causal", True, [["causal", True]]),
    refused("run", "/parameters/nope", *NO_TEXT, words="'nope'"),
    refused("run", "/parameters/a~1b~0", 1),
    refused("run", "/parameters/causal", None, 0, 1, "true", [], {}),
    refused(
        "run", "/parameters/query_offset",
        None, 1.5, 0.5, "start", "", True, [0], {}, 2**31, -(2**31) - 1, 2**63,
    ),
    refused("run", "/parameters/scale", "1", True, [], {}, "NaN", "Infinity", 1.1e9, -1e300),
    refused("run", "/parameters/softcap", 0, -1, 1e10, "1", False, [], {}, "Infinity"),
    refused("run", "/parameters/window", 1, "1", [1, 2, 3], {}),
    refused("run", "/parameters/window", [], [-1, 1], [2**63, 1], [1.5, 1], ["1", 1], [True, 1],
            blamed="/parameters/window/0"),
    refused("run", "/parameters/window", [1], [1, -1], blamed="/parameters/window/1"),
    refused("run", "/parameters/dropout", None, 1, 1.0, -0.1, "0", True, [], {}, 2),
    refused("run", "/parameters/seed", None, -1, 1.5, "1", True, [], {}),
    refused("run", "/inputs/mask", "true", None, [None], [["x"]], {}, [[1, True]], [[[[[True]]]]]),
    misfit("run", "/inputs/mask", NUMBERS),
    misfit("run", "/inputs/mask", [True] * 3, [[True] * 3], [[True] * 2] * 3),
    refused("run", "/inputs/key_lengths", [True], [1.5], ["NaN"], [None], ["3"], "3", None, {}),
    misfit("run", "/inputs/key_lengths", BYTES),
    misfit("run", "/inputs/key_lengths", [-1], [3], [1, 1], [], 2, [[1]], [2**62]),
    refused("run", "/inputs/sinks", ["no number"], words="sinks"),
    misfit("run", "/inputs/sinks", [0, 1], words="sinks has H=2 where query has H=1"),
    misfit("run", "/inputs/alibi_slopes", [[0.5]], words="wrong number of axes"),
    refused("run", "/inputs/query", [[[[[1, 0]]]]], [[1, [2]]], [[1], 2]),
    misfit("run", "/inputs/query", [1, 2], 5, [], [[]], [[[]]], [[1e39, 0]], [[], [1]]),
    misfit("run", "/inputs/query", [[1, 0, 0]], blamed="/inputs/key", words="query has D=3"),
    misfit("run", "/inputs/key", [[1, 0, 0]], [SQUARE]),
    misfit("run", "/inputs/value", [[1, 0]]),
    misfit("run", "/inputs", heads(3, 2, 2), heads(1, 2, 2), blamed="/inputs/query"),
    misfit("run", "/inputs", heads(2, 2, 1), heads(2, 1, 2), blamed="/inputs/value"),
    misfit("run", "/inputs", {n: [[[1, 0]]] * (1 + (n == "key")) for n in ROLES},
           blamed="/inputs/key", words="B=2"),
    refused("bytes", "/inputs/query/more", None, 1, blamed="/inputs/query"),
    *(refused("bytes", f"/inputs/query/{n}", MISSING, blamed="/inputs/query") for n in BYTES),
    refused("bytes", "/inputs/query/dtype", "int8", "float", "<f4", "", None, 4, ["float32"], {}),
    refused("bytes", "/inputs/query/shape", *NO_SHAPE),
    refused("bytes", "/inputs/query/data", None, 5, [], {}, True, "AAAA-AAAAAA=", "AAA AAAAAAA="),
    misfit("bytes", "/inputs/query/data", "", "AAAAAAAAAA==", "AAAAAAAAAAAAAAAA"),
    misfit("bytes", "/inputs/query/shape", [2**60], [2**30, 2**30], [0], [0, 2**60], [3],
           blamed="/inputs/query/data"),
    misfit("bytes", "/inputs/query", NUMBERS, words="got int64"),
    misfit("bytes", "/inputs/query", EMPTY),
    misfit("bytes", "/inputs/query/shape", [2**62] * 8, [2**62, 4, 0]),
    misfit("bytes", "/inputs/query", BYTES | {"dtype": "float16", "shape": [2, 2]},
           blamed="/inputs/key", words="float16 as query has"),
)  # fmt: skip

LAYERS: Final = (
    refused("layer", "/layer/layout", "v3", "", "V1", *NO_TEXT),
    refused("layer", "/layer/layout", MISSING),
    refused("layer", "/layer/heads", 0, -1, 65537, 2**62, True, "2", [2], {}),
    misfit("layer", "/layer/heads", 4, 5),
    refused("layer", "/layer/kv_heads", 0),
    refused("layer", "/layer/tensors", "W", *NO_TEXT, MISSING),
    *(misfit("layer", f"/layer/tensors/{n}", MISSING, blamed="/layer/tensors", words=n)
      for n in V1),
    refused("layer", "/layer/tensors/W_key", [[True]], None, "x", {}, [{}]),
    misfit("layer", "/layer/tensors/W_keys", SQUARE, blamed="/layer/tensors",
           words="'W_key' and 'W_keys'"),
    misfit("layer", "/layer/tensors/W_key", [[[[1]]]], [1], 1, [[]]),
    misfit("layer", "/layer/tensors/W_key", [[1, 0]], blamed="/inputs/x", words="M=1"),
    misfit("layer", "/inputs/x", [[1, 2, 3]], words="3"),
    misfit("layer", "/layer/tensors/W_query.~0", SQUARE),
    refused("layer", "/layer/more", None, 1, words="'more'"),
    refused("layer", "/layer/prefix", 1),
    refused("layer", "/layer/rope/order", "meta"),
    refused("layer", "/layer/rope/dims", 3),
    refused("layer", "/layer/rope/scaling", {"factor": 2},
            blamed="/layer/rope/scaling/rope_type"),
    refused("layer", "/layer/alibi", 1),
    refused("layer", "/layer/qk_norm/eps", -1),
    *(refused("layer", f"/inputs/{n}", SQUARE, words="x stands for") for n in ROLES),
    refused("layer", "/layer", None, blamed="/inputs/x", words="x needs a layer"),
    refused("layer", "/layer", {}, blamed="/layer/layout"),
    refused("roles", "/inputs/value", MISSING, blamed="/inputs"),
    misfit("roles", "/layer/tensors/W_key.bias", [1, 2, 3], 5, [[1]]),
    misfit("roles", "/layer/tensors/W_key.weight", [[1, 0, 0], [0, 1, 0]],
           blamed="/inputs/key", words="M=3"),
    refused("convert", "/nope", 1),
    refused("convert", "/layer", {}),
    refused("convert", "/from", MISSING, None, "v3", "V1", ["v1"]),
    refused("convert", "/to", MISSING, None, "v3"),
    refused("convert", "/tensors", MISSING, {}, [], None),
    refused("convert", "/tensors/W_key", [[True]], None, "x", {}),
    refused("convert", "/heads", 0, -1, True, "2", 65537),
    refused("convert", "/bias", None, "drop"),
    refused("convert", "/dtype", "bool", "int64"),
    refused("convert", "/encoding", "raw"),
    refused("layers", "/shapes", MISSING, {}, []),
    refused("layers", "/more", 1),
    refused("layers", "/shapes/a", 1, [-1], [2**28], [0.5], [True], [1] * 9),
)  # fmt: skip
TAYLOR: Final = {"variant": "taylor", "parameters": {"scale": 2}}
MEASUREMENTS: Final = (
    refused("compare", "/variants", [], MISSING, "linear", ["linear"] * 17),
    refused("compare", "/variants/1", 3),
    refused("compare", "/variants/1", "sotfmax", status=404),
    refused("compare", "/variants/1", {"variant": "sotfmax"}, status=404,
            blamed="/variants/1/variant"),
    refused("compare", "/variants/0", {}, blamed="/variants/0/variant"),
    refused("compare", "/variants/0", {"variant": "linear", "scale": 1},
            blamed="/variants/0/scale"),
    refused("compare", "/variants/1", TAYLOR, blamed="/variants/1/parameters/scale"),
    refused("compare", "/variants/0", {"variant": "linear", "parameters": {"causal": 1}},
            blamed="/variants/0/parameters/causal"),
    refused("compare", "/variants/0", {"variant": "linear", "parameters": 1},
            blamed="/variants/0/parameters"),
    refused("compare", "/anchor", "nope", status=404),
    refused("compare", "/anchor", None),
    refused("compare", "/anchor", {"variant": "linear", "parameters": {"window": 1}},
            blamed="/anchor/parameters/window"),
    refused("compare", "/repeats", 0, 101),
    refused("compare", "/rows", -1),
    refused("compare", "/per_head", 1, None),
    refused("compare", "/dtype", "int64"),
    refused("compare", "/parameters", {}),
    refused("compare", "/weights", "none"),
    refused("compare", "/layer", "encoder"),
    refused("compare", "/encoding", "raw"),
    refused("compare", "/inputs/nope", X),
    misfit("compare", "/inputs/mask", [[True] * 3] * 3),
    misfit("compare", "/inputs/weight", X),
    misfit("compare", "/inputs/key", [[1, 2]]),
    misfit("compare", "/inputs", {"value": X}),
    misfit("compare", "/inputs/query", [[1, 0, 0]] * 4, blamed="/variants/1"),
    misfit("compare", "/variants", ["linear_layer"], blamed="/inputs"),
    misfit("compare", "", {
        "variants": ["mean", {"variant": "linformer", "parameters": {"rank": 2}}],
        "inputs": INPUTS | {"key_projection": X},
    }, blamed="/variants/1/parameters/rank"),
    misfit("compare", "", {
        "variants": ["linear_layer"], "anchor": "linear_layer", "per_head": True,
        "inputs": {"x": X, "weight": X},
    }, blamed="/per_head"),
    misfit("compare", "", {
        "variants": ["mean"], "anchor": "mean", "per_head": True,
        "inputs": {"value": [[[[1]]] * 2049]},
    }, blamed="/per_head", status=413),
    refused("sweep", "/variants", [], None, ["mean"] * 17),
    refused("sweep", "/variants/0", "sotfmax", status=404),
    refused("sweep", "/variants/0", "linear_layer"),
    refused("sweep", "/variants", ["mean", TAYLOR], blamed="/variants/1/parameters/scale"),
    refused("sweep", "/variants/0", {"variant": "mean", "params": {}},
            blamed="/variants/0/params"),
    refused("sweep", "/lengths", [], list(range(1, 66))),
    refused("sweep", "/lengths", [8, 8], [8, 0], blamed="/lengths/1"),
    refused("sweep", "/lengths/0", (1 << 20) + 1, 8.5, True),
    refused("sweep", "/repeats", 0, 101),
    refused("sweep", "/batch", 0),
    refused("sweep", "/heads", 4097),
    refused("sweep", "/width", "64"),
    refused("sweep", "/dtype", "int64"),
    refused("sweep", "/seed", -1, 1 << 63),
    refused("sweep", "/inputs", {}),
)  # fmt: skip
VERIFICATIONS: Final = (
    refused("draw", "/nope", 1),
    refused("draw", "/family", "nope", None, []),
    refused("draw", "", {"family": "value width", "sizes": {"E": 0}}, blamed="/sizes/E"),
    refused("draw", "/seed", -1, 2**63, True, 0.5, "1"),
    refused("draw", "/sizes", []),
    refused("draw", "/sizes/Q", 1),
    refused("draw", "/sizes/B", 0, True, "1"),
    misfit("draw", "/sizes", {"H": 3, "G": 2}, blamed="/family"),
    refused("draw", "/dtype", "int64", None),
    refused("draw", "/parameters", None),
    refused("draw", "/parameters/nope", 1),
    misfit("draw", "/parameters/dropout", 0.5),
    misfit("draw", "/parameters", {"causal": True, "query_offset": -9}, blamed="/family"),
    refused("draw", "/encoding", "raw"),
    refused("draw", "/gradients", 1),
    refused("draw", "/layer", {"tensors": {"x": [1]}}),
    refused("judge", "/case", MISSING, None, "A" * 10**6, 5, []),
    *(refused("judge", f"/case/{n}", MISSING) for n in ("variant", "seed", "digest")),
    refused("judge", "/case/variant", None, 1, words="variant"),
    misfit("judge", "/case/variant", "linear", words="variant"),
    refused("judge", "/case/family", "nope", None, ["normal"], words="family"),
    refused("judge", "/case/dtype", "int64", None, words="dtype"),
    refused("judge", "/case/seed", -1, 2**63, None, 0.5, "1", words="seed"),
    refused("judge", "/case/sizes", [], None),
    refused("judge", "/case/sizes/Q", 1, words="'Q'"),
    refused("judge", "/case/sizes/B", 0, True, "1"),
    misfit("judge", "/case/sizes", {"B": 10**12}, {"L": 2**62, "S": 2**62}, status=413),
    misfit("judge", "/case/sizes", {"H": 3, "G": 2}, blamed="/case/family"),
    refused("judge", "/case/parameters", None, []),
    refused("judge", "/case/parameters/nope", 1, words="'nope'"),
    misfit("judge", "/case/parameters/dropout", 0.5),
    misfit("judge", "/case/digest", "1", "A" * 10**6),
    refused("judge", "/case/digest", None, 1),
    refused("judge", "/case/nope", 1),
    refused("judge", "/outputs", 5),
    refused("judge", "/outputs", {}, {"out": [1]}, MISSING, blamed="/case/digest"),
    refused("judge", "/seed", 1),
)
INVALID: Final = (*RUNS, *LAYERS, *MEASUREMENTS, *VERIFICATIONS)
