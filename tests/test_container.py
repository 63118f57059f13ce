"""Tests of the compose file and the Dockerfile. They run the health check and need no docker."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from ruamel.yaml import YAML

from qkv.server.supervisor import BACKLOG_TIMEOUT_S
from qkv.server.worker import DRAIN_ACCEPT_S, DRAIN_IDLE_S
from qkv.settings import Settings
from support.paths import ROOT
from support.processes import TIMEOUT_S, Process, wait_until
from support.service import Server

RUNNING: Final = (ROOT / "docs/running.md").read_text()
COMPOSE: Final = (ROOT / "docker-compose.yml").read_text()
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text()
IMAGE: Final = "localhost/qkv"
VARIABLE: Final = re.compile(r"\$\{(\w+):-([^}]*)\}")


def compose(**environment: str) -> dict[str, Any]:
    """Returns the services with merge keys resolved and variables set, as docker compose does."""

    def fill(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: fill(value) for name, value in node.items()}
        if isinstance(node, list):
            return [fill(value) for value in node]
        if not isinstance(node, str):
            return node
        filled = VARIABLE.sub(lambda m: environment.get(m[1]) or m[2], node)
        assert "$" not in filled  # a variable without a default would be empty
        return filled

    services: dict[str, Any] = fill(YAML(typ="safe").load(COMPOSE)["services"])
    return services


SERVICES: Final[dict[str, dict[str, Any]]] = compose()
OURS: Final = {name: service for name, service in SERVICES.items() if service["image"] == IMAGE}
every_service = pytest.mark.parametrize("name", SERVICES)
each_of_ours = pytest.mark.parametrize("name", OURS)


def check_compose(path: Path) -> subprocess.CompletedProcess[str]:
    """Validates a file with the schema of the compose specification, without the network."""
    tool = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    return subprocess.run([*tool, str(path)], capture_output=True, text=True, check=False)


def test_compose_file_conforms_to_the_specification() -> None:
    done = check_compose(ROOT / "docker-compose.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("cap_drop:", "cap_dropp:", "cap_dropp"),
        ("read_only: true", "read_only: 5", "read_only"),
        ("image: localhost/qkv", "image: [qkv]", "image"),
        ("mem_limit: ${", "memory_limit: ${", "memory_limit"),
        ("reservations:", "reservation:", "reservation"),
        ("services:", "service:", "service"),
    ],
)
def test_specification_check_rejects_wrong_files(
    right: str, wrong: str, message: str, tmp_path: Path
) -> None:
    assert COMPOSE.count(right) == 1
    path = tmp_path / "docker-compose.yml"
    path.write_text(COMPOSE.replace(right, wrong))
    done = check_compose(path)
    assert done.returncode == 1
    assert message in done.stdout


def test_up_starts_one_service_on_port_8000() -> None:
    (plain,) = (service for service in SERVICES.values() if not service.get("profiles"))
    assert plain["ports"] == ["127.0.0.1:8000:8000"]  # by default on this machine only
    assert "deploy" not in plain


def test_the_gpu_profile_reserves_one_gpu() -> None:
    (name,) = (name for name, service in SERVICES.items() if service.get("profiles") == ["gpu"])
    (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert SERVICES[name]["environment"]["QKV_DEVICE"] == "cuda"
    assert f"docker compose --profile gpu up {name}" in RUNNING


@each_of_ours
def test_every_service_passes_every_setting_and_the_trace_endpoint(name: str) -> None:
    """Docker compose takes a variable without a value from the shell or from `.env`."""
    environment = SERVICES[name]["environment"]
    settings = {f"QKV_{n.upper()}" for n in Settings.model_fields} - {"QKV_HOST", "QKV_PORT"}
    assert environment.keys() == settings | {"OTEL_EXPORTER_OTLP_ENDPOINT"}
    assert SERVICES[name]["env_file"] == [{"path": ".env", "required": False}]
    defaults = {n: value for n, value in environment.items() if value is not None}
    assert defaults.pop("QKV_DEVICE", "cuda") == "cuda"  # of the service with a GPU
    for variable, value in defaults.items():
        assert compose(**{variable: "123"})[name]["environment"][variable] == "123", variable
        Settings.model_validate({variable.removeprefix("QKV_").lower(): value})


@each_of_ours
def test_memory_holds_the_queues_and_transfers_of_all_workers(name: str) -> None:
    environment = SERVICES[name]["environment"]
    workers, queue, response = (
        int(environment[f"QKV_{n}"]) for n in ("WORKERS", "MAX_QUEUE_BYTES", "MAX_RESPONSE_BYTES")
    )
    body = Settings.model_fields["max_body_bytes"].default
    layers = int(environment["QKV_MAX_CHECKPOINT_BYTES"])
    limit = int(SERVICES[name]["mem_limit"].removesuffix("g")) << 30
    of_worker = 2 * queue + body + 2 * response + (1 << 29)  # keys may double the queue
    assert limit > layers + workers * of_worker
    assert compose(MEM_LIMIT="20g")[name]["mem_limit"] == "20g"


def test_image_has_one_name_that_no_registry_has() -> None:
    """In the compose file, the Makefile and the manifests."""
    assert OURS
    makefile = (ROOT / "Makefile").read_text()
    assert f"\nIMAGE ?= {IMAGE}\n" in makefile
    manifests = "".join(path.read_text() for path in (ROOT / "deploy").rglob("*.yaml"))
    named = set(re.findall(r"(?:image|newName|- name): (\S*qkv\S*/\S*|\S*/qkv\S*)", manifests))
    assert named == {IMAGE, f"{IMAGE}-ray:latest"}
    assert set(re.findall(r"image: (\S+)", manifests)) == named


@every_service
def test_every_service_is_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"] if name in OURS else "/tmp" in service["tmpfs"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"\d+g", service["mem_limit"])
    assert service["restart"] == "unless-stopped"
    # no option restores privileges or replaces the image's user or health check
    assert not {"privileged", "cap_add", "user", "healthcheck", "entrypoint"} & set(service)


@each_of_ours
def test_stop_grace_period_is_longer_than_a_graceful_shutdown(name: str) -> None:
    grace = SERVICES[name]["stop_grace_period"]
    assert re.fullmatch(r"\d+s", grace)
    assert (
        int(grace[:-1])
        > DRAIN_ACCEPT_S
        + BACKLOG_TIMEOUT_S
        + DRAIN_IDLE_S
        + Settings.model_fields["drain_s"].default
    )


def test_compose_variables_have_defaults_and_can_be_set() -> None:
    assert {m[1] for m in VARIABLE.finditer(COMPOSE)} == {
        *("PUBLISH", "GRAFANA", "TORCH_INDEX", "MEM_LIMIT"),
        *("QKV_WORKERS", "QKV_MAX_QUEUE_BYTES", "QKV_MAX_RESPONSE_BYTES", "QKV_METRICS_PORT"),
        "QKV_MAX_CHECKPOINT_BYTES",
    }
    configured = compose(PUBLISH="0.0.0.0:80", TORCH_INDEX="an-index")
    for name, service in OURS.items():
        assert service["build"] == {"context": ".", "args": {"TORCH_INDEX": ""}}
        assert configured[name]["ports"] == ["0.0.0.0:80:8000"]
        assert configured[name]["build"]["args"] == {"TORCH_INDEX": "an-index"}


def stages() -> list[list[tuple[str, str]]]:
    """Returns the instructions (name, arguments) of each stage of the Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    instructions = [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]
    found: list[list[tuple[str, str]]] = []
    for name, arguments in instructions:
        assert name.isupper()
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, arguments))
        else:
            assert name == "ARG"  # the only instruction that docker allows before the first FROM
    return found


BUILDER, FINAL = stages()[0], stages()[-1]


def only(name: str) -> str:
    """Returns the arguments of an instruction that occurs once in the final stage."""
    (arguments,) = (text for instruction, text in FINAL if instruction == name)
    return arguments


def health_check(port: int) -> list[str]:
    """Returns the command of the health check, for another port and this Python."""
    _, _, command = only("HEALTHCHECK").partition("CMD ")
    python, *words = json.loads(command)
    assert python == "python"
    assert sum(word.count(":8000/") for word in words) == 1
    return [sys.executable, *(word.replace(":8000/", f":{port}/") for word in words)]


def test_final_stage_copies_only_the_environment() -> None:
    assert len(stages()) == 2
    assert FINAL[0][1] == BUILDER[0][1].removesuffix(" AS builder")
    copied = [arguments for name, arguments in FINAL if name in ("COPY", "ADD")]
    assert copied == ["--from=builder /opt/qkv /opt/qkv"]
    installed = re.findall(r"install ([^&]*)", " ".join(a for n, a in FINAL if n == "RUN"))
    assert [set(words.split()) for words in installed] == [
        {"-y", "--no-install-recommends", "tini"}  # no compiler and no build tools
    ]


def test_image_does_not_run_as_root() -> None:
    assert 0 < int(only("USER")) < 1 << 16  # Kubernetes can verify only a number
    after = FINAL[[name for name, _ in FINAL].index("USER") + 1 :]
    assert {name for name, _ in after} <= {"EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def test_process_one_is_tini_and_all_ports_are_equal() -> None:
    assert json.loads(only("ENTRYPOINT")) == ["tini", "--"]
    command = json.loads(only("CMD"))
    assert command == ["qkv", "serve", "--host", "0.0.0.0", "--port", only("EXPOSE")]
    assert only("EXPOSE") == "8000"
    assert health_check(8000)[0] == sys.executable


def test_copied_files_exist_and_are_not_ignored() -> None:
    sources = [w for n, text in BUILDER if n == "COPY" for w in text.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert "*" in ignored
    assert sorted(sources) == sorted(line[1:] for line in ignored if line.startswith("!"))
    assert all((ROOT / source).exists() for source in sources)


def test_no_package_index_and_no_registry_is_named() -> None:
    assert ("ARG", "TORCH_INDEX") in BUILDER  # without a default
    for text in (DOCKERFILE, COMPOSE, RUNNING):
        assert {m[1] for m in re.finditer(r"\w+://([^/:\s`'\")]+)", text)} <= {"127.0.0.1"}
    images = [text.split()[0] for name, text in BUILDER + FINAL if name == "FROM"]
    assert not any("/" in image for image in images)
    hosts = [service["image"].rpartition("/")[0] for service in SERVICES.values()]
    assert not any(re.search(r"[.:]", host) for host in hosts)


def is_healthy(port: int) -> bool:
    """Runs the image's health check with an unreachable proxy in the environment."""
    proxies = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(
        health_check(port), env=os.environ | proxies, capture_output=True, timeout=TIMEOUT_S
    )
    return done.returncode == 0


def test_health_check_passes_if_ready_and_fails_if_nothing_listens(
    shared_process: Callable[..., Process],
) -> None:
    port = httpx.URL(shared_process("--workers", "1").url).port
    assert port
    assert is_healthy(port)
    with socket.socket() as taken:  # bound but not listening: no other process can use the port
        taken.bind(("127.0.0.1", 0))
        assert not is_healthy(taken.getsockname()[1])


def test_health_check_fails_if_the_service_is_not_ready(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    _, port = server.address
    assert is_healthy(port)
    monkeypatch.setattr(type(server.engine), "is_ready", False)
    assert httpx.get(f"{server.url}/readyz").status_code == 503
    assert not is_healthy(port)


def test_health_check_fails_during_a_graceful_shutdown(command: Callable[..., Process]) -> None:
    draining = command("serve", "--port", "0", "--workers", "1")
    port = httpx.URL(draining.url).port
    assert port
    body = b'{"inputs": {"query": [[1]], "key": [[1]], "value": [[1]]}}'
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as upload:  # busy worker
        upload.sendall(
            b"POST /v1/attention/softmax HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        assert upload.recv(4096).startswith(b"HTTP/1.1 100 ")
        draining.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(port))
        assert not is_healthy(port)
        assert draining.popen.poll() is None
        upload.sendall(body)
        assert upload.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert draining.wait() == 0


def is_ready(port: int) -> bool:
    """Returns True if /readyz is 200 on a new connection."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").is_success
    except httpx.TransportError:
        return False
