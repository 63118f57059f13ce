"""What is documented is true, and what exists is documented: the README's examples run."""

from __future__ import annotations

import html
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from qkv.attention import catalogue
from qkv.attention.layers.layouts import LAYOUTS
from qkv.settings import Settings
from support.paths import ROOT

README, HTTP, PYTHON, RUNNING, V2 = (
    (ROOT / page).read_text()
    for page in (
        "README.md", "docs/http.md", "docs/python.md", "docs/running.md",
        "docs/open-inference-protocol.md",
    )
)  # fmt: skip
ADDRESS = "http://127.0.0.1:8000"
HOST = ADDRESS.removeprefix("http://")


def blocks(language: str, page: str = README) -> list[str]:
    """A page's code blocks in a language."""
    every = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for named, text in every if named == language]


def curls(page: str) -> list[tuple[str, str]]:
    """Calls, and the answers that follow them."""
    calls = [block for block in blocks("sh", page) if block.startswith("curl")]
    return list(zip(calls, blocks("json", page), strict=True))


def rounded(value: Any) -> Any:
    """Six digits of every number: the last ones are the processor's."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def without_times(answer: Any) -> Any:
    """An answer with its measured times replaced by whether they are times."""
    if isinstance(answer, list):
        return [without_times(each) for each in answer]
    if not isinstance(answer, dict):
        return answer
    return {k: v >= 0 if k.endswith("_ms") else without_times(v) for k, v in answer.items()}


@pytest.mark.parametrize(("command", "answer"), [*curls(README), *curls(HTTP), *curls(V2)])
def test_curl_examples_answer_what_the_page_says(url: str, command: str, answer: str) -> None:
    done = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, url).replace("curl ", "curl -sS ", 1)],
        capture_output=True,
        text=True,
        check=True,
    )
    got, said = json.loads(done.stdout), json.loads(answer)
    if "check" in got:  # a rounding error, or none; and a number cut short for the reader
        assert got["check"].pop("largest_absolute_difference") < 1e-15
        assert said["check"].pop("largest_absolute_difference") < 1e-15
        said["check"]["largest_absolute_output"] = pytest.approx(
            said["check"]["largest_absolute_output"], abs=0.05
        )
    assert rounded(without_times(got)) == rounded(without_times(said))


PYTHONS = [
    *zip(blocks("python"), blocks("")[:1], strict=True),
    *zip(blocks("python", PYTHON), blocks("", PYTHON)[:2], strict=True),
    *zip(blocks("python", V2), blocks("", V2), strict=True),
]


@pytest.mark.parametrize(("program", "printed"), PYTHONS)
def test_python_examples_print_what_the_page_says(url: str, program: str, printed: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            program.replace(ADDRESS, url).replace(HOST, url.removeprefix("http://")),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == printed


def scripted(word: str, url: str, folder: Path) -> str:
    """What the script that has this in it prints."""
    (script,) = (block for block in blocks("sh", PYTHON) if word in block)
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=folder,
        env=os.environ
        | {"QKV_URL": url, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return done.stdout


def test_command_line_example_prints_what_the_page_says(url: str, tmp_path: Path) -> None:
    printed = scripted("qkv attend", url, tmp_path)
    without_times = [re.sub(r"[0-9.]+ ms", "ms", text) for text in (printed, blocks("", PYTHON)[2])]
    assert without_times[0] == without_times[1]


def test_side_by_side_example_prints_what_the_page_says(url: str, tmp_path: Path) -> None:
    """But for times, what depends on them, and the last digits of the processor."""
    printed, said = scripted("qkv compare", url, tmp_path), blocks("", PYTHON)[3]
    kept = ("total variation", "KL", "Jensen", "rank", "entropy", "floating", "bytes")
    exact = [
        [line.split() for line in text.splitlines() if line.strip().startswith(kept)]
        for text in (printed, said)
    ]
    assert exact[0] == exact[1]
    without_numbers = [
        re.sub(r"[\s\d.,e()–─-]+", " ", re.sub(r"^From a length.*$", "", text, flags=re.MULTILINE))
        for text in (printed, said)
    ]
    assert without_numbers[0] == without_numbers[1]


def test_every_setting_is_in_the_table_with_its_default() -> None:
    table = dict(re.findall(r"^\| `(QKV_\w+)` \| `(\S+)` \|", RUNNING, re.MULTILINE))
    assert table == {f"QKV_{n.upper()}": str(f.default) for n, f in Settings.model_fields.items()}


def test_every_python_file_is_on_the_page_of_files() -> None:
    page = (ROOT / "docs/files.md").read_text()
    named = set(re.findall(r"^\| \[[^]]+\]\(\.\./([^)]+)\)", page, re.MULTILINE))
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "service").rglob("*.py")}
    assert there <= named
    assert {n for n in named if not (ROOT / n).exists()} == set()


def test_every_route_is_documented(url: str) -> None:
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    for path in paths:
        family = re.sub(r"/(attention|gradients|variants)/.*", r"/\1", path)
        page = V2 if path.startswith("/v2") else HTTP
        assert f"{family}`" in page or f"{family}/{{variant}}`" in page, path


def test_every_variant_says_all_there_is_to_say() -> None:
    for variant in catalogue.variants().values():
        said = variant.describe()
        assert all(said[k] for k in ("summary", "formula", "paper", "cost", "weights", "outputs"))
        for name, schema in said["parameters"]["properties"].items():
            assert schema.get("description"), f"{variant.name}: {name} has no description"


def test_what_is_made_of_the_variants_is_up_to_date() -> None:
    """README's table, docs/variants.md and the pictures are what `make docs` writes now."""
    made = runpy.run_path(str(ROOT / "docs/make.py"))["build_files"]()
    for path, text in made.items():
        assert (ROOT / path).read_text() == text, f"{path}: run make docs"
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "docs/variants").iterdir()}
    assert there == {path for path in made if path.startswith("docs/variants/")}


@pytest.mark.parametrize("name", catalogue.variants())
def test_every_variant_is_shown_in_the_readme_and_on_its_page(name: str) -> None:
    page, said = (ROOT / "docs/variants.md").read_text(), catalogue.find(name).describe()
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for text in (README, section):
        plain = html.unescape(text).replace("\\|", "|").replace("\\*", "*")
        assert all(said[word] in plain for word in ("formula", "paper", "cost"))
    assert f"[{name}](docs/variants.md#{name})" in README
    assert said["summary"] in section
    for named in ("inputs", "outputs", "refuses"):
        assert all(f"| `{n}` |" in section for n in said[named])
    assert all(f"| `{n}` |" in section for n in said["parameters"]["properties"])
    drawn = (ROOT / f"docs/variants/{name}.svg").exists()
    assert (f'src="docs/variants/{name}.svg"' in README) is drawn
    assert (f"](variants/{name}.svg)" in section) is drawn


def test_every_layout_is_documented() -> None:
    assert all(re.search(rf"\b{name}\b", HTTP) for name in LAYOUTS)


def test_every_page_is_reached_from_the_readme_and_every_link_leads_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "SECURITY.md"]
    for page in pages:
        text = page.read_text()
        for link in re.findall(r"\]\((?!https?:)([^)\s]*)\)", text):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                assert anchor in [
                    re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads
                ]
        if page.parent.name == "docs":
            assert f"](docs/{page.name})" in README


def test_nothing_names_a_machine_or_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split():
        text = (ROOT / name).read_text(errors="replace")  # pictures too
        assert not re.search(r"py(pi|thonhosted)\.org|download\.pytorch", text), name
