"""qkv serves attention. This package is its client; `qkv[server]` adds the service."""

from qkv.async_client import AsyncClient
from qkv.calls import Choice
from qkv.cells import Cell, Crossover
from qkv.client import Client
from qkv.compared import Compared, Comparison
from qkv.errors import QkvError
from qkv.results import Converted, Gradients, Run
from qkv.streams import AsyncSweep, Sweep

__all__ = [
    "AsyncClient",
    "AsyncSweep",
    "Cell",
    "Choice",
    "Client",
    "Compared",
    "Comparison",
    "Converted",
    "Crossover",
    "Gradients",
    "QkvError",
    "Run",
    "Sweep",
    "__version__",
]

__version__ = "0.1.0"
