"""Builds the two HTTP requests that verify a function, and parses their responses.

`build_draw` requests inputs; `build_judge` sends the results of the function for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

from qkv.client.arrays import from_raw_like, is_array, to_raw
from qkv.client.request_builders import RequestSpec, build_post, to_json_fields
from qkv.errors import InvalidContent
from qkv.wire import safetensors, verify_responses
from qkv.wire.message import Message


class DrawnCase(NamedTuple):
    """The inputs that the service has drawn.

    Attributes:
        case: the specification that draws them again.
        inputs: arrays by name.
    """

    case: Mapping[str, Any]
    inputs: Mapping[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the function: inputs and parameters by name."""
        return {**self.inputs, **self.case["parameters"]}


class Verdict(verify_responses.Verdict):
    """The verdict on the results of a function, compared in float64.

    Attributes:
        passed: True if every number is within its budget.
        diagnosis: names of known bugs that give these results, best first.
        result: the result of the figures: "output", or the worst gradient, such as "grad_key".
        error: the absolute error at the worst index.
        budget: the error allowed there.
        units: error / budget, the largest of the result.
        worst_index: the index of the worst number.
        expected: the float64 result there.
        got: the function's result there.
        cosine: of the whole result with the expected one; None if a number is not finite.
        torch_error: the largest error of torch's own kernel; None if there is none.
        torch_units: the same in units of the budget.
        results: these figures of each result by name, as JSON.
        case: the specification of the inputs, with their seed, as JSON.
    """

    case: Mapping[str, Any]


def build_draw(variant: str, like: Any, options: Mapping[str, Any]) -> RequestSpec[DrawnCase]:
    """Builds the request for inputs; the arguments are those of `Client.verify`."""
    from_raw = from_raw_like(like)
    given = {name: value for name, value in options.items() if value is not None}
    message = Message(to_json_fields(given))

    def parse(response: httpx.Response) -> DrawnCase:
        reply = safetensors.decode(response.content, "inputs")
        inputs = {name: from_raw(raw) for name, raw in reply.tensors.items()}
        return DrawnCase(reply.fields["case"], inputs)

    return build_post(_path(variant), message, "outputs", parse)


def build_judge(drawn: DrawnCase, results: Any) -> RequestSpec[Verdict]:
    """Builds the request that judges results.

    Args:
        drawn: the inputs.
        results: of the function: the output, or a mapping with `output` and gradients.

    Raises:
        InvalidContent: a result is no array.
    """
    named = results if isinstance(results, Mapping) else {"output": results}
    for name, result in named.items():
        if not is_array(result):
            raise InvalidContent(f"{name} is no array: got {result!r:.60}, expected an array")
    message = Message({"case": drawn.case}, {name: to_raw(x, name) for name, x in named.items()})

    def parse(response: httpx.Response) -> Verdict:
        return Verdict.parse({**response.json(), "case": drawn.case})

    path = _path(drawn.case["variant"])
    return build_post(path, message, "outputs", parse, accept="application/json")


def _path(variant: str) -> str:
    return f"/v1/verify/{quote(variant, safe='', errors='replace')}"
