"""Generators make clients of the OpenAPI document, with every operation; each sends a request.

Their requirements differ from those of the service, so that each is installed in a folder of its
own.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from support.service import Server

PYTHON_GENERATORS: Final = ("openapi-python-client==0.29.1", "datamodel-code-generator==0.89.0")
NODE_PACKAGES: Final = ("openapi-typescript@7.13.0", "openapi-fetch@0.17.0", "typescript@5.9.3")
MOST_NUMBERED: Final = 40  # classes whose names end in a number: their parts have no name
PYTHON_CLIENT: Final = """\
import sys

from generated import Client
from generated.api.attention import attend_softmax, compare
from generated.models import (
    CompareInputs, CompareRequest, SoftmaxInputs, SoftmaxParameters, SoftmaxRequest,
    VariantChoiceName,
)

tensors = {"query": [[1, 0], [0, 1]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]]}
client = Client(sys.argv[1])
request = SoftmaxRequest(inputs=SoftmaxInputs(**tensors), parameters=SoftmaxParameters(causal=True))
response = attend_softmax.sync(client=client, body=request)
print(response.outputs.output[0], response.timing.device)
try:
    SoftmaxInputs(query=[[1]], key=[[1]])
except TypeError as error:
    print("value" in str(error))
body = CompareRequest(inputs=CompareInputs(**tensors), variants=[VariantChoiceName.LINEAR])
print(compare.sync(client=client, body=body).variants[0].variant)
"""
PYDANTIC_CLIENT: Final = """\
import json, sys, urllib.request

from generated import SoftmaxInputs, SoftmaxRequest, SoftmaxResponse
from pydantic import ValidationError

tensors = {"query": [[1, 0], [0, 1]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]]}
for wrong in ({"value": "hello"}, {"nope": [1]}, {"value": [[[[[1]]]]]}):
    try:
        SoftmaxInputs(**tensors | wrong)
    except ValidationError:
        print("refused")
body = SoftmaxRequest(inputs=SoftmaxInputs(**tensors), parameters={"causal": True})
request = urllib.request.Request(
    sys.argv[1] + "/v1/attention/softmax",
    body.model_dump_json(exclude_unset=True).encode(),
    {"Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as reply:
    response = SoftmaxResponse.model_validate_json(reply.read())
print(response.variant, response.timing.device)
"""
TYPESCRIPT_CLIENT: Final = """\
import createClient from "openapi-fetch";
import type { components, paths } from "./api.js";

const client = createClient<paths, "application/json">({ baseUrl: process.argv[2] });
const inputs: components["schemas"]["SoftmaxInputs"] = {
  query: [[1, 0], [0, 1]], key: [[1, 0], [0, 1]], value: [[1, 2], [3, 4]],
};
const { data, error } = await client.POST("/v1/attention/softmax", {
  body: { inputs, parameters: { causal: true } },
});
if (error) throw new Error(JSON.stringify(error));
const output: components["schemas"]["Tensor"] | undefined = data.outputs.output;
console.log(JSON.stringify(output), data.timing.device);
"""
TYPESCRIPT_FAULTS: Final = (
    '{ query: "hello", key: [[1]], value: [[1]] }',
    "{ query: [[1]], key: [[1]] }",
    "{ query: [[1]], key: [[1]], value: [[true]] }",
    "{ query: [[1]], key: [[1]], value: [[[[[1]]]]] }",
    '{ query: [[1]], key: [[1]], value: { dtype: "int4", shape: [1], data: "" } }',
)


@pytest.fixture(scope="session")
def python_generators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the programs of an environment that has the generators for Python."""
    folder = tmp_path_factory.mktemp("generators")
    uv = (sys.executable, "-m", "uv", "-q")
    run(folder, *uv, "venv", "env")
    run(folder, *uv, "pip", "install", "--python", "env", *PYTHON_GENERATORS)
    return folder / "env/bin"


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the generator for TypeScript is installed.

    Skips the tests if npm is not installed.
    """
    npm = shutil.which("npm")
    if not npm:
        pytest.skip("needs npm")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"type": "module"}')
    run(folder, npm, "install", "--no-audit", "--no-fund", *NODE_PACKAGES)
    return folder


def run(folder: Path, *command: str | Path) -> str:
    """Runs a command in a folder; returns what it writes.

    Raises:
        AssertionError: it fails.
    """
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def folder(server: Server, tmp_path: Path) -> Path:
    """A folder with the document of a service."""
    (tmp_path / "openapi.json").write_bytes(server.http.get("/openapi.json").content)
    return tmp_path


def operation_count(folder: Path) -> int:
    document: dict[str, Any] = json.loads((folder / "openapi.json").read_text())
    return sum(len(methods) for methods in document["paths"].values())


def assert_few_numbered(names: list[str]) -> None:
    assert len(names) > 100
    assert sum(name[-1].isdigit() for name in names) <= MOST_NUMBERED


@pytest.mark.rare("service/qkv/api", "service/qkv/wire")
def test_openapi_python_client_makes_every_operation(
    server: Server, folder: Path, python_generators: Path
) -> None:
    run(
        folder, python_generators / "openapi-python-client", "generate",
        "--path", "openapi.json", "--output-path", "generated", "--meta", "none",
    )  # fmt: skip
    modules = (folder / "generated/api").rglob("*.py")
    made = [path.name for path in modules if "def sync_detailed" in path.read_text()]
    assert len(made) == operation_count(folder)
    classes = re.findall(r"^from \.\w+ import (\w+)$", _read(folder / "generated/models"), re.M)
    assert_few_numbered(classes)
    (folder / "client.py").write_text(PYTHON_CLIENT)
    printed = run(folder, python_generators / "python", "client.py", server.url)
    assert printed == "[1.0, 2.0] cpu\nTrue\nlinear\n"


def _read(package: Path) -> str:
    return (package / "__init__.py").read_text()


@pytest.mark.rare("service/qkv/api", "service/qkv/wire")
def test_datamodel_code_generator_makes_named_classes(
    server: Server, folder: Path, python_generators: Path
) -> None:
    run(
        folder, python_generators / "datamodel-codegen", "--formatters", "builtin",
        "--input", "openapi.json", "--input-file-type", "openapi", "--output", "generated.py",
        "--output-model-type", "pydantic_v2.BaseModel",
    )  # fmt: skip
    text = (folder / "generated.py").read_text()
    assert_few_numbered(re.findall(r"^class (\w+)\(", text, re.M))
    (folder / "client.py").write_text(PYDANTIC_CLIENT)
    printed = run(folder, python_generators / "python", "client.py", server.url)
    assert printed == "refused\nrefused\nrefused\nsoftmax cpu\n"


@pytest.mark.rare("service/qkv/api", "service/qkv/wire")
def test_openapi_typescript_checks_tensors(server: Server, folder: Path, node_folder: Path) -> None:
    programs = node_folder / "node_modules/.bin"
    run(node_folder, programs / "openapi-typescript", folder / "openapi.json", "-o", "api.d.ts")
    operations = (node_folder / "api.d.ts").read_text().partition("export interface operations")[2]
    assert len(re.findall(r"^    \w+: \{$", operations, re.M)) == operation_count(folder)
    faults = [f"// @ts-expect-error\ninputs = {fault};" for fault in TYPESCRIPT_FAULTS]
    declared = 'let inputs: import("./api.js").components["schemas"]["SoftmaxInputs"];'
    (node_folder / "faults.ts").write_text("\n".join([declared, *faults, "export {};"]))
    (node_folder / "client.ts").write_text(TYPESCRIPT_CLIENT)
    flags = ("--strict", "--target", "es2022", "--module", "nodenext")
    (node_folder / "process.d.ts").write_text("declare const process: { argv: string[] };")
    run(
        node_folder, programs / "tsc", *flags, "--lib", "es2022,dom,dom.iterable",
        "client.ts", "faults.ts", "process.d.ts",
    )  # fmt: skip
    printed = run(node_folder, "node", "client.js", server.url)
    assert printed.startswith("[[1,2],[")
    assert printed.endswith("] cpu\n")
