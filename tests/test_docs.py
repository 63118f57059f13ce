"""Tests of the pages: examples run, generated parts are true, and every public name is there."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from click.testing import CliRunner

import qkv
import qkv.testing
from qkv import Client
from qkv.attention import catalogue
from qkv.attention.layers import layout_catalogue
from qkv.cli.main import main
from qkv.settings import Settings
from support.forked_scripts import run_script
from support.paths import ROOT

ADDRESS: Final = "http://127.0.0.1:8000"
HOST: Final = ADDRESS.removeprefix("http://")
FOLDERS: Final = (".", "docs/**", "bench/results", "service/qkv/**")
PAGES: Final = {
    str(page.relative_to(ROOT)): page.read_text()
    for folder in FOLDERS
    for page in sorted(ROOT.glob(f"{folder}/*.md"))
}
EVERYTHING: Final = "\n".join(PAGES.values())
# Their examples build on each other, or are files of variants: tests of their own run them.
ELSEWHERE: Final = re.compile(
    r"^# The oracle.*|^# A variant is one file.*|^## Serve a model's layers\n.*?(?=^## |\Z)",
    re.M | re.S,
)
TEXTS: Final = [ELSEWHERE.sub("", page) for page in PAGES.values()]


def fences(page: str) -> list[tuple[str, str]]:
    """Returns a page's code blocks in order: (language, text)."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def examples(language: str, result: str = "") -> list[tuple[str, str]]:
    """Returns the blocks in `language` of all pages, each with the `result` that follows it."""
    return [
        (text, output)
        for page in TEXTS
        for (named, text), (kind, output) in itertools.pairwise(fences(page))
        if named == language and kind == result
    ]


def blocks(language: str) -> list[str]:
    """Returns all blocks in `language` of all pages."""
    return [text for page in TEXTS for named, text in fences(page) if named == language]


CURL: Final = [each for each in examples("sh", "json") if each[0].startswith("curl")]


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


@pytest.mark.parametrize(("command", "documented"), CURL)
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


@pytest.mark.parametrize(("program", "printed"), examples("python"))
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


@pytest.mark.parametrize(("program", "printed"), examples("js"))
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


@pytest.mark.parametrize(
    ("language", "ran"),
    [("json", [response for _, response in CURL])]
    + [(language, [text for text, _ in examples(language)]) for language in ("python", "js")],
)
def test_every_example_has_its_result_on_the_page(language: str, ran: list[str]) -> None:
    assert blocks(language) == ran != []


def run_example(command: str, url: str, folder: Path) -> tuple[str, str]:
    """Runs the script of a page with `command` in it: (its output, the documented one)."""
    ((script, documented),) = (each for each in examples("sh") if command in each[0])
    return run_script(script, folder, QKV_URL=url), documented


@pytest.mark.slow
def test_command_line_example_prints_the_documented_output(url: str, tmp_path: Path) -> None:
    printed, documented = run_example("qkv attend", url, tmp_path)
    assert re.sub(r"[0-9.]+ ms", "ms", printed) == re.sub(r"[0-9.]+ ms", "ms", documented)


@pytest.mark.slow
def test_compare_and_sweep_example_prints_the_documented_output(url: str, tmp_path: Path) -> None:
    """Times, figures that depend on them, and the last digits of the processor are not compared."""
    printed, documented = run_example("qkv compare", url, tmp_path)
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


def test_variant_of_the_contributing_page_passes_its_checks(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```python variant\n(.*?)^```$", EVERYTHING, re.MULTILINE | re.DOTALL)
    (tmp_path / "cosine.py").write_text(text)
    done = CliRunner().invoke(main, ["check-variant", str(tmp_path / "cosine.py")])
    assert done.exit_code == 0
    assert done.stdout.endswith(" 0 failed\n")


def test_generated_parts_are_up_to_date() -> None:
    """They are what `make docs` writes: variants, their pictures, settings with their defaults."""
    make = runpy.run_path(str(ROOT / "docs/make.py"))
    for path, text in make["build_files"]().items():
        assert (ROOT / path).read_text() == text, f"{path}: run make docs"
    pictures = {path.stem for path in (ROOT / make["PICTURES"]).iterdir()}
    with_matrix = make["variant_pictures"].has_matrix
    assert pictures == {n for n, v in catalogue.variants().items() if with_matrix(v)}


def test_every_public_name_is_described() -> None:
    """Those of Python, the commands, the layouts and the settings, as code."""
    methods = {name for name in vars(Client) if not name.startswith("_")}
    names = {*qkv.__all__, *qkv.testing.__all__, *methods, *layout_catalogue.known()} | {
        f"QKV_{name.upper()}" for name in Settings.model_fields
    }
    code = " ".join(re.findall(r"`([^`\n]+)`", EVERYTHING)) + " ".join(
        text for page in PAGES.values() for _, text in fences(page)
    )
    assert {name for name in names if not re.search(rf"\b{name}\b", code)} == set()
    assert {name for name in main.commands if f"qkv {name}" not in code} == set()


def test_every_metric_is_in_a_table(url: str) -> None:
    names = re.findall(r"^# TYPE (\w+) ", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert {n for n in names if not re.search(rf"^\| .*`{n}`", EVERYTHING, re.MULTILINE)} == set()


def test_every_route_is_described(url: str) -> None:
    for path in httpx.get(f"{url}/openapi.json").json()["paths"]:
        family = re.sub(r"/(attention|gradients|variants)/.*", r"/\1", path)
        assert f"{family}`" in EVERYTHING or f"{family}/{{variant}}`" in EVERYTHING, path


@pytest.mark.parametrize("page", PAGES)
def test_every_link_has_a_target(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]*)\)", PAGES[page]):
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [
                re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings
            ], link


def test_every_stated_measurement_is_in_a_measured_table() -> None:
    number = re.compile(r"(?<![\d.])\d+\.\d+(?!\d|\.\d)")
    measured = {
        figure
        for page, text in PAGES.items()
        if page.startswith("bench/results/")
        for figure in number.findall(text)
    }
    for text in (PAGES["docs/benchmarks.md"], PAGES["README.md"].partition("## Status")[2]):
        assert set(number.findall(text)) - measured == set()
        assert number.search(text)


def test_no_file_names_a_machine_or_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split():
        if (ROOT / name).exists():
            text = (ROOT / name).read_text(errors="replace")  # pictures too
            assert not re.search(r"py(pi|thonhosted)\.org|download\.pytorch", text), name
