"""Tests of `qkv verify --exec`: real programs, in a terminal too."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import error_of, invoke, stdout_of
from support.compiled_kernel import Command
from support.compiled_kernel import kernel as kernel
from support.processes import TIMEOUT_S, Process, start_command, wait_until
from support.service_processes import is_alive
from support.terminals import open_terminal

QUICK = ("--dtype", "float32", "--families", "normal,more keys")


def test_right_kernel_passes(kernel: Command) -> None:
    words = ("verify", "--exec", kernel(), "softmax", *QUICK, "-p", "causal=true", "--seed", 7)
    first, second = stdout_of(*words).splitlines()
    assert first.endswith("as softmax, causal=True: passed, 0 of 2 checks failed (seed 7)")
    assert second.startswith("  largest error: ")


def test_wrong_kernel_fails_with_the_bug_and_a_command_for_its_inputs(
    kernel: Command, tmp_path: Path
) -> None:
    words = ("--seed", 7, "--sizes", "D=8", "-p", "causal=true")
    wrong = ("verify", "--exec", kernel("causal-off-by-one"), "softmax", *QUICK, *words)
    done = invoke(*wrong)
    assert done.exit_code == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[1] == "  looks like: causal-off-by-one"
    report = json.loads(invoke(*wrong, "--json").stdout)
    assert report["seed"] == 7
    assert report["parameters"] == {"causal": True}
    label, command = lines[-1].split(": ")
    assert label == "  to write the worst case"
    case = tmp_path / "case.safetensors"
    stdout_of(*shlex.split(command.replace("case.safetensors", shlex.quote(str(case))))[1:])
    mine = tmp_path / "mine.safetensors"
    run = kernel("causal-off-by-one").format(**{"in": case, "out": mine})
    subprocess.run(shlex.split(run), check=True)
    alone = json.loads(invoke("verify", "softmax", case, mine, "--json").stdout)
    (found,) = alone["checks"]
    assert found in report["checks"]
    assert found["family"] in lines[2]


def test_program_that_takes_no_case_does_not_pass(kernel: Command) -> None:
    done = invoke("verify", "--exec", kernel(), "softmax", "--families", "mask", "--strict")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[1:] == ["  not run: mask: no mask"]


def test_gradients_can_be_required(kernel: Command) -> None:
    done = invoke("verify", "--exec", kernel(), "softmax", *QUICK, "--gradients")
    assert done.exit_code == 1
    assert "outputs.grad_query is missing: got output" in done.stdout


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--exec", "./kernel {in}"), "got './kernel {in}', expected {in} and {out} in it"),
        (("--exec", "no_such_program {in} {out}"), "no_such_program: No such file"),
        (("--exec", "true {in} {out}", "--families", "nosuch"), "no family 'nosuch'"),
        (("--exec", "true {in} {out}", "--dtype", "int8"), "no dtype 'int8'"),
        (("--exec", "true {in} {out}", "-p", "nosuch=1"), "softmax has no parameter 'nosuch'"),
        (("--exec", "true {in} {out}", "--timeout", "0"), "--timeout"),
        (("--exec", "true {in} {out}", "--sizes", f"D={10**18}"), "out of memory"),
        (("--exec", "true {in} {out}", "--sizes", f"B={10**20}"), "sizes.B is invalid"),
        (("--exec", "true {in} {out}", "--seed", "-1"), "seed is invalid: got -1"),
    ],
)
def test_wrong_option_is_one_line(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    assert problem in error_of(tmp_path, "verify", "softmax", *words)


@pytest.mark.parametrize(
    ("number", "lines"),
    [
        (signal.SIGINT, ["Error: interrupted"]),
        pytest.param(signal.SIGTERM, [], marks=pytest.mark.representative),
    ],
)
def test_signal_ends_the_program_too(
    command: Callable[..., Process], tmp_path: Path, number: int, lines: list[str]
) -> None:
    script = f"echo $$ > {shlex.quote(str(tmp_path / 'pid'))}; exec sleep 600"
    words = shlex.join(["sh", "-c", script, "{in}", "{out}"])
    process = command("verify", "--exec", words, "softmax", TMPDIR=str(tmp_path))
    wait_until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
    assert process.end(number) == 128 + number
    assert process.lines == lines
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid))  # the kernel ends it a little later
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


@pytest.mark.slow
def test_terminal_gets_a_progress_bar_and_wrapped_lines(
    kernel: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, end = open_terminal(60)
    words = ("verify", "--exec", kernel("scale-missing"), "softmax", *QUICK)
    # readline sets COLUMNS for child processes, which the workers of pytest-xdist are
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    process = start_command(tuple(map(str, words)), {}, end, end)
    os.close(end)
    drawn = b""
    while True:
        try:
            part = os.read(screen, 1 << 16)
        except OSError:  # Linux's end of a terminal
            break
        if not part:
            break
        drawn += part
    assert process.wait(TIMEOUT_S) == 1
    os.close(screen)
    text = drawn.decode()
    assert "float32, normal:   0%|" in text
    report = text.rpartition("\r\n  looks like")[2].splitlines()
    assert [line for line in report[:-1] if len(line) > 60] == []
    assert report[-1].startswith("  to write the worst case: qkv oracle softmax --family ")
