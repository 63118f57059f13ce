"""What torch is set to for the tests of a file that imports it: its seed, its threads."""

from __future__ import annotations

import typing

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> typing.Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
