"""qkv serves attention. This package is its client; `qkv[server]` adds the service."""

from qkv.client.async_client import AsyncClient
from qkv.client.client import Client
from qkv.client.comparison import Comparison, VariantComparison
from qkv.client.request_builders import Choice
from qkv.client.results import Converted, Gradients, Run
from qkv.client.sweep import AsyncSweep, Sweep
from qkv.client.sweep_cells import Cell, Crossover
from qkv.errors import QkvError
from qkv.version import __version__

__all__ = [
    "AsyncClient",
    "AsyncSweep",
    "Cell",
    "Choice",
    "Client",
    "Comparison",
    "Converted",
    "Crossover",
    "Gradients",
    "QkvError",
    "Run",
    "Sweep",
    "VariantComparison",
    "__version__",
]
