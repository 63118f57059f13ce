"""Tests of `Program`: real programs get each case as a file, and their faults are named."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.errors import InvalidContent
from qkv.testing import Report
from qkv.testing.case_spec import CaseSpec
from qkv.testing.program import Program
from qkv.testing.verification import verify_runner
from support.compiled_kernel import Command
from support.compiled_kernel import kernel as kernel
from support.processes import wait_until
from support.service_processes import child_pids

NORMAL = CaseSpec("softmax", sizes={"B": 1, "H": 1, "L": 2, "S": 2, "D": 2})


def verify(command: str, causal: bool = False, **options: object) -> Report:
    parameters = {"causal": True} if causal else {}
    return verify_runner(Program(command), "softmax", parameters, name="kernel", **options)  # type: ignore[arg-type]


def shell(script: str) -> Program:
    """Returns a program of one line of shell, which gets both paths as arguments."""
    return Program(f"sh -c {shlex.quote(script)} sh {{in}} {{out}}", timeout_s=10)


@pytest.mark.slow
def test_right_kernel_of_another_language_passes(kernel: Command) -> None:
    assert verify(kernel(), causal=True, dtype="float32", families=["normal", "large"]).passed
    report = verify(kernel())
    assert report.passed, report
    assert {check.dtype for check in report.checks if check.passed} == {"float32"}
    reasons = {check.family: check.not_run for check in report.not_run if check.dtype == "float32"}
    assert reasons["mask"] == "no mask"
    assert reasons["padding"] == "no key_lengths"
    assert "  not run: bfloat16, float16, float64: float32 only\n" in str(report)


@pytest.mark.parametrize("bug", ["scale-missing", "causal-off-by-one", "normalizer-missing"])
def test_bug_of_a_kernel_of_another_language_is_named(kernel: Command, bug: str) -> None:
    families = ["normal", "grouped heads", "more keys"]
    report = verify(kernel(bug), causal=True, dtype="float32", families=families)
    assert not report.passed
    assert report.diagnosis == [bug]


def test_dtype_that_is_not_taken_did_not_run(kernel: Command) -> None:
    report = verify(kernel(), dtype="float64", families=["normal"])
    assert not report.passed
    assert "no check ran" in str(report)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 3", "exits with status 3"),
        ("echo no; echo 'too  small' >&2; echo >&2; exit 1", "exits with status 1: too  small"),
        ("kill -SEGV $$", "ended by SIGSEGV"),
        ("echo late >&2", "no result in {out}: No such file or directory: late"),
        ("mkdir $2", "no result in {out}: Is a directory"),
        ("mkfifo $2", "no result in {out}: not a regular file"),
        ("echo {} > $2", "wrong result in {out}: it is too short"),
        ("cp $1 $2", "wrong result in {out}: outputs.output is missing"),
        (r"printf '\2\0\0\0\0\0\0\0{}' > $2", "wrong result in {out}: outputs.output is missing"),
        ("echo $2 >&2; exit 1", "exits with status 1: .../out.safetensors"),
        (r"printf 'a\033[31m\377b' >&2; exit 1", "exits with status 1: a [31m\ufffdb"),
    ],
)  # fmt: skip
def test_fault_is_named(script: str, problem: str) -> None:
    outcome = shell(script)(NORMAL, NORMAL.draw())
    assert outcome.problem.startswith(problem)
    assert not outcome.results


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo 'D is not 64' >&2; exit 77", "D is not 64"), ("exit 77", "the program exits with 77")],
)
def test_case_with_status_77_is_not_run(script: str, reason: str) -> None:
    assert shell(script)(NORMAL, NORMAL.draw()).not_run == reason


def is_running(pid: int) -> bool:
    """True unless the process has ended; one that nobody waits for may stay as a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_timeout_ends_the_program_and_what_it_started(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! $$ > {shlex.quote(str(tmp_path / 'pids'))}; wait"
    words = shlex.join(["sh", "-c", script, "{in}", "{out}"])
    outcome = Program(words, timeout_s=0.5)(NORMAL, NORMAL.draw())
    assert outcome.problem == "no result after 0.5 s"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


def test_words_are_no_shell_and_paths_are_words(tmp_path: Path) -> None:
    program = tmp_path / "my kernel"
    program.write_text('#!/bin/sh\nfor word; do echo "$word" >> "$0.words"; done\nexit 77\n')
    program.chmod(0o755)
    command = f"{shlex.quote(str(program))} '$HOME; x' --in={{in}} {{out}} {{other}}"
    Program(command)(NORMAL, NORMAL.draw())
    words = Path(f"{program}.words").read_text().splitlines()
    assert words[0] == "$HOME; x"
    assert words[1].startswith("--in=/")
    assert [Path(word).name for word in words[1:]] == [
        "in.safetensors", "out.safetensors", "{other}"
    ]  # fmt: skip
    assert not Path(words[2]).parent.exists()


def test_relative_program_is_found_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernel").write_text("#!/bin/sh\npwd >&2\nexit 77\n")
    (tmp_path / "kernel").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    not_run = Program("./kernel {in} {out}")(NORMAL, NORMAL.draw()).not_run
    assert Path(not_run) == Path(os.getcwd())


@pytest.mark.parametrize("command", ["", "./kernel", "./kernel {in}", "./kernel {out}", "a {in}'"])
def test_command_without_placeholders_is_an_error(command: str) -> None:
    with pytest.raises(InvalidContent, match="the command is invalid: got "):
        Program(command)


def test_program_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        Program("./no_such_kernel {in} {out}")(NORMAL, NORMAL.draw())


def test_gradients_are_judged_if_the_program_writes_them(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    call = NORMAL.draw()
    results = {f"grad_{n}": torch.zeros_like(x) for n, x in call.inputs.items()}
    save_file({**results, "output": torch.zeros(1, 1, 2, 2)}, tmp_path / "with.safetensors")
    save_file({"output": torch.zeros(1, 1, 2, 2)}, tmp_path / "without.safetensors")
    command = f'sh -c \'cp "$2" "$1"\' {{in}} {{out}} {shlex.quote(str(tmp_path))}'
    outcome = Program(f"{command}/with.safetensors")(NORMAL, call)
    assert set(outcome.results) == {"output", "grad query", "grad key", "grad value"}
    without = f"{command}/without.safetensors"
    assert set(Program(without)(NORMAL, call).results) == {"output"}
    needed = Program(without, needs_gradients=True)(NORMAL, call)
    assert needed.problem == "wrong result in {out}: outputs.grad_query is missing: got output"


def test_program_ends_if_a_signal_arrives_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives inside `Popen`: the program runs already, and nobody has its process id yet."""
    start = subprocess.Popen.__init__

    def start_and_signal(self: subprocess.Popen[bytes], *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess.Popen, "__init__", start_and_signal)
    before = child_pids(os.getpid())
    with pytest.raises(KeyboardInterrupt):
        verify_runner(shell("exec sleep 600"), "softmax", {}, families=["normal"], name="sleep")
    assert child_pids(os.getpid()) == before
