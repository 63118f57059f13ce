"""Checks shapes against a variant's signature and binds each axis letter to a size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from qkv.attention.signature import STATE, Input, Output, fixed_size
from qkv.attention.step import Step
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent

HEADS: Final = frozenset("HGJVT")
"""The axes of heads; J, V and T are those of `gated`."""
TOKENS: Final = frozenset("LS")
"""The axes of queries and keys. A request that brings a state may have none."""

Shape = tuple[int, ...]


class AxisSizes(NamedTuple):
    """The sizes of the axes of a request.

    Attributes:
        shapes: per tensor, its shape with every axis of the signature.
        sizes: the size of each letter, and of each number that stands for an axis.
        omitted: letters whose axis the request omits; the response omits it too.
    """

    shapes: dict[str, Shape]
    sizes: dict[str, int]
    omitted: frozenset[str]

    def output_shape(self, output: Output | Input | Step) -> Shape:
        """Returns the shape of an output in the response."""
        omitted = self.omitted if len(output.letters) > 1 else ()  # a list at any rank
        return tuple(self.sizes[x] for x in output.letters if x not in omitted)


def omitted_axes(name: str, letters: tuple[str, ...], shape: Shape) -> frozenset[str]:
    """Returns the axes that a request omits, judged by its first tensor: heads, then batch.

    Raises:
        InvalidContent: the tensor has more axes than the signature, or too few.
    """
    optional = [x for x in letters if x in HEADS] + [x for x in letters if x == "B"]
    missing = len(letters) - len(shape)
    if not 0 <= missing <= len(optional):
        omissions = (optional[:n] for n in range(len(optional) + 1))
        forms = (f"({', '.join(x for x in letters if x not in o)})" for o in omissions)
        raise InvalidContent(
            f"{name} has the wrong number of axes: got shape {list(shape)}, expected "
            f"{' or '.join(forms)}",
            pointer=f"/inputs/{name}",
        )
    omitted = frozenset(optional[:missing])
    return omitted | HEADS if omitted & HEADS else omitted


def bind_axes(variant: Variant, shapes: Mapping[str, Shape], omitted: frozenset[str]) -> AxisSizes:
    """Adds the omitted axes to every shape and binds every letter to a size.

    Args:
        variant: the variant with the signature.
        shapes: the shape of each tensor of a request, by name; all are inputs of the variant.
        omitted: the result of `omitted_axes` for the first tensor.

    Raises:
        InvalidContent: a rank or a size does not fit, or an axis is empty.
    """
    axes = [x for i in variant.tensors.values() for x in i.letters]
    axes += [x for o in variant.outputs.values() for x in o.letters]
    sizes = {x: size for x in axes if (size := fixed_size(x)) is not None}
    owners = dict.fromkeys(sizes, variant.name)
    full_shapes = {}
    may_be_empty = TOKENS if any(name.startswith(STATE) for name in shapes) else ()
    for spec in sorted((variant.tensors[n] for n in shapes), key=lambda i: i.broadcasts):
        shape = _full_shape(spec, shapes[spec.name], omitted)
        for letter, size in zip(spec.letters, shape, strict=True):
            if spec.broadcasts and size == 1:
                continue
            if size == 0 and letter not in may_be_empty:
                raise InvalidContent(
                    f"{spec.name} is empty: got {letter}=0, expected 1 or more",
                    pointer=f"/inputs/{spec.name}",
                )
            if sizes.setdefault(letter, size) != size:
                raise InvalidContent(
                    f"{spec.name} has {letter}={size} where {owners[letter]} has "
                    f"{letter}={sizes[letter]}",
                    pointer=f"/inputs/{spec.name}",
                )
            owners.setdefault(letter, spec.name)
        full_shapes[spec.name] = shape
    if "H" in sizes and "G" in sizes and sizes["H"] % sizes["G"]:
        raise InvalidContent(
            f"{owners['H']} has H={sizes['H']} heads, not a multiple of the G={sizes['G']} heads "
            f"of {owners['G']}",
            pointer=f"/inputs/{owners['H']}",
        )
    return AxisSizes(full_shapes, sizes, omitted)


def _full_shape(spec: Input, shape: Shape, omitted: frozenset[str]) -> Shape:
    """Returns the shape with a 1 for each omitted axis."""
    if len(spec.letters) == 1:  # a list at any rank: a request of rank 2 is one item of one head
        omitted = frozenset()
    axes = [x for x in spec.letters if x not in omitted]
    if spec.broadcasts and len(shape) < len(axes):
        shape = (1,) * (len(axes) - len(shape)) + shape
    if spec.may_omit_last and len(shape) == len(axes) - 1:
        shape = (*shape, 1)
    if len(shape) != len(axes):
        raise InvalidContent(
            f"{spec.name} has the wrong number of axes: got shape {list(shape)}, expected "
            f"({', '.join(axes)})" + (" or a shape that broadcasts to it" * spec.broadcasts),
            pointer=f"/inputs/{spec.name}",
        )
    sizes = iter(shape)
    return tuple(1 if x in omitted else next(sizes) for x in spec.letters)
