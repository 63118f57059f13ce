"""The address and the API key of the service: from arguments, else from the environment."""

from __future__ import annotations

import os
import re
from typing import Final

DEFAULT_URL: Final = "http://127.0.0.1:8000"


def service_url(url: str | None) -> str:
    """Returns the given URL, else that of QKV_URL, else the default of `qkv serve`."""
    return url if url is not None else os.environ.get("QKV_URL") or DEFAULT_URL


def auth_header(api_key: str | None) -> dict[str, str]:
    """Returns the header with the given API key, else with that of QKV_API_KEY.

    Raises:
        ValueError: the key has characters that no key has. The message does not show the key.
    """
    key = api_key if api_key is not None else os.environ.get("QKV_API_KEY") or None
    if key is None:
        return {}
    if not re.fullmatch(r"[!-~]+", key):  # otherwise an error of a library would show the key
        raise ValueError("the API key is empty or has characters other than printable ASCII")
    return {"Authorization": f"Bearer {key}"}
