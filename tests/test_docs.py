"""Tests that the pages are true and complete: examples run; settings and routes are listed."""

from __future__ import annotations

import contextlib
import html
import io
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from variant_pictures import has_matrix

from qkv.attention import catalogue
from qkv.attention.layers import layout_catalogue
from qkv.cli.main import main
from qkv.settings import Settings
from support.paths import ROOT

README, HTTP, PYTHON, RUNNING, V2, LAYOUTS, MODEL, MODELS, GATED, STATE = (
    (ROOT / page).read_text()
    for page in (
        "README.md", "docs/http.md", "docs/python.md", "docs/running.md",
        "docs/open-inference-protocol.md", "docs/layouts.md", "docs/from-your-model.md",
        "docs/models.md", "docs/variants/gated.md", "docs/state.md",
    )
)  # fmt: skip
ADDRESS: Final = "http://127.0.0.1:8000"
HOST: Final = ADDRESS.removeprefix("http://")
PAGES: Final = sorted(p for f in (".", "docs/**", "service/qkv/**") for p in ROOT.glob(f"{f}/*.md"))
PICTURES: Final = ROOT / "service/qkv/attention/variants/pictures"


def page_id(page: Path) -> str:
    """Returns a page's path from the root, as the id of a test."""
    return str(page.relative_to(ROOT))


def fences(page: str) -> list[tuple[str, str]]:
    """Returns a page's code blocks in order: (language, text)."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def examples(language: str, page: str, result: str = "") -> list[tuple[str, str]]:
    """Returns the blocks in `language`, each with the block in `result` that follows it."""
    blocks = fences(page)
    return [
        (text, output)
        for (named, text), (kind, output) in itertools.pairwise(blocks)
        if named == language and kind == result
    ]


def curl_examples(page: str) -> list[tuple[str, str]]:
    """Returns a page's curl commands and their responses."""
    return [
        (text, response)
        for text, response in examples("sh", page, "json")
        if text.startswith("curl")
    ]


def round_numbers(value: Any) -> Any:
    """Rounds every number to six digits; the other digits depend on the processor."""
    if isinstance(value, dict):
        return {name: round_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [round_numbers(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def without_times(response: Any) -> Any:
    """Replaces each measured time in a response by True if it is not negative."""
    if isinstance(response, list):
        return [without_times(each) for each in response]
    if not isinstance(response, dict):
        return response
    return {k: v >= 0 if k.endswith("_ms") else without_times(v) for k, v in response.items()}


@pytest.mark.parametrize(
    ("command", "documented"),
    [*curl_examples(README), *curl_examples(HTTP), *curl_examples(V2)],
)
def test_curl_examples_return_the_documented_response(
    url: str, command: str, documented: str
) -> None:
    done = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, url).replace("curl ", "curl -sS ", 1)],
        capture_output=True,
        text=True,
        check=True,
    )
    response, expected = json.loads(done.stdout), json.loads(documented)
    if "check" in response:  # a rounding error, or none; and a number shortened on the page
        assert response["check"].pop("largest_absolute_difference") < 1e-15
        assert expected["check"].pop("largest_absolute_difference") < 1e-15
        expected["check"]["largest_absolute_output"] = pytest.approx(
            expected["check"]["largest_absolute_output"], abs=0.05
        )
    assert round_numbers(without_times(response)) == round_numbers(without_times(expected))


def test_every_documented_response_belongs_to_a_curl_example() -> None:
    for page in (README, HTTP, V2):
        responses = [text for language, text in fences(page) if language == "json"]
        assert len(responses) == len(curl_examples(page)) > 0


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        each
        for page in (README, PYTHON, V2, MODEL, MODELS, GATED, STATE)
        for each in examples("python", page)
    ],
)
def test_python_examples_print_the_documented_output(
    url: str, program: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: a process of its own for each would take most of the time to import."""
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(
        program.replace(ADDRESS, url).replace(HOST, url.removeprefix("http://"))
    )
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout), warnings.catch_warnings():
        warnings.simplefilter("default")  # as for a user
        runpy.run_path("program.py", run_name="__main__")
    assert stdout.getvalue() == printed


@pytest.mark.parametrize(
    ("program", "printed"), [each for page in (HTTP, V2) for each in examples("js", page)]
)
def test_javascript_examples_print_the_documented_output(
    url: str, program: str, printed: str, tmp_path: Path
) -> None:
    node = shutil.which("node")
    if not node and "NEED_NODE" not in os.environ:
        pytest.skip("needs Node.js")
    (tmp_path / "program.mjs").write_text(program.replace(ADDRESS, url))
    done = subprocess.run(
        [node or "node", "program.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert not done.stderr
    assert done.stdout == printed


def test_every_javascript_example_has_its_output_on_the_page() -> None:
    for page in (HTTP, V2):
        programs = [text for language, text in fences(page) if language == "js"]
        assert programs == [program for program, _ in examples("js", page)] != []


def test_every_python_example_has_its_output_on_the_page() -> None:
    for page in (README, PYTHON, V2, MODEL, MODELS):
        programs = [text for language, text in fences(page) if language == "python"]
        assert programs == [program for program, _ in examples("python", page)] != []


def run_script(command: str, url: str, folder: Path) -> tuple[str, str]:
    """Runs the script of docs/python.md with `command` in it: (its output, the documented one)."""
    ((script, documented),) = (each for each in examples("sh", PYTHON) if command in each[0])
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
    return done.stdout, documented


@pytest.mark.slow
def test_command_line_example_prints_the_documented_output(url: str, tmp_path: Path) -> None:
    printed, documented = run_script("qkv attend", url, tmp_path)
    assert re.sub(r"[0-9.]+ ms", "ms", printed) == re.sub(r"[0-9.]+ ms", "ms", documented)


@pytest.mark.slow
def test_compare_and_sweep_example_prints_the_documented_output(url: str, tmp_path: Path) -> None:
    """Times, figures that depend on them, and the last digits of the processor are not compared."""
    printed, documented = run_script("qkv compare", url, tmp_path)
    labels = ("total variation", "KL", "Jensen", "rank", "entropy", "floating", "bytes")
    exact = [
        [line.split() for line in text.splitlines() if line.strip().startswith(labels)]
        for text in (printed, documented)
    ]
    assert exact[0] == exact[1]
    without_numbers = [
        re.sub(r"[\s\d.,e()–─-]+", " ", re.sub(r"^.*\bfaster\b.*$", "", text, flags=re.MULTILINE))
        for text in (printed, documented)
    ]
    assert without_numbers[0] == without_numbers[1]


def test_every_setting_is_in_the_table_with_its_default() -> None:
    table = dict(re.findall(r"^\| `(QKV_\w+)` \| `(\S+)` \|", RUNNING, re.MULTILINE))
    assert table == {f"QKV_{n.upper()}": str(f.default) for n, f in Settings.model_fields.items()}


def test_every_command_is_documented() -> None:
    pages = README + PYTHON + RUNNING
    assert {name for name in main.commands if f"qkv {name}" not in pages} == set()


def test_every_metric_is_in_the_table(url: str) -> None:
    names = re.findall(r"^# TYPE (\w+) ", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert {n for n in names if not re.search(rf"^\| .*`{n}`", RUNNING, re.MULTILINE)} == set()


def test_every_route_is_documented(url: str) -> None:
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    for path in paths:
        family = re.sub(r"/(attention|gradients|variants)/.*", r"/\1", path)
        page = V2 if path.startswith("/v2") else HTTP
        assert f"{family}`" in page or f"{family}/{{variant}}`" in page, path


def test_every_variant_has_a_complete_description() -> None:
    for variant in catalogue.variants().values():
        description = catalogue.describe(variant)
        parts = ("summary", "formula", "paper", "cost", "weights", "outputs")
        assert all(description[part] for part in parts)
        for name, schema in description["parameters"]["properties"].items():
            assert schema.get("description"), f"{variant.name}: {name} has no description"


def test_generated_files_are_up_to_date() -> None:
    """README's table and docs/variants.md are equal to the output of `make docs`."""
    generated = runpy.run_path(str(ROOT / "docs/make.py"))["build_files"]()
    for path, text in generated.items():
        assert (ROOT / path).read_text() == text, f"{path}: run make docs"
    pictures = {path.stem for path in PICTURES.iterdir()}
    assert pictures == {n for n, v in catalogue.variants().items() if has_matrix(v)}


@pytest.mark.parametrize("name", catalogue.variants())
def test_every_variant_is_in_the_readme_and_has_a_section(name: str) -> None:
    page, description = (
        (ROOT / "docs/variants.md").read_text(),
        catalogue.describe(catalogue.find(name)),
    )
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for text, words in ((README, ["formula"]), (section, ["formula", "paper", "cost"])):
        plain = html.unescape(text).replace("\\|", "|").replace("\\*", "*")
        assert all(description[word] in plain for word in words)
    assert f"[{name}](docs/variants.md#{name})" in README
    assert description["summary"] in section
    for named in ("inputs", "outputs", "refuses"):
        assert all(f"| `{n}` |" in section for n in description[named])
    assert all(f"| `{n}` |" in section for n in description["parameters"]["properties"])
    picture = PICTURES / f"{name}.svg"
    assert (f'src="{picture.relative_to(ROOT)}"' in README) is picture.exists()
    assert (f"](../{picture.relative_to(ROOT)})" in section) is picture.exists()


def test_every_layout_is_documented() -> None:
    """docs/layouts.md describes each layout and compares it with a real module."""
    description, _, measured = LAYOUTS.partition("<!-- made by")
    for name in layout_catalogue.known():
        assert re.search(rf"\b{name}\b", HTTP)
        assert f"| `{name}` |" in description
        assert f"| `{name}` |" in measured


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_has_a_target_and_every_page_is_linked_from_the_readme(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]*)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [
                re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings
            ], f"{page.name}: {link}"
    if page.is_relative_to(ROOT / "docs"):
        assert f"]({page.relative_to(ROOT)})" in README


def test_readme_has_its_two_commands_at_the_start() -> None:
    """They are targets of the Makefile, which begins with them too."""
    section = README.partition("\n## Two commands\n")[2].partition("\n## ")[0]
    commands = fences(section)[0][1].splitlines()
    assert commands == ["make serve", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert "`make serve` and `make test`" in makefile.splitlines()[0]
    for command in commands:
        assert re.search(rf"^{command.removeprefix('make ')}:", makefile, re.MULTILINE)


def test_stated_cost_of_a_request_is_the_measured_one() -> None:
    """Beside bare torch, at S, M and L, in the table of docs/performance.md."""
    performance = (ROOT / "docs/performance.md").read_text()
    (row,) = re.findall(r"^\| V2 binary \|([^|]*(?:\|[^|]*){5})\|$", performance, re.MULTILINE)
    milliseconds, *ratios = (row.split("|")[n].split()[0] for n in (0, 1, 3, 5))
    for page in ("README.md", "CONVENTIONS.md"):
        text = (ROOT / page).read_text()
        assert re.findall(r"([\d.]+) times", text) == ratios, page
    assert f"which is {float(milliseconds):.1f} ms" in README


def test_no_file_names_a_machine_or_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split():
        if (ROOT / name).exists():
            text = (ROOT / name).read_text(errors="replace")  # pictures too
            assert not re.search(r"py(pi|thonhosted)\.org|download\.pytorch", text), name
