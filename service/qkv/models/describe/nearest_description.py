"""The nearest description of an attention that no description holds, with its error."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from qkv.attention.layers.detection import Check, detect
from qkv.attention.layers.detection_candidates import Candidate
from qkv.attention.layers.layer_options import LayerOptions
from qkv.errors import QkvError
from qkv.models.describe.attention_run import AttentionRun
from qkv.models.describe.layer_fields import describe_call
from qkv.models.describe.layer_proof import attended
from qkv.models.describe.located_layers import LocatedLayer, not_compared
from qkv.models.describe.rotary_angles import Unfit, error_of
from qkv.models.mixers import tensors_of


def in_words(fields: Mapping[str, Any], error: float, place: str = "") -> str:
    """Returns a description in one line, with its error and without long lists of numbers.

    Args:
        fields: of qkv.toml.
        error: of the description.
        place: of the error, if it is not that of the whole layer.
    """
    short = re.sub(r"\[(-?[\d.e-]+, ){6}[^]]*\]", "[...]", json.dumps(fields))
    return f"the nearest has the error {error:.1e}{place}: {short}"


def nearest_of(
    layer: LocatedLayer, run: AttentionRun | None, heads: int | None
) -> tuple[str, list[str]]:
    """Returns the nearest description of a layer that no layout describes, and what it is missing.

    It is that of the attention call alone, or what a search finds from the module's output.

    Args:
        layer: in no layout, or in some that do not fit.
        run: of its module; None: it does not run.
        heads: that a search tries; None: all that fit.
    """
    with contextlib.suppress(Unfit):
        if run is not None:
            return _nearest_call(run)
    with contextlib.suppress(Unfit, QkvError):
        if run is not None and layer.found.layouts:
            return _nearest_output(layer, run, heads), []
    return not_compared(layer.found), []


def _nearest_call(run: AttentionRun) -> tuple[str, list[str]]:
    """Raises Unfit if no call was captured."""
    call = run.call
    fields, missing = describe_call(call)
    inputs = {"query": call.query, "key": call.key, "value": call.value}
    if call.sinks is not None:
        inputs["sinks"] = call.sinks
    error = error_of(attended(fields, inputs), call.output)
    before, behind = (", ".join(dict.fromkeys(n)) or "nothing" for n in (run.before, run.behind))
    place = f" in its attention call, behind {before} and in front of {behind}"
    return in_words(fields, error, place), missing


def _nearest_output(layer: LocatedLayer, run: AttentionRun, heads: int | None) -> str:
    """Raises an error if no layout gives such an output.

    The output may be a sum with an argument: the search has it with and without each.
    """
    x_BLM, y = run.x_BLM, run.output()
    if y is None:
        raise Unfit("no output")
    options = LayerOptions(layout="auto", prefix=layer.found.prefix, heads=heads)
    tensors = layer.tensors(run.module)
    found: list[Candidate] = []
    others = (each for each in tensors_of(run.arguments[:2]) if each.shape == y.shape)
    for output in (y, *(y - each for each in others)):
        check = Check(x_BLM.numpy(), output.reshape(*x_BLM.shape[:2], -1).numpy())
        found += detect(tensors, check, options).candidates[:1]
    best = min(found, key=lambda candidate: candidate.error)
    hidden = "rotary", "error"  # the order is in the embedding
    fields = {n: v for n, v in best.as_json().items() if n == "causal" or (v and n not in hidden)}
    return in_words(fields, best.error)
