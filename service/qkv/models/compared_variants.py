"""The variants of a comparison: their names, signatures and own parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qkv.client.arrays import is_array
from qkv.client.client import Client
from qkv.client.request_builders import Choice, build_choice, build_choices
from qkv.client.tables import variant_labels
from qkv.errors import InvalidContent
from qkv.models.masks import Part
from qkv.models.model_call import ModelCall
from qkv.models.variant_signature import VariantSignature

__all__ = ["ChosenVariant", "choose_variants"]


class ChosenVariant(NamedTuple):
    """A variant of a comparison.

    Attributes:
        label: its name, with the parameters that distinguish it from others of that name.
        signature: of the variant.
        parameters: those that the user gave; they override those of a call.
    """

    label: str
    signature: VariantSignature
    parameters: Mapping[str, Any]

    def choice(self, call: ModelCall, part: Part) -> dict[str, Any]:
        """Returns the variant as a request for a part of a call names it."""
        options = self.signature.options(call, part)
        return {"variant": self.signature.name, "parameters": {**options, **self.parameters}}


def choose_variants(
    variants: Sequence[Choice],
    anchor: Choice,
    parameters: Mapping[str, Any],
    client: Client | None,
) -> tuple[ChosenVariant, list[ChosenVariant]]:
    """Returns the baseline and the variants of a comparison.

    A parameter for all goes to those that take it.

    Raises:
        InvalidContent: the variants are no list, one is repeated, or none takes a parameter.
        NotFound: there is no such variant.
    """
    choices = [build_choice(anchor, {}), *build_choices(variants, {})]
    if len(choices) == 1:
        raise InvalidContent('variants is empty: expected at least one name, such as ["linear"]')
    names = [_name(choice) for choice in choices]
    signatures = VariantSignature.find_all(names, client)
    for name, value in parameters.items():
        if is_array(value):
            raise InvalidContent(f"{name} is an array: got a tensor, expected a parameter")
        if not any(name in s.parameters for s in signatures.values()):
            raise InvalidContent(f"none of {', '.join(signatures)} has a parameter {name!r:.60}")
    chosen = []
    for name, choice in zip(names, choices, strict=True):
        signature, given = signatures[name], choice["parameters"]
        if unknown := given.keys() - signature.parameters:
            raise InvalidContent(f"{name} has no parameter {min(unknown)!r:.60}")
        shared = {n: x for n, x in parameters.items() if n in signature.parameters}
        both = {"variant": name, "parameters": {**shared, **given}}
        chosen.append(ChosenVariant(name, signature, build_choice(both, {})["parameters"]))
    labels = variant_labels([(each.signature.name, each.parameters) for each in chosen[1:]])
    for n, label in enumerate(labels, 1):
        chosen[n] = chosen[n]._replace(label=label.replace("\n", " "))
    keys = [json.dumps([v.signature.name, v.parameters], sort_keys=True) for v in chosen[1:]]
    for variant, key in zip(chosen[1:], keys, strict=True):
        if keys.count(key) > 1:
            name = variant.signature.name
            raise InvalidContent(f"variants has {name} twice, with equal parameters")
    return chosen[0], chosen[1:]


def _name(choice: Mapping[str, Any]) -> str:
    name = choice.get("variant")
    if not isinstance(name, str) or choice.keys() - {"variant", "parameters"}:
        raise InvalidContent(
            f"a variant is invalid: got {dict(choice)!r:.80}, expected a name, or "
            '{"variant": "linear", "parameters": {}}'
        )
    return name
