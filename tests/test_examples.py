"""The notebooks of examples/ run from top to bottom, and their stored outputs are up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from torch.nn.functional import elu, normalize

import qkv
from support import minilm
from support.paths import ROOT

FOLDER = ROOT / "examples"
NAMES = ("which-heads", "oracle", "delta-rule", "seeds", "checkpoint", "decoding", "lessons")
MARKS = {
    "seeds": pytest.mark.representative,
    "oracle": pytest.mark.rare(
        "examples/oracle.ipynb",
        "examples/execute.py",
        "service/qkv/testing",
        "service/qkv/attention/variants/softmax.py",
    ),
    "delta-rule": pytest.mark.rare(
        "examples/delta-rule.ipynb",
        "examples/execute.py",
        "service/qkv/testing",
        "service/qkv/attention/variants/gated.py",
    ),
    "which-heads": pytest.mark.rare(
        "examples/which-heads.ipynb",
        "examples/sentences.txt",
        "examples/execute.py",
        "service/qkv/models",
        "service/qkv/jobs/measure",
    ),
    "checkpoint": pytest.mark.rare(
        "examples/checkpoint.ipynb",
        "examples/execute.py",
        "service/qkv/wire/checkpoint",
        "service/qkv/jobs/loaded",
        "service/qkv/attention/layers",
    ),
    "lessons": pytest.mark.rare(
        "examples/lessons.ipynb",
        "examples/execute.py",
        "service/qkv/attention/variants",
        "service/qkv/jobs/measure",
    ),
    "decoding": pytest.mark.rare(
        "examples/decoding.ipynb", "examples/execute.py", "service/qkv/jobs/measure"
    ),
}
MAX_BYTES = 400_000
SENTENCES = (FOLDER / "sentences.txt").read_text().splitlines()
PAIRS = 16


def read(name: str) -> Any:
    """Returns a notebook as it is stored."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def texts(notebook: Any) -> list[str]:
    """Returns the text of each output, with 0 for every number; pictures have none."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kept = [o.get("text") or o.get("data", {}).get("text/markdown", "") for o in outputs]
    return [re.sub(r"-?\d[\d.,e+-]*", "0", text) for text in kept]


def rows_of(name: str, header: str) -> list[list[str]]:
    """Returns the rows of the table with this header among the outputs of a notebook."""
    outputs = [output for cell in read(name).cells for output in cell.get("outputs", [])]
    tables = [output.get("data", {}).get("text/markdown", "") for output in outputs]
    (found,) = (table for table in tables if table.startswith(f"| {header} |"))
    return [line.strip("| ").split(" | ") for line in found.splitlines()[2:]]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, ())) for name in NAMES],
)
def test_notebook_runs_and_gives_its_stored_outputs(name: str) -> None:
    """Digits may differ between processors. Errors of cells are raised."""
    execute = runpy.run_path(str(FOLDER / "execute.py"))["execute"]
    assert texts(execute(FOLDER / f"{name}.ipynb")) == texts(read(name))


@pytest.mark.parametrize("name", ["prompt_in_chunks", "token_by_token"])
def test_script_ends_with_the_bits_of_the_whole(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QKV_URL", url)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out == "True\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_stored_notebook_is_complete_and_small(path: Path) -> None:
    text, notebook = path.read_text(), read(path.stem)
    assert len(text) < MAX_BYTES
    assert not re.search(r"/(root|home|tmp|work|usr)/", text)
    assert notebook.cells[0].source.startswith("# ")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]
    pictures = [o for cell in code for o in cell.outputs if "image/png" in o.get("data", {})]
    assert pictures
    imported = set(re.findall(r"^\s*from qkv(\S*) import|^\s*import qkv(\S+)", text, re.MULTILINE))
    assert {first or second for first, second in imported} <= {"", ".testing"}


def test_every_notebook_is_executed_and_linked() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)
    pages = (ROOT / "docs/README.md").read_text()
    assert all(f"](../examples/{name}.ipynb)" in pages for name in NAMES)


def test_page_of_the_oracle_has_the_counts_of_its_notebook() -> None:
    (counts,) = (
        output.text
        for cell in read("oracle").cells
        for output in cell.get("outputs", [])
        if output.get("text", "").startswith("Of ")
    )
    assert counts.strip().replace("\n", " ") in (ROOT / "docs/oracle.md").read_text()


@pytest.mark.slow
def test_closest_head_of_linear_attention_has_the_stored_figures() -> None:
    """Computes them again from the formula, in float64, with the model's own queries and keys."""
    _, place, error, variation, _, entropy, baseline_entropy = rows_of("which-heads", "variant")[0]
    layer, head = map(int, place.split(", "))
    totals, tokens = torch.zeros(4, dtype=torch.float64), 0
    for sentence in SENTENCES:
        found = minilm.activations_of(sentence)[layer]
        query_LD, key_SD, value_SE = (
            x[0, head].double() for x in (found.query_BHLD, found.key_BGSD, found.value_BGSE)
        )
        softmax_LS = (query_LD @ key_SD.T / query_LD.shape[-1] ** 0.5).softmax(-1)
        weights_LS = (elu(query_LD) + 1) @ (elu(key_SD) + 1).T
        weights_LS /= weights_LS.sum(-1, keepdim=True)
        difference_LE, output_LE = (weights_LS - softmax_LS) @ value_SE, softmax_LS @ value_SE
        figures = (
            difference_LE.norm() / output_LE.norm(),
            (weights_LS - softmax_LS).abs().sum(-1).mean() / 2,
            -torch.xlogy(weights_LS, weights_LS).sum(-1).mean(),
            -torch.xlogy(softmax_LS, softmax_LS).sum(-1).mean(),
        )
        totals += torch.stack(figures) * len(query_LD)
        tokens += len(query_LD)
    stored = [float(text) for text in (error, variation, entropy, baseline_entropy)]
    # half a unit of the last digit, and the rounding errors of the model
    assert stored == pytest.approx((totals / tokens).tolist(), abs=0.5e-3 + 1e-5)


@pytest.mark.slow
def test_six_closest_heads_of_taylor_attention_have_the_stored_effect() -> None:
    """Computes it again with one sentence after the other, without padding."""
    rows = [row for row in rows_of("which-heads", "variant") if row[0] == "taylor"]
    substitutes: dict[str, dict[str, Any]] = {}
    for layer, head in (map(int, row[1].split(", ")) for row in rows):
        substitute = substitutes.setdefault(f"encoder.layer.{layer}", {"variant": "taylor"})
        substitute["heads"] = [*substitute.get("heads", []), head]
    own_NM = torch.stack([minilm.embedding_of(sentence) for sentence in SENTENCES])
    model, tokenizer = minilm.bert(), minilm.tokenizer()
    with torch.no_grad(), qkv.substitute(model, substitutes):
        last_BLM = [
            model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state
            for sentence in SENTENCES
        ]
    changed_NM = torch.stack([normalize(x_BLM.mean((0, 1)), dim=0) for x_BLM in last_BLM])
    cosine = float((own_NM * changed_NM).double().sum(-1).mean())
    neighbours = [(x @ x.T).fill_diagonal_(-2).argmax(-1) for x in (own_NM, changed_NM)]
    same = float((neighbours[0] == neighbours[1]).double().mean())
    (stored,) = (row for row in rows_of("which-heads", "heads") if row[0] == "6")
    assert stored[2] == f"{cosine:.3f}, {same:.0%}"


def test_pairs_that_say_the_same_are_neighbours_in_the_model() -> None:
    """The notebook has the model and its tokenizer, not something like it."""
    x_NM = torch.stack([minilm.embedding_of(sentence) for sentence in SENTENCES])
    nearest = (x_NM @ x_NM.T).fill_diagonal_(-2).argmax(-1)[: 2 * PAIRS]
    assert nearest.tolist() == [n ^ 1 for n in range(2 * PAIRS)]
