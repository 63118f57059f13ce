"""The OpenAPI document is exact: its examples run, and bodies match its schemas."""

from __future__ import annotations

import asyncio
import graphlib
from typing import Any, Final

import openapi_spec_validator
import pytest

from qkv.api.openapi.operation import PROBLEMS
from qkv.api.routes import DirectRouting
from qkv.attention import catalogue
from qkv.jobs.plan import Plan
from qkv.wire import CODECS, json, safetensors
from support.known_requests import assert_problem, random_case
from support.openapi_schemas import (
    assert_matches_document,
    assert_same_example,
    body_schema,
    fits,
    response_content,
)
from support.service import Server, running_server

RUNS: Final = [f"/v1/attention/{name}" for name in catalogue.variants()] + [
    f"/v1/gradients/{v.name}" for v in catalogue.variants().values() if v.backward
]
SOFTMAX: Final = "/v1/attention/softmax"
CONVERT: Final = "/v1/convert"
VERIFY: Final = "/v1/verify/{variant}"
MEASURED: Final = ["/v1/compare", "/v1/sweep"]  # these have tests of their own
POSTS: Final = [CONVERT, *RUNS]

SQUARE: Final = [[1, 0], [0, 1]]
INPUTS: Final = {"query": SQUARE, "key": SQUARE, "value": SQUARE}
V1: Final = {"W_query": SQUARE, "W_key": SQUARE, "W_value": SQUARE}
V2: Final = {f"{name}.weight": SQUARE for name in V1}
LAYER: Final = {"layout": "v1", "tensors": V1}
BYTES: Final = {"dtype": "float32", "shape": [1, 2], "data": "AAAAAAAAAAA="}
NUMBERS: Final = {"dtype": "int64", "shape": [1], "data": "AQAAAAAAAAA="}


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    """The document that the service sends."""
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


@pytest.mark.slow
def test_document_is_valid_openapi(document: dict[str, Any]) -> None:
    openapi_spec_validator.validate(document)
    assert document["openapi"].startswith("3.1")


def test_document_has_no_conditions_and_no_recursion(document: dict[str, Any]) -> None:
    """Generators of clients support neither."""
    schemas = document["components"]["schemas"]

    def references(node: Any) -> set[str]:
        if isinstance(node, list):
            return set().union(*map(references, node))
        if not isinstance(node, dict):
            return set()
        assert not node.keys() & {"if", "then", "else", "allOf", "oneOf", "not"}, node
        assert not isinstance(node.get("const"), list | dict), node
        own = {node["$ref"].rpartition("/")[2]} if "$ref" in node else set()
        return own.union(*map(references, node.values()))

    order = graphlib.TopologicalSorter({name: references(s) for name, s in schemas.items()})
    assert set(order.static_order()) == schemas.keys()
    for methods in document["paths"].values():
        for operation in methods.values():
            contents = [r.get("content", {}) for r in operation["responses"].values()]
            contents += [operation.get("requestBody", {}).get("content", {})]
            for content in contents:
                if json.MEDIA_TYPE in content:
                    schema = content[json.MEDIA_TYPE]["schema"]
                    parts = schema.get("anyOf", [schema.get("items", schema)])
                    assert all(part.keys() == {"$ref"} for part in parts), operation


def test_document_has_no_generated_leftovers(server: Server, document: dict[str, Any]) -> None:
    """Generated titles and schemas are gone; no bound is rounded, and no default is missing."""
    assert "HTTPValidationError" not in str(document)
    assert "Successful Response" not in str(document)
    parameters = document["components"]["schemas"]["SoftmaxParameters"]["properties"]
    assert str(parameters["seed"]["exclusiveMaximum"]) == str(2**64)
    assert parameters["causal"]["description"].endswith("Default: `false`.")
    assert "default" not in parameters["scale"]
    operations = [o for methods in document["paths"].values() for o in methods.values()]
    assert len({o["operationId"] for o in operations}) == len(operations)
    assert all(o["operationId"].isidentifier() and len(o["operationId"]) < 30 for o in operations)
    tags = [tag["name"] for tag in document["tags"]]
    assert {tag for o in operations for tag in o["tags"]} == set(tags)


@pytest.mark.parametrize("path", POSTS)
def test_every_example_gets_the_documented_response(
    server: Server, document: dict[str, Any], path: str
) -> None:
    operation = document["paths"][path]["post"]
    content = operation["requestBody"]["content"]
    responses = operation["responses"]["200"]["content"]
    assert content.keys() == responses.keys() == CODECS.keys()
    requests, shown = content[json.MEDIA_TYPE]["examples"], responses[json.MEDIA_TYPE]["examples"]
    assert requests.keys() == shown.keys()
    assert requests
    for name, example in requests.items():
        assert fits(example["value"], content[json.MEDIA_TYPE]["schema"], document), name
        response = server.http.post(path, json=example["value"])
        assert response.status_code == 200, response.text
        assert_same_example(response.json(), shown[name]["value"])
        assert fits(shown[name]["value"], responses[json.MEDIA_TYPE]["schema"], document)
        assert_matches_document(document, response)
        file = server.http.post(
            path, json=example["value"], headers={"Accept": safetensors.MEDIA_TYPE}
        )
        assert response_content(document, file) == responses[safetensors.MEDIA_TYPE]


@pytest.mark.parametrize("path", ["/v1/variants", "/livez", "/readyz"])
def test_every_plain_response_matches_the_document(
    server: Server, document: dict[str, Any], path: str
) -> None:
    response = server.http.get(path)
    assert response.status_code == 200
    content = response_content(document, response)
    assert fits(response.json(), content["schema"], document)
    assert not fits({"nope": 1}, content["schema"], document)
    assert content.get("example", response.json()) == response.json()


def test_playground_matches_the_document(server: Server, document: dict[str, Any]) -> None:
    page = server.http.get("/")
    assert response_content(document, page)["schema"] == {"type": "string"}
    same = server.http.get("/", headers={"If-None-Match": page.headers["etag"]})
    assert str(same.status_code) in document["paths"]["/"]["get"]["responses"]


def test_catalogue_entry_matches_the_document(server: Server, document: dict[str, Any]) -> None:
    operation = document["paths"]["/v1/variants/{variant}"]["get"]
    schema = operation["responses"]["200"]["content"][json.MEDIA_TYPE]["schema"]
    (parameter,) = operation["parameters"]
    assert parameter["schema"] == {"$ref": "#/components/schemas/VariantName"}
    names = document["components"]["schemas"]["VariantName"]["enum"]
    assert names == list(catalogue.variants())
    for name in names:
        entry = server.http.get(f"/v1/variants/{name}").json()
        assert fits(entry, schema, document)
        assert not fits(entry | {"nope": 1}, schema, document)
        for word in entry:
            rest = {n: v for n, v in entry.items() if n != word}
            assert not fits(rest, schema, document)
            assert not fits(rest | {f"{word}_": entry[word]}, schema, document)
    missing = server.http.get("/v1/variants/sotfmax")
    shown = operation["responses"]["404"]["content"][json.PROBLEM_TYPE]
    assert assert_problem(missing, 404) == shown["example"]
    assert fits(missing.json(), shown["schema"], document)


def test_picture_matches_the_document(server: Server, document: dict[str, Any]) -> None:
    path = "/v1/variants/{variant}/picture"
    responses = document["paths"][path]["get"]["responses"]
    found = server.http.get(path.format(variant="softmax"))
    assert responses["200"]["content"].keys() == {found.headers["content-type"]}
    again = server.http.get(str(found.url), headers={"If-None-Match": found.headers["etag"]})
    assert "content" not in responses[str(again.status_code)]
    for response in (found, again):
        headers = responses[str(response.status_code)]["headers"]
        assert all(name in response.headers for name in headers)
    missing = assert_problem(server.http.get(path.format(variant="sotfmax")), 404)
    assert missing == responses["404"]["content"][json.PROBLEM_TYPE]["example"]


@pytest.mark.parametrize("seed", range(8))
def test_every_run_matches_the_document(
    server: Server, document: dict[str, Any], seed: int
) -> None:
    """A schema is compared with 5,000 numbers in seconds: lists are requested where it is fast."""
    case = random_case(seed, seed)
    content = document["paths"][SOFTMAX]["post"]["requestBody"]["content"][json.MEDIA_TYPE]
    is_short = sum(array.size for array in case.inputs.values()) < 1000
    for encoding in ("base64", "lists") if is_short else ("base64",):
        body = case.document | {"encoding": encoding}
        assert fits(body, content["schema"], document)
        response = server.http.post(SOFTMAX, json=body)
        assert response.status_code == 200, response.text
        assert_matches_document(document, response)


@pytest.mark.parametrize("source", ["v1", "v2"])
@pytest.mark.parametrize("target", ["v1", "v2"])
def test_every_conversion_matches_the_document(
    server: Server, document: dict[str, Any], source: str, target: str
) -> None:
    tensors = {"v1": V1, "v2": V2}[source]
    for odd in (1, "NaN", "Infinity"):
        changed = dict(tensors) | {next(iter(tensors)): [[odd, 0], [0, 1]]}
        response = server.http.post(
            CONVERT, json={"from": source, "to": target, "tensors": changed}
        )
        assert response.status_code == 200, response.text
        assert_matches_document(document, response)


def run(**fields: Any) -> tuple[str, dict[str, Any]]:
    return SOFTMAX, {"inputs": INPUTS} | fields


def one_item(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/attention/linear_layer", {"inputs": {"x": [1, -2], "weight": SQUARE}} | fields


def sent(**inputs: Any) -> tuple[str, dict[str, Any]]:
    return SOFTMAX, {"inputs": INPUTS | inputs}


def through(layer: Any, *names: str) -> tuple[str, dict[str, Any]]:
    return SOFTMAX, {"inputs": dict.fromkeys(names or ["x"], SQUARE), "layer": layer}


def converting(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CONVERT, {"from": "v1", "to": "v2", "tensors": V1} | fields


GOOD: Final = [
    run(), run(outputs=None), run(outputs=["scores"]), run(encoding=None), run(layer=None),
    run(weights="none"), run(weights="none", outputs=["output"]), run(dtype="bfloat16"),
    run(weights="stats"), run(weights={"rows": [1, 0, 1]}), run(weights={"top_k": 2}),
    run(weights={"pool": 3}), run(weights={"pool": 1}, outputs=["weights"]),
    run(weights="stats", outputs=None), run(weights="stats", outputs=["scores", "weights"]),
    one_item(weights="stats"), one_item(weights={"top_k": 1}), one_item(weights={"pool": 1}),
    run(parameters={}), run(parameters={"causal": True, "query_offset": "end", "scale": 1}),
    run(parameters={"query_offset": 2**31 - 1}), run(parameters={"seed": 2**64 - 1}),
    run(parameters={"window": [1, None]}), run(parameters={"window": None, "scale": None}),
    run(parameters={"dropout": 0}), run(parameters={"softcap": 1e-30}),
    sent(query=[["NaN", "-Infinity"]]), sent(query=BYTES), sent(mask=True),
    sent(mask=[[True, False]]), sent(mask=0.5), sent(mask=[["-Infinity", 0]]),
    sent(key_lengths=[2]), sent(key_lengths=[1.0]), sent(key_lengths=NUMBERS),
    through(LAYER), through(LAYER, "query", "key", "value"), through(LAYER | {"heads": 2}),
    through(LAYER | {"heads": None}), through({"layout": "v2", "tensors": V2}),
    through({"layout": "v2", "tensors": V2 | {"W_key.bias": [1, 2]}}),
    through({"layout": "v1", "tensors": {"W_query": SQUARE, "W_keys": SQUARE, "W_values": SQUARE}}),
    through(LAYER | {"layout": "auto", "rope": {"base": 100, "order": "interleaved"}}),
    through(LAYER | {"heads": 1, "kv_heads": 1, "qk_norm": {"eps": 1e-5}, "prefix": None}),
    through(LAYER | {"tensors": V1 | {"W_output": SQUARE, "other": SQUARE}}),
    converting(), converting(heads=2), converting(heads=None), converting(bias="augment"),
    converting(dtype="float64"), converting(encoding="base64"), converting(to="v1"),
    (CONVERT, {"from": "v2", "to": "v1", "tensors": V2}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_schema_and_service_accept(
    server: Server, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert fits(body, body_schema(document, path), document)
    assert_matches_document(document, response)


def test_payload_too_large_matches_the_document(document: dict[str, Any]) -> None:
    with running_server(max_body_bytes=100, max_response_bytes=8) as small:
        for path in POSTS:
            large = small.http.post(path, content=b" " * 101)
            assert assert_problem(large, 413)["limit"] == 100
            assert_matches_document(document, large)
        wide = b'{"inputs":{"query":[[1]],"key":[[1]],"value":[[1,1,1]]}}'
        response = small.http.post(SOFTMAX, content=wide)
        assert assert_problem(response, 413)["limit"] == 8
        assert_matches_document(document, response)


def test_service_unavailable_matches_the_document(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation is 503 that the end of the drain cancels; probes have a form of their own."""
    probes, serve = ("/readyz", "/v2/health/ready"), DirectRouting.__call__

    async def serve_or_cancel(self: DirectRouting, scope: Any, *channels: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in probes:
            raise asyncio.CancelledError
        await serve(self, scope, *channels)

    monkeypatch.setattr(DirectRouting, "__call__", serve_or_cancel)
    with running_server() as stopping:
        stopping.runtime.worker.shared_state.drain()
        shown = next(e for e in PROBLEMS if e.status == 503).problem()
        operations = [(path, m) for path, ms in document["paths"].items() for m in ms]
        for path, method in operations:
            if "{" in path or path in ("/livez", "/v2/health/live"):
                continue
            response = stopping.http.request(method, path)
            assert response.status_code == 503
            assert_matches_document(document, response)
            if path == "/v2/health/ready":
                assert response.json() == {"live": True, "ready": False}
            elif path.startswith("/v2"):
                assert response.json() == {"error": shown["detail"]}
            else:
                assert path == "/readyz" or response.json() == shown


def test_internal_error_matches_the_document(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    with running_server() as server:
        monkeypatch.setattr(Plan, "from_message", broken)
        response = server.http.post(SOFTMAX, json={"inputs": INPUTS})
    assert response.status_code == 500
    assert_matches_document(document, response)
    assert response_content(document, response)["example"] == response.json()


def test_every_operation_lists_its_errors(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"].keys()
            of_connection = {"400", "403", "408", "431", "501"} | (
                {"413"} if method == "post" else set()
            )
            assert of_connection <= responses, path
            if path.startswith("/v2"):
                continue
            of_body = {"406", "415", "422", "429"} if method == "post" else set()
            named = {"404"} if path in MEASURED or "{" in path else set()
            has_deadline = {*RUNS, "/v1/compare", "/v1/convert", "/v1/layers", VERIFY}
            of_body |= {"504"} if path in has_deadline and method == "post" else set()
            again = {"304"} if path == "/" or path.endswith("/picture") else set()
            assert responses == {"200", "500", "503"} | of_connection | of_body | named | again, (
                path
            )


@pytest.mark.parametrize("name", catalogue.variants())
def test_parameters_are_described_for_each_variant(document: dict[str, Any], name: str) -> None:
    schemas = document["components"]["schemas"]
    begin = "".join(part.capitalize() for part in name.split("_"))
    (reference,) = schemas[f"{begin}Request"]["properties"]["parameters"].values()
    parameters = schemas[reference.rpartition("/")[2]]
    fields = catalogue.find(name).parameters.model_fields
    assert parameters["properties"].keys() == fields.keys()
    assert parameters["additionalProperties"] is False
    assert all(schema["description"] for schema in parameters["properties"].values())


def test_docs_page_needs_no_other_host(server: Server) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "//" not in page.text.replace("// ", "")  # no other host
    for part in ("swagger-ui-bundle.js", "swagger-ui.css"):
        assert part in page.text
        assert server.http.get(f"/static-offline-docs/{part}").is_success
