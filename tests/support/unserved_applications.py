"""A program that sends requests to applications without workers.

Each application has a process of its own, which loads the variants of one folder.
"""

from __future__ import annotations

import json
import os
import sys

from fastapi.testclient import TestClient

from qkv.api.app import create_app
from qkv.settings import Settings


def main() -> None:
    """Writes the bodies of the responses to each request, sent twice, unless the start fails."""
    for settings, method, path, body in json.loads(sys.argv[1]):
        if not os.fork():
            with TestClient(create_app(Settings(device="cpu", **settings))) as http:
                one, other = (http.request(method, path, json=body).json() for _ in range(2))
            sys.stdout.write(f"{json.dumps([one, other])}\n")
            sys.stdout.flush()
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()
