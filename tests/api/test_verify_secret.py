"""Processes and services with the same secret judge the same cases of /v1/verify."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

import httpx
import pytest
from click.testing import CliRunner
from pydantic import SecretStr

from qkv.cli.main import main
from qkv.settings import Settings
from support.drawn_cases import arrays, draw, judge, post_outputs, softmax
from support.known_requests import Array, assert_problem
from support.processes import TIMEOUT_S, Process, wait_until
from support.service import running_server
from support.service_processes import child_pids, status_of

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")

SECRET: Final = "0123456789abcdef" * 2


def verdicts(process: Process, token: str, output: dict[str, Array]) -> set[int]:
    """Returns the statuses of 12 requests; each has its own connection, to any worker."""
    found = set()
    for _ in range(12):
        with httpx.Client(base_url=process.url, timeout=TIMEOUT_S, verify=False) as http:
            found.add(post_outputs(http, token, output).status_code)
    return found


def judged_case(process: Process) -> tuple[str, dict[str, Array]]:
    """Returns the token of a case, and a right output for it."""
    with httpx.Client(base_url=process.url, timeout=TIMEOUT_S) as http:
        case = draw(http, sizes={"L": 4}, encoding="base64")
    return case["case"], {"output": softmax(arrays(case))}


@pytest.mark.representative
def test_every_worker_judges_a_case(shared_process: Callable[..., Process]) -> None:
    """The supervisor has drawn the secret."""
    started = shared_process("--workers", "2")
    assert verdicts(started, *judged_case(started)) == {200}


def test_restarted_worker_judges_a_case(command: Callable[..., Process]) -> None:
    started = command("serve", "--port", "0", "--workers", "2")
    case = judged_case(started)
    before = child_pids(started.popen.pid)
    for victim in before:
        os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(set(child_pids(started.popen.pid)) - set(before)) == 2)
    wait_until(lambda: status_of(started.url, "/readyz") == 200)
    assert verdicts(started, *case) == {200}
    assert started.end() == 0


def test_services_with_the_same_secret_judge_each_others_cases() -> None:
    with running_server(verify_secret=SECRET) as first:
        case = draw(first.http, sizes={"L": 4}, encoding="base64")
    output = {"output": softmax(arrays(case))}
    with running_server(verify_secret=SECRET) as second:
        assert judge(second.http, case, **output)["passed"] is True
    with running_server(verify_secret=SECRET[::-1]) as third:
        assert_problem(post_outputs(third.http, case["case"], output), 422)


def test_secret_is_never_shown() -> None:
    short = CliRunner().invoke(main, ["serve"], env={"QKV_VERIFY_SECRET": "swordfish"})
    assert short.exit_code == 1
    assert "QKV_VERIFY_SECRET" in short.output
    assert "32 characters" in short.output
    assert "swordfish" not in short.output
    settings = Settings(verify_secret=SecretStr(SECRET))
    assert SECRET not in f"{settings} {settings!r} {settings.model_dump_json()}"
    assert settings.with_secret() is settings
    drawn = [Settings().with_secret().verify_secret for _ in range(3)]
    assert len({secret.get_secret_value() for secret in drawn if secret}) == 3
