"""The public names of qkv: clients, results, errors, and the capture of models.

The extra `server` adds the service, the extra `models` what capture needs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from qkv.client.async_client import AsyncClient
from qkv.client.client import Client
from qkv.client.comparison import Comparison, VariantComparison
from qkv.client.detected import Detected
from qkv.client.head_map import head_map, head_maps
from qkv.client.request_builders import Choice
from qkv.client.results import Converted, Gradients, Run
from qkv.client.retries import ServiceUnreachable
from qkv.client.sweep import AsyncSweep, Sweep
from qkv.client.sweep_cells import Cell, Crossover
from qkv.client.verification import Verdict
from qkv.errors import QkvError
from qkv.version import __version__

if TYPE_CHECKING:
    from qkv.models.calls import Calls
    from qkv.models.model_call import Model
    from qkv.models.substitution import SubstitutionReport

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
    "Verdict",
    "__version__",
    "capture",
    "head_map",
    "head_maps",
    "load_calls",
    "reference",
    "substitute",
]


def reference(variant: str, /, **inputs_and_parameters: Any) -> Run:
    """Computes a variant by its float64 reference, in this process, without a service.

    The tests of qkv compare the variant with this result. The reference is plain and slow: it
    computes all steps of the variant. A variant without steps runs in float64.

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
        from qkv.local import reference as compute
    except ModuleNotFoundError as error:
        raise ImportError(
            f"qkv.reference runs in this process and needs qkv[server]: {error.name} is not "
            "installed; run `pip install '.[server]'` in a clone of qkv"
        ) from None
    message, parse = build_reference(inputs_and_parameters)
    return parse(compute(variant, message))


def capture(
    model: Model,
    *,
    layers: Collection[str] | None = None,
    heads: Sequence[int] | None = None,
    max_bytes: int = 1 << 30,
) -> AbstractContextManager[Calls]:
    """Records every attention call of a torch model inside the block.

    The model keeps its attention implementation and its bits, and is left as it was. Recorded are
    calls of `scaled_dot_product_attention`, of the attention functions of transformers and of
    `nn.MultiheadAttention`, in every thread. Copies of the tensors are on the CPU.

    Args:
        model: any torch model.
        layers: names of the layers to record, or of modules around them, such as
            "encoder.layer.3"; "*" stands for any characters. None: all.
        heads: different numbers of the query heads to record; None: all.
        max_bytes: budget of the recorded tensors. Calls beyond it are reported in `missed`.

    Returns:
        A context manager that yields the calls, which grow while the model runs.

    Raises:
        InvalidContent: the model has no such layer or head, or a head is twice in `heads`.
        ImportError: torch is not installed; `qkv[models]` brings it.

    Warns:
        CaptureWarning: at the end of the block, if attention was not captured; `missed` has the
            layers, and each name of `layers` that made no call.
    """
    from qkv.models.capture import capture as start

    return start(model, layers=layers, heads=heads, max_bytes=max_bytes)


def substitute(
    model: Model, variants: str | Mapping[str, Any], *, client: Client | None = None
) -> AbstractContextManager[SubstitutionReport]:
    """Runs a torch model with another variant in layers or heads, inside the block.

    The model is left as it was. Its output can be differentiated once, so the model can be trained
    with the variant. Substituted heads drop no weights, and queries that are padding keep the
    output of the model's own attention.

    Args:
        model: any torch model whose calls `capture` records.
        variants: a variant for all layers: its name, or {"variant": "taylor", "parameters": {...},
            "heads": [0, 5]}. Or such a variant for each of some layers:
            {"encoder.layer.3": "linear"}. A key names a layer, or a module around it, and "*"
            stands for any characters; of several keys that fit, the last counts.
        client: of a service that computes the variants; None: this process.

    Returns:
        A context manager that yields a report. Its `rows` have the relative change of each layer's
        output, and `kl(before, after)` compares the logits of the model.

    Raises:
        QkvError: there is no such variant, layer or head. Also inside the block, if a variant
            cannot see what its layer sees, such as a mask of its own.
        ImportError: torch is not installed; `qkv[models]` brings it.

    Warns:
        SubstituteWarning: at the end of the block, if a chosen layer was not substituted.
    """
    from qkv.models.substitution import substitute as start

    return start(model, variants, client=client)


def load_calls(path: str | os.PathLike[str]) -> Calls:
    """Reads captured calls from a file that `Calls.save` wrote.

    Args:
        path: of the .safetensors file.

    Returns:
        The calls, without padding: one for each group of sequences with the same padding.

    Raises:
        InvalidContent: the file is damaged, or is no file of calls.
        OSError: the file cannot be read.
        ImportError: torch is not installed; `qkv[models]` brings it.
    """
    from qkv.models.calls import Calls

    return Calls.load(path)
