"""`guess_layout`: finds the order of a function's axes by running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from qkv.testing.case_spec import CaseSpec
from qkv.testing.convention import Layout
from qkv.testing.function_runner import Outcome

_OTHER_AXES: Final = ("B", "D", "E", "Z")
_DTYPES: Final = ("float32", "bfloat16")  # most functions take one of them


def guess_layout(run: Callable[..., Outcome], spec: CaseSpec) -> Layout | None:
    """Returns the order of axes of a function of a recurrence; None: it gives no output.

    With as many heads as tokens both orders have one shape. A change of the values at the first
    place of axis 1 moves the output at later places if they are tokens, and not if they are heads.

    Args:
        run: of the function.
        spec: of a call that it is to take.
    """
    sizes = {n: size for n, size in spec.sizes.items() if n in _OTHER_AXES}
    count = int(spec.parameters.get("chunk", 64))
    sizes |= {"B": 1, "H": count, "S": count}
    for dtype in dict.fromkeys((*_DTYPES, spec.dtype)):
        call = replace(spec, family="normal", dtype=dtype, sizes=sizes).draw()
        value = call.inputs["value"].clone()
        value[:, 0] *= -2
        moved = replace(call, inputs={**call.inputs, "value": value})
        one, other = (run(each).results.get("output") for each in (call, moved))
        if one is not None and other is not None:
            return "BHTD" if torch.equal(one[:, 1:], other[:, 1:]) else "BTHD"
    return None
