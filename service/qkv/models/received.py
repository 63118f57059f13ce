"""The mass that each key receives, in each head of each layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qkv.client.client import Client
from qkv.errors import InvalidContent
from qkv.models.attention_call import AttentionCall
from qkv.models.masks import parts_of
from qkv.models.selection import check_layers_differ
from qkv.models.variants import VariantSignature, variant_run


class Received(Mapping[str, Tensor]):
    """The mass that each key receives: (B, H, S) for each layer.

    It is the mean of a key's weights over the queries that are no padding.
    """

    def __init__(self, masses: Mapping[str, Tensor]) -> None:
        self._masses = dict(masses)

    def __getitem__(self, layer: str) -> Tensor:
        """Returns the mass of a layer, (B, H, S)."""
        return self._masses[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masses)

    def __len__(self) -> int:
        return len(self._masses)

    def mean(self) -> Tensor:
        """Returns the mean over the layers and their heads, (B, S).

        Raises:
            InvalidContent: the layers have different sequences.
        """
        first = next(iter(self._masses.values()))
        shape = first.shape[0], first.shape[2]
        for layer, mass in self._masses.items():
            if (mass.shape[0], mass.shape[2]) != shape:
                raise InvalidContent(
                    f"{layer} has other sequences than the first layer: got {mass.shape[0]} of "
                    f"{mass.shape[2]} keys, expected {shape[0]} of {shape[1]}"
                )
        total = sum((mass.mean(1) for mass in self._masses.values()), first.new_zeros(shape))
        return total / len(self._masses)

    def __repr__(self) -> str:
        """Returns one line: the number of layers."""
        return f"Received({len(self._masses)} layers)"


def received_mass(
    calls: Sequence[AttentionCall],
    variant: str,
    client: Client | None,
    parameters: Mapping[str, Any],
) -> Received:
    """Returns the mass that each key receives; the arguments are those of `Calls.received`."""
    check_layers_differ(calls)
    signature = VariantSignature.find(variant, client)
    return Received({c.layer: _mass(c, signature, client, parameters) for c in calls})


def _mass(
    call: AttentionCall,
    signature: VariantSignature,
    client: Client | None,
    parameters: Mapping[str, Any],
) -> Tensor:
    """Returns the mass of a call, (B, H, S)."""
    B, H, L, _ = call.query.shape
    S = call.key.shape[2]
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    mass_BHS = torch.zeros(B, H, S, dtype=dtype)
    for part in parts_of(call):
        run = variant_run(
            signature.name,
            {**signature.arguments(call, part), **parameters},
            outputs=["weights"],
            weights="stats",
            client=client,
        )
        mean_NHS = run.outputs["received"] / (L if part.queries is None else len(part.queries))
        keys = torch.arange(S) if part.keys is None else part.keys
        mass_BHS[torch.tensor(part.items)[:, None], :, keys] = mean_NHS.transpose(1, 2).to(dtype)
    return mass_BHS
