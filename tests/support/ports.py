"""Ports for servers of tests and benchmarks that are told their port before they start."""

from __future__ import annotations

import random
import socket
from typing import Final

# above those of Ray's processes, below those that Linux gives to clients and for port 0: each of
# them could take a port between its choice and the start of the server
_PORTS: Final = range(20_000, 32_768)
_candidates: Final = random.SystemRandom().sample(_PORTS, len(_PORTS))


def free_port() -> int:
    """Returns a port of 127.0.0.1 that no process has, another one each time."""
    while True:
        port = _candidates.pop()
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
