"""Memory of softmax: no path holds a matrix of scores."""

from __future__ import annotations

from typing import Final

import pytest

from support.each import each
from support.peak_memory import Peak, needs_proc, peaks

_MEASURE: Final = """
from qkv.attention.variants.softmax import Call, attend
B, H, G, L, S, D, E = SIZES
query = torch.randn(B, H, L, D, dtype=DTYPE)
key, value = torch.randn(B, G, S, D, dtype=DTYPE), torch.randn(B, G, S, E, dtype=DTYPE)
start()
for parameters in PARAMETERS:
    with torch.inference_mode():
        call = Call(query, key, value, **parameters)
        output = attend(call, frozenset({"output"})).output
    assert output.isfinite().all()
    say()
"""


def peaks_of_calls(sizes: str, dtype: str, *parameters: str) -> list[Peak]:
    """Returns the peak memory after each call."""
    script = _MEASURE.replace("SIZES", sizes).replace("DTYPE", f"torch.{dtype}")
    return peaks(script.replace("PARAMETERS", f"[{', '.join(parameters)}]"))


@needs_proc
@pytest.mark.slow
def test_every_parameter_at_65536_tokens_of_two_heads_takes_less_than_1_gib() -> None:
    """N = 65,536, D = 64, float32: an (L, S) matrix of one head would be 16 GiB."""
    everything = (
        "dict(causal=True, query_offset='end', scale=0.2, softcap=20.0, window=(100, 0), "
        "dropout=0.1, seed=3, key_lengths_B=torch.tensor([S - 7]), "
        "mask_BHLS=torch.zeros(1, 1, 1, S))"
    )
    ((whole, _),) = peaks_of_calls("1, 2, 2, 65536, 65536, 64, 64", "float32", everything)
    assert whole < 1 << 30


@needs_proc
@pytest.mark.slow
@each(
    ("sizes", "dtype", "parameters"),
    [
        ("1, 2, 2, 16384, 16384, 64, 64", "float32",
         ("dict()", "dict(causal=True)", "dict(key_lengths_B=torch.tensor([S - 9]))",
          "dict(causal=True, query_offset=-5)", "dict(sinks_H=torch.zeros(2), causal=True)",
          "dict(alibi_slopes_H=torch.ones(2))")),
        ("1, 2, 1, 16384, 16384, 16, 16", "bfloat16",
         ("dict()", "dict(causal=True, window=(2000, None), query_offset='end')")),
        ("1, 2, 1, 16384, 16384, 16, 24", "float32",
         ("dict()", "dict(mask_BHLS=torch.zeros(1, 2, 1, S))")),
        ("1, 1, 1, 16384, 16384, 8, 8", "float32",
         ("dict(softcap=9.0)", "dict(dropout=0.5, causal=True)",
          "dict(softcap=9.0, sinks_H=torch.zeros(1), alibi_slopes_H=torch.ones(1))")),
    ],
)  # fmt: skip
def test_no_path_holds_a_matrix_of_scores(
    sizes: str, dtype: str, parameters: tuple[str, ...]
) -> None:
    """At N = 16,384 one (L, S) float32 matrix is 1 GiB; the peak stays below half of it."""
    for parameter, (_, above) in zip(
        parameters, peaks_of_calls(sizes, dtype, *parameters), strict=True
    ):
        assert above < 1 << 29, parameter
