"""qkv serves attention. This package is its client; `qkv[server]` adds the service."""

from qkv.client import AsyncClient, Client
from qkv.errors import QkvError
from qkv.results import Converted, Gradients, Run

__all__ = ["AsyncClient", "Client", "Converted", "Gradients", "QkvError", "Run", "__version__"]

__version__ = "0.1.0"
