"""Shapes held against a variant's signature: lifted to its rank, every letter bound to a size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from qkv.attention.catalogue import Input, Output, Variant, fixed_size
from qkv.errors import InvalidContent

__all__ = ["Bound", "bind", "dropped_letters"]

_HEADS: Final = frozenset("HG")

Shape = tuple[int, ...]


class Bound(NamedTuple):
    """Shapes that fit.

    Attributes:
        shapes: per tensor, its shape with every axis of the signature.
        sizes: the size of each letter, and of each number that stands for an axis.
        dropped: letters whose axis the request left out, and so does the answer.
    """

    shapes: dict[str, Shape]
    sizes: dict[str, int]
    dropped: frozenset[str]

    def answer_shape(self, output: Output) -> Shape:
        """The shape an output goes back in."""
        return tuple(self.sizes[x] for x in output.letters if x not in self.dropped)


def dropped_letters(name: str, letters: tuple[str, ...], shape: Shape) -> frozenset[str]:
    """Which axes a request leaves out, seen from its first tensor: the heads, then the batch.

    Raises:
        InvalidContent: it has more axes than the signature, or too few.
    """
    optional = [x for x in letters if x in _HEADS] + [x for x in letters if x == "B"]
    missing = len(letters) - len(shape)
    if not 0 <= missing <= len(optional):
        gone = (optional[:n] for n in range(len(optional) + 1))
        forms = (f"({', '.join(x for x in letters if x not in g)})" for g in gone)
        raise InvalidContent(
            f"{name} has shape {list(shape)}; it must be {' or '.join(forms)}",
            pointer=f"/inputs/{name}",
        )
    dropped = frozenset(optional[:missing])
    return dropped | _HEADS if dropped & _HEADS else dropped


def bind(variant: Variant, shapes: Mapping[str, Shape], dropped: frozenset[str]) -> Bound:
    """Lifts every shape to the signature's rank and binds every letter.

    Args:
        variant: whose signature.
        shapes: of the tensors that came, by name; all are inputs of the variant.
        dropped: from `dropped_letters` of the first.

    Raises:
        InvalidContent: a rank or a size does not fit, or an axis is empty.
    """
    axes = [x for i in variant.inputs.values() for x in i.letters]
    axes += [x for o in variant.outputs.values() for x in o.letters]
    sizes = {x: size for x in axes if (size := fixed_size(x)) is not None}
    owners = dict.fromkeys(sizes, variant.name)
    lifted = {}
    for spec in sorted((variant.inputs[n] for n in shapes), key=lambda i: i.broadcasts):
        shape = _lifted(spec, shapes[spec.name], dropped)
        for letter, size in zip(spec.letters, shape, strict=True):
            if spec.broadcasts and size == 1:
                continue
            if size == 0:
                raise InvalidContent(
                    f"{spec.name} has {letter}=0; every axis must hold something",
                    pointer=f"/inputs/{spec.name}",
                )
            if sizes.setdefault(letter, size) != size:
                raise InvalidContent(
                    f"{spec.name} has {letter}={size} where {owners[letter]} has "
                    f"{letter}={sizes[letter]}",
                    pointer=f"/inputs/{spec.name}",
                )
            owners.setdefault(letter, spec.name)
        lifted[spec.name] = shape
    if "H" in sizes and "G" in sizes and sizes["H"] % sizes["G"]:
        raise InvalidContent(
            f"{owners['H']} has H={sizes['H']} heads, not a multiple of the G={sizes['G']} heads "
            f"of {owners['G']}",
            pointer=f"/inputs/{owners['H']}",
        )
    return Bound(lifted, sizes, dropped)


def _lifted(spec: Input, shape: Shape, dropped: frozenset[str]) -> Shape:
    """The shape with a 1 for each axis that was left out."""
    if spec.letters == ("B",):  # per request item, whatever the rank: rank 2 is one item
        dropped = frozenset()
    kept = [x for x in spec.letters if x not in dropped]
    if spec.broadcasts and len(shape) < len(kept):
        shape = (1,) * (len(kept) - len(shape)) + shape
    if len(shape) != len(kept):
        raise InvalidContent(
            f"{spec.name} has shape {list(shape)}; beside the tensors it came with it must be "
            f"({', '.join(kept)})" + (", broadcastable" if spec.broadcasts else ""),
            pointer=f"/inputs/{spec.name}",
        )
    sizes = iter(shape)
    return tuple(1 if x in dropped else next(sizes) for x in spec.letters)
