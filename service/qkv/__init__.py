"""The public names of qkv: clients, results, errors. The extra `server` adds the service."""

from typing import Any

from qkv.client.async_client import AsyncClient
from qkv.client.client import Client
from qkv.client.comparison import Comparison, VariantComparison
from qkv.client.detected import Detected
from qkv.client.request_builders import Choice
from qkv.client.results import Converted, Gradients, Run
from qkv.client.retries import ServiceUnreachable
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
    "Detected",
    "Gradients",
    "QkvError",
    "Run",
    "ServiceUnreachable",
    "Sweep",
    "VariantComparison",
    "__version__",
    "reference",
]


def reference(variant: str, /, **inputs_and_parameters: Any) -> Run:
    """Computes a variant by its plain float64 reference, in this process, without a service.

    The tests of qkv compare the variant with this result. The reference is plain and slow: it
    makes whole matrices. A variant without a reference runs in float64.

    Args:
        variant: its name, for instance "softmax".
        **inputs_and_parameters: arrays are inputs (`query` (B,H,L,D), `key` (B,G,S,D),
            `value` (B,G,S,E), `mask`, `key_lengths` (B), `alibi_slopes` (H), `sinks` (H)), all else
            parameters (`causal=True`).

    Returns:
        The run, with all outputs of the variant in float64, in arrays of the inputs' kind: `output`
        (B,H,L,E), `weights` (B,H,L,S), `scores` (B,H,L,S) and others, with as many axes as the
        inputs have.

    Raises:
        QkvError: the inputs or parameters are invalid; classes and messages are those of
            `Client.attend`.
        ImportError: torch is not installed; `qkv[server]` brings it.
    """
    from qkv.client.reference import build_reference

    try:
        from qkv.engine.local import reference as compute
    except ModuleNotFoundError as error:
        raise ImportError(
            f"qkv.reference runs in this process and needs qkv[server]: {error.name} is not "
            "installed; run `pip install '.[server]'` in a clone of qkv"
        ) from None
    message, parse = build_reference(inputs_and_parameters)
    return parse(compute(variant, message))
