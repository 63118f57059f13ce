"""qkv serves attention. This package is its client; `qkv[server]` adds the service."""

from qkv.client import AsyncClient, Client, Converted, Run
from qkv.errors import QkvError

__all__ = ["AsyncClient", "Client", "Converted", "QkvError", "Run", "__version__"]

__version__ = "0.1.0"
