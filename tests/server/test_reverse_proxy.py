"""The configuration of nginx in docs/running.md: a real nginx with TLS in front of the service."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from support.paths import ROOT
from support.ports import free_port
from support.processes import TIMEOUT_S, Process, wait_until

NAME: Final = "attention.example"
KEY: Final = "0123456789abcdef"
# Debian has it in a folder that is not on every user's path.
NGINX: Final = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")


@pytest.mark.skipif(not NGINX, reason="needs nginx")
def test_documented_proxy_passes_keys_large_bodies_and_events(
    command: Callable[..., Process], tmp_path: Path
) -> None:
    keys = {"QKV_API_KEYS": f"alice:{KEY}", "QKV_ALLOWED_HOSTS": NAME}
    service = command("serve", "--port", "0", "--workers", "1", **keys)
    port = free_port()
    with subprocess.Popen([str(NGINX), "-c", str(configure(tmp_path, port, service.url))]) as nginx:
        try:
            wait_until(lambda: status(tmp_path, port, "/readyz") == "200")
            assert status(tmp_path, port, "/v1/variants") == "401"
            bearer = ("-H", f"Authorization: Bearer {KEY}")
            assert status(tmp_path, port, "/v1/variants", *bearer) == "200"
            (tmp_path / "large.json").write_text(  # more than nginx's own limit
                json.dumps({"inputs": {"value": [[1] * 64] * 16_384}, "outputs": ["output"]})
            )
            large = ("--json", f"@{tmp_path}/large.json")
            assert status(tmp_path, port, "/v1/attention/mean", *bearer, *large) == "200"
            sweep = ("--json", '{"variants": ["mean"], "lengths": [16]}')
            assert "event: done" in curl(tmp_path, port, "/v1/sweep", *bearer, *sweep)
        finally:
            nginx.terminate()


def configure(folder: Path, port: int, service: str) -> Path:
    """Writes the page's configuration with other addresses, and a certificate; returns its file."""
    subject = f"-subj /CN={NAME} -addext subjectAltName=DNS:{NAME}"
    files = f"-keyout {folder}/{NAME}.key -out {folder}/{NAME}.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes {subject} {files}"
    subprocess.run(command.split(), check=True, capture_output=True)
    page = (ROOT / "docs/running.md").read_text()
    (server,) = re.findall(r"^```nginx\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for documented, here in (
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("/etc/ssl", str(folder)),
        ("http://127.0.0.1:8000", service),
    ):
        assert documented in server
        server = server.replace(documented, here)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off;\npid {folder}/pid;\nerror_log {folder}/errors;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{folders}{server}}}\n"
    )
    return file


def curl(folder: Path, port: int, path: str, *words: str) -> str:
    """Returns what the proxy responds, over a connection that trusts its certificate alone."""
    command = ["curl", "-sS", "--cacert", f"{folder}/{NAME}.pem", "--max-time", str(TIMEOUT_S)]
    address = ("--resolve", f"{NAME}:{port}:127.0.0.1", f"https://{NAME}:{port}{path}")
    done = subprocess.run([*command, *address, *words], capture_output=True, text=True, check=False)
    return done.stdout


def status(folder: Path, port: int, path: str, *words: str) -> str:
    """Returns the status of a response; "000": there is none."""
    return curl(folder, port, path, *words, "-o", os.devnull, "-w", "%{http_code}")
