"""`CaseSpec`: the arguments that draw one call, as a file, a token or a command line holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch

from qkv.attention.catalogue import find
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, format_value, pointer_to
from qkv.testing.call import Call
from qkv.testing.families import FAMILIES, choose_sizes, draw
from qkv.testing.family import NotDrawn

DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
"""The dtypes of a call, in the order in which they run."""

AXES: Final = "BHGLSDEIOZ"
"""The axes that may have a size of the caller's."""

_MAX_SEED: Final = 2**63 - 1
_MAX_SIZE: Final = 2**63 - 1  # torch's


@dataclass(frozen=True)
class CaseSpec:
    """The arguments that draw one call; the same spec draws the same numbers.

    Every field is checked when the spec is made, also by `replace`.

    Attributes:
        variant: the name of the variant.
        family: a key of `FAMILIES`.
        dtype: of the floating inputs, one of `DTYPES`.
        parameters: of the variant, as JSON.
        sizes: by axis letter; the family chooses the others.
        seed: of the numbers, 0 to 2^63 - 1.

    Raises:
        NotFound: the variant does not exist.
        InvalidContent: another field is invalid.
    """

    variant: str
    family: str = "normal"
    dtype: str = "float32"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0

    @classmethod
    def from_json(cls, fields: Any) -> CaseSpec:
        """Returns the spec with the fields that `to_json` writes.

        Raises:
            InvalidContent: a field is missing, unknown or mistyped.
        """
        names = cls.__dataclass_fields__
        if not isinstance(fields, dict) or fields.keys() != names.keys():
            raise InvalidContent(
                f"the case is not valid: got {format_value(fields)}, expected the fields "
                f"{', '.join(names)}"
            )
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON."""
        return asdict(self)

    def __post_init__(self) -> None:
        _expect(isinstance(self.variant, str), "variant", self.variant, "a name")
        variant = find(self.variant)
        families = ", ".join(FAMILIES)
        is_family = isinstance(self.family, str) and self.family in FAMILIES
        _expect(is_family, "family", self.family, f"one of {families}")
        _expect(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        is_seed = type(self.seed) is int and 0 <= self.seed <= _MAX_SEED
        _expect(is_seed, "seed", self.seed, "an integer from 0 to 2^63 - 1")
        _expect(isinstance(self.parameters, dict), "parameters", self.parameters, "an object")
        if self.parameters.get("dropout"):
            raise InvalidContent(
                "dropout cannot be verified: its random numbers are qkv's own",
                pointer=pointer_to("parameters", "dropout"),
            )
        variant.parse(self.parameters)
        _expect(isinstance(self.sizes, dict), "sizes", self.sizes, "an object")
        _check_sizes(variant, self.sizes)

    def draw(self) -> Call:
        """Returns the call.

        Raises:
            InvalidContent: the family does not apply to the variant, the parameters or the sizes.
        """
        try:
            return self.draw_if_applicable()
        except NotDrawn as reason:
            raise self._not_drawn(reason) from None

    def draw_if_applicable(self) -> Call:
        """Returns the call.

        Raises:
            NotDrawn: the family does not apply to the variant, the parameters or the sizes.
        """
        return draw(
            find(self.variant),
            self.family,
            getattr(torch, self.dtype),
            parameters=self.parameters,
            sizes=self.sizes,
            seed=self.seed,
        )

    def choose_sizes(self) -> dict[str, int]:
        """Returns the size of each axis of the inputs; draws nothing, whatever the sizes.

        Raises:
            InvalidContent: as for `draw`.
        """
        try:
            return choose_sizes(
                find(self.variant), FAMILIES[self.family], self.sizes, self.parameters, self.seed
            )
        except NotDrawn as reason:
            raise self._not_drawn(reason) from None

    def _not_drawn(self, reason: NotDrawn) -> InvalidContent:
        text = f"family {self.family!r} cannot be drawn: {reason}"
        return InvalidContent(text, pointer="/family")


def _check_sizes(variant: Variant, sizes: Mapping[str, int]) -> None:
    """Checks the sizes of axes.

    Raises:
        InvalidContent: the variant has no such axis, or a size is not a positive integer.
    """
    letters = {x for spec in variant.inputs.values() for x in spec.letters}
    letters |= {*variant.outputs["output"].letters}
    known = [x for x in AXES if x in letters]
    for letter, size in sizes.items():
        if letter not in known:
            raise InvalidContent(
                f"{variant.name} has no axis {letter!r} of a free size; it has {', '.join(known)}",
                pointer=pointer_to("sizes", letter),
            )
        if type(size) is not int or not 1 <= size <= _MAX_SIZE:
            raise InvalidContent(
                f"sizes.{letter} is invalid: got {format_value(size)}, expected a positive integer "
                "of at most 63 bits",
                pointer=pointer_to("sizes", letter),
            )


def input_digest(call: Call) -> str:
    """Returns a digest of the names, dtypes, shapes and bits of the inputs and `grad_output`.

    Another version of qkv or torch may draw other numbers from the same spec: the digest shows it.
    """
    digest = hashlib.sha256()
    tensors = dict(call.inputs)
    if call.grad_output is not None:
        tensors["grad_output"] = call.grad_output
    for name, x in tensors.items():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)};".encode())
        digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _expect(is_valid: bool, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise InvalidContent(
            f"{name} is invalid: got {format_value(value)}, expected {expected}",
            pointer=pointer_to(name),
        )
