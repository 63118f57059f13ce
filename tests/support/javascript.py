"""Node.js for tests of the playground's modules that need no page."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import qkv

_MODULES: Final = (
    "checkpoint/checkpoint_files",
    "checkpoint/hidden_states",
    "checkpoint/model_config",
    "compare/sweep_table",
    "copy/code_snippets",
    "data/safetensors",
    "data/tensors",
    "data/uploads",
    "inputs/labels",
    "lessons/lesson_list",
)

# reads a line [function, argument] from stdin; writes {value} or {error}
_SERVER: Final = """
import { createInterface } from "node:readline";
import { File } from "node:buffer";
globalThis.File ??= File;
globalThis.matchMedia = () => ({ matches: false });  // a constant of dom.js
const names = JSON.parse(process.argv[2]);
for (const name of names) {
    globalThis[name.split("/").pop()] = await import(`./playground/${name}.js`);
}
for await (const line of createInterface({ input: process.stdin })) {
    const [text, argument] = JSON.parse(line);
    let answer;
    try {
        answer = { value: await (0, eval)(`(${text})`)(argument) };
    } catch (error) {
        answer = { error: String(error?.stack ?? error) };
    }
    process.stdout.write(JSON.stringify(answer) + "\\n");
}
"""


class Modules:
    """A process of Node.js that has each module of `_MODULES` as a global of its file's name."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def evaluate(self, function: str, argument: Any = None) -> Any:
        """Returns what a JavaScript function returns, through JSON.

        Raises:
            AssertionError: it throws; the message has the stack.
        """
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([function, argument]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer.get("value")


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Modules]:
    """Returns the modules of the playground in Node.js.

    Skips the tests if Node.js is not installed.
    """
    node = shutil.which("node")
    if not node:
        pytest.skip("needs Node.js")
    folder = tmp_path_factory.mktemp("modules")
    shutil.copytree(Path(qkv.__file__).parent / "playground", folder / "playground")
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "server.js").write_text(_SERVER)
    with subprocess.Popen(
        [node, folder / "server.js", json.dumps(_MODULES)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
    ) as process:  # fmt: skip
        yield Modules(process)
