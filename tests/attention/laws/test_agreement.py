"""Every variant agrees with its reference within the bound of its roundings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.agreement import assert_agrees
from support.drawn_requests import requests
from support.examples import examples
from support.small_blocks import small_blocks
from support.variant_calls import VARIANTS


@pytest.mark.slow
@pytest.mark.representative
@examples(500)
@given(data=st.data(), block=st.none() | st.integers(1, 300))
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_agrees_with_its_reference(
    name: str, data: st.DataObject, block: int | None
) -> None:
    """Draws every dtype and parameter, masks, lengths with garbage, and blocks of any size."""
    request = data.draw(requests(VARIANTS[name]))
    with small_blocks(block):
        assert_agrees(name, **request.arguments())
