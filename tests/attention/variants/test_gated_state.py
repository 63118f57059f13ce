"""The state of `gated`: what its rules and gates add to that of the other variants."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from qkv.errors import InvalidContent
from support.drawn_requests import GATES
from support.each import each
from support.state_requests import BOTH, CASES, part, run, state_for, state_of, tokens

EPS: Final = float(np.finfo(np.float64).eps)
DELTA: Final = CASES["gated gated_delta"]


@each("rule", [*GATES])
@each("heads", [(2, 2, 2), (4, 2, 1), (2, 2, 4), (2, 4, 2)])
@each("channels", [False, True])
def test_output_is_weights_at_value_and_state_weights_at_state(
    rule: str, heads: tuple[int, int, int], channels: bool
) -> None:
    """Both are those of the new tokens, also behind a tail; the state is the compact one."""
    case, cut, parameters = CASES[f"gated {rule}"], 41, {"chunk": 16}
    inputs = tokens(3, 90, case, heads=heads, channels=channels)
    first = part(inputs, 0, cut)
    exact = state_of(run(case, first, parameters=parameters, outputs=BOTH))
    compact = run(case, first, parameters={**parameters, "state": "compact"}, outputs=BOTH)
    named = ["output", "weights", "state_weights"]
    rest = {**part(inputs, cut, 90), **exact}
    found = run(case, rest, parameters=parameters, outputs=named)
    H, sums = max(heads), compact["state.sums"]
    value = inputs["value"][:, :, cut:].repeat(H // heads[2], 1)
    state = sums.repeat(H // sums.shape[1], 1)
    output = found["weights"] @ value + found["state_weights"] @ state
    np.testing.assert_allclose(output, found["output"], rtol=0, atol=1e3 * EPS)


@pytest.mark.parametrize(
    ("rule", "form", "changes", "detail"),
    [
        ("gated_delta", "exact", {"scale": 2.0}, "another scale: got null, expected 2.0"),
        ("gated_delta", "exact", {"normalize_qk": True}, "normalize_qk: got false, expected true"),
        ("delta", "exact", {}, "state.tail_log_decay is not part of this state"),
        ("delta", "compact", {}, 'another rule: got "gated_delta", expected "delta" as'),
    ],
)
def test_state_of_other_parameters_is_refused_by_name(
    rule: str, form: str, changes: dict[str, Any], detail: str
) -> None:
    case = CASES[f"gated {rule}"]
    with pytest.raises(InvalidContent) as caught:
        run(
            case, {**tokens(8, 5, case), **state_for(DELTA, state=form)},
            parameters={"chunk": 16, **changes},
        )  # fmt: skip
    assert detail in caught.value.detail


def test_gates_of_a_tail_have_the_dtype_of_the_gates() -> None:
    state = state_for(DELTA)
    state["state.tail_beta"] = state["state.tail_beta"].astype("f4")
    with pytest.raises(InvalidContent, match="tail_beta has the wrong dtype"):
        run(DELTA, {**tokens(8, 5, DELTA), **state}, parameters={"chunk": 16})
    del state["state.tail_beta"]
    with pytest.raises(InvalidContent, match=r"state\.tail_beta is missing from inputs"):
        run(DELTA, {**tokens(8, 5, DELTA), **state}, parameters={"chunk": 16})
