"""Workloads of bench/run.py: the requests of clients whose requests differ from each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from bodies import SHAPES, build_request, tensors_of
from load import BenchRequest

Address = tuple[str, int]

_LENGTHS: Final = range(20, 220)
_HEADS: Final = (1, 2, 3)
_WIDTH: Final = 32
_VARIANTS: Final = ("softmax", "linear", "taylor", "efficient", "mean")
_SIZES: Final = ("S", "S", "S", "S", "M")  # of the interleaved sizes, in turn


class Workload(NamedTuple):
    """Requests that are sent in turn.

    Attributes:
        name: its label in the table.
        build: returns the requests for a service.
    """

    name: str
    build: Callable[[Address], Sequence[BenchRequest]]


def _same_bytes(address: Address) -> Sequence[BenchRequest]:
    return [build_request(address, "V2 binary", tensors_of(SHAPES["S"]))]


def _new_ids(address: Address) -> Sequence[BenchRequest]:
    return [build_request(address, "V2 binary", tensors_of(SHAPES["S"]), has_new_ids=True)]


def _many_shapes(address: Address) -> Sequence[BenchRequest]:
    """Returns 600 requests of (1, H, L, 32), with other ids each time, in random order."""
    shapes = [(1, heads, length, _WIDTH) for heads in _HEADS for length in _LENGTHS]
    random.Random(0).shuffle(shapes)
    return [
        build_request(address, "V2 binary", tensors_of(shape), has_new_ids=True) for shape in shapes
    ]


def _mixed_variants(address: Address) -> Sequence[BenchRequest]:
    tensors = tensors_of(SHAPES["S"])
    requests = []
    for name in _VARIANTS:
        inputs = {"value": tensors["value"]} if name == "mean" else tensors
        requests.append(build_request(address, "V2 binary", inputs, variant=name, has_new_ids=True))
    return requests


def _interleaved_sizes(address: Address) -> Sequence[BenchRequest]:
    by_size = {
        size: build_request(address, "V2 binary", tensors_of(SHAPES[size]), has_new_ids=True)
        for size in set(_SIZES)
    }
    return [by_size[size] for size in _SIZES]


def _six_tokens(address: Address) -> Sequence[BenchRequest]:
    return [build_request(address, "JSON, lists", tensors_of((1, 1, 6, 8)), weights=True)]


WORKLOADS: Final = (
    Workload("the same bytes", _same_bytes),
    Workload("a new id each", _new_ids),
    Workload("600 shapes, new ids", _many_shapes),
    Workload(f"{len(_VARIANTS)} variants in turn, new ids", _mixed_variants),
    Workload("S four times, then M, new ids", _interleaved_sizes),
    Workload("six tokens in JSON lists, weights", _six_tokens),
)
"""Requests at S in V2 binary, except where the name says otherwise."""
