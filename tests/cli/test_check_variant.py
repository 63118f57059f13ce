"""`qkv check-variant` on a good, a wrong and a broken file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner, Result

from qkv.attention import variant_file
from qkv.attention.contract import CHECKS
from qkv.cli.main import main

EXAMPLE: Final = variant_file.example()


def run(path: Path) -> Result:
    return CliRunner().invoke(main, ["check-variant", str(path)])


def statuses(result: Result) -> dict[str, str]:
    """Returns the status of each check by its name."""
    lines = [line.partition(":")[0].split("  ", 1) for line in result.output.splitlines()[:-1]]
    return {name: status for status, name in lines}


def test_good_file_passes_every_check(tmp_path: Path) -> None:
    (tmp_path / "cosine.py").write_text(EXAMPLE)
    result = run(tmp_path / "cosine.py")
    found = statuses(result)
    assert list(found) == ["loads", *CHECKS]
    assert set(found.values()) == {"pass", "skip"}
    assert "skip  stochastic rows: its weights are unnormalised" in result.output
    assert result.output.splitlines()[-1] == "cosine: 11 checks, 0 failed"
    assert result.exit_code == 0


@pytest.mark.representative
def test_file_of_the_package_passes_every_check() -> None:
    result = run(variant_file.FOLDER / "mean.py")
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output


def test_wrong_file_fails_with_reasons(tmp_path: Path) -> None:
    wrong = EXAMPLE.replace("none.\n", "none.\nWeights: stochastic.\n")
    wrong = wrong.replace("@ value\n", "@ value.square()\n")
    wrong = wrong.replace("softmax(normalize", "(lambda x, _: x.exp())(40 * normalize")
    (tmp_path / "wrong.py").write_text(wrong)
    result = run(tmp_path / "wrong.py")
    found = statuses(result)
    assert {n for n, status in found.items() if status == "FAIL"} >= {"weights", "stochastic rows"}
    assert found["gradients"] == "pass"
    assert "weights @ value is off the output by" in result.output
    assert "rows of stochastic weights sum to 1" in result.output
    assert result.exit_code == 1


def test_broken_file_fails_with_an_example(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(EXAMPLE.replace(') -> Float[Tensor, "B H L E"]:', "):"))
    result = run(path)
    first, *rest = result.output.splitlines()
    assert first.startswith(f"FAIL  loads: {path} is no variant and is not served: attend has no")
    assert 'expected the output\'s shape, Float[Tensor, "B H L E"], or a NamedTuple' in first
    assert '    ) -> Float[Tensor, "B H L E"]:' in rest
    assert rest[-1] == "broken: 1 checks, 1 failed"
    assert result.exit_code == 1


def test_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    result = run(tmp_path / "none.py")
    assert result.exit_code == 2
    assert "none.py" in result.output
