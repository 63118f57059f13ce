"""Tests of `qkv oracle`: it writes cases that other commands and programs read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from qkv.testing import FAMILIES
from qkv.testing.case_spec import CaseSpec
from support.commands import error_of, invoke, one_error, read_tensors, stdout_of

STEEP = ("--family", "steep", "--seed", 7, "--dtype", "bfloat16", "--sizes", "L=8,S=12,H=2")


def test_file_has_the_layout_of_the_page(tmp_path: Path) -> None:
    path = tmp_path / "case.safetensors"
    printed = stdout_of("oracle", "softmax", *STEEP, "-p", "causal=true", "-o", path)
    assert printed.splitlines() == [
        "query            bfloat16  2x2x8x16",
        "key              bfloat16  2x2x12x16",
        "value            bfloat16  2x2x12x16",
        "grad_output      bfloat16  2x2x8x16",
        f"written to {path}",
    ]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].decode()
    assert (8 + length) % 64 == 0
    assert list(json.loads(header)) == ["__metadata__", "query", "key", "value", "grad_output"]
    assert '"query":{"dtype":"BF16","shape":[2,2,8,16],"data_offsets":[0,1024]}' in header
    assert '\\"causal\\":true' in header
    with safetensors.safe_open(path, framework="np") as file:
        fields = json.loads(file.metadata()["qkv"])
    assert fields == {
        "parameters": {"causal": True},
        "dtype": "bfloat16",
        "case": {
            "variant": "softmax",
            "family": "steep",
            "sizes": {"L": 8, "S": 12, "H": 2},
            "seed": 7,
        },
    }


def test_same_options_write_the_same_file_and_another_seed_another(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        stdout_of("oracle", "softmax", "--seed", seed, "-o", path)
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second != other
    tensors = safetensors.numpy.load_file(paths[0])
    call = CaseSpec("softmax").draw()
    for name, x in call.inputs.items():
        assert np.array_equal(tensors[name], x.numpy())


def test_json_has_the_numbers_as_lists(tmp_path: Path) -> None:
    for suffix in (".json", ".safetensors"):
        stdout_of("oracle", "softmax", "--family", "mask", "-o", tmp_path / f"case{suffix}")
    exact = read_tensors(tmp_path / "case.safetensors")
    for name, lists in read_tensors(tmp_path / "case.json", "inputs").items():
        assert np.array_equal(lists.astype(exact[name].dtype), exact[name])


def test_families_are_listed_with_their_texts() -> None:
    lines = stdout_of("oracle", "--list").splitlines()
    assert len(lines) == len(FAMILIES)
    for line, (name, family) in zip(lines, FAMILIES.items(), strict=True):
        assert line.startswith(f"{name} ")
        assert family.text in line
        assert line.endswith(" (strict)") is family.is_strict


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_case_is_a_source_of_the_other_commands(tmp_path: Path, suffix: str) -> None:
    case, out = tmp_path / f"case{suffix}", tmp_path / "out.npz"
    stdout_of("oracle", "softmax", *STEEP, "-o", case)
    for command, names in (("attend", {"output", "weights"}), ("gradients", {"query", "value"})):
        stdout_of(command, "softmax", case, "-o", out, "--local")
        assert names <= read_tensors(out).keys()
    assert "linear" in stdout_of("compare", "linear", case, "--local")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--family", "nosuch"), 'family is invalid: got "nosuch", expected one of normal,'),
        (("--seed", "-1"), "seed is invalid: got -1"),
        (("--sizes", "Q=1"), "softmax has no axis 'Q' of a free size"),
        (("--sizes", "L=0"), "sizes.L is invalid: got 0"),
        (("--sizes", "B=100000000000"), "the case is too large: got 409600000000000 scores"),
        (("--sizes", f"D={10**18},E=1"), f"too large: got {256 * 10**18} numbers of an input"),
        (("--sizes", "L"), "got 'L', expected letters and numbers as in L=64,S=128"),
        (("--dtype", "int8"), "'int8' is not one of"),
        (("-p", "dropout=0.1"), "dropout cannot be verified"),
        (("-p", "nosuch=1"), "softmax has no parameter 'nosuch'"),
        (("--family", "more queries", "-p", "causal=true", "-p", "query_offset=end"),
         "family 'more queries' cannot be drawn: rows that see no key"),
    ],
)  # fmt: skip
def test_wrong_option_is_one_line(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    line = error_of(tmp_path, "oracle", "softmax", *words, "-o", tmp_path / "case.safetensors")
    assert problem in line


def test_without_torch_the_error_names_the_extra() -> None:
    program = "import sys; sys.modules['torch'] = None; from qkv.cli.main import main; main()"
    for words in (["oracle", "--list"], ["verify", "--exec", "true {in} {out}", "softmax"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "torch is missing" in one_error(done.stderr)
        assert "pip install '.[server]'" in done.stderr


def test_format_that_cannot_hold_a_case_is_an_error(tmp_path: Path) -> None:
    line = error_of(tmp_path, "oracle", "softmax", "-o", tmp_path / "case.npz")
    assert "an .npz file cannot hold a case" in line
    line = error_of(tmp_path, "oracle", "softmax", "-o", tmp_path / "case.pt")
    assert "none of the suffixes .safetensors, .json" in line
    assert invoke("oracle", "softmax").exit_code == 2
