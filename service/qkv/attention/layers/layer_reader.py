"""Reads the layer of a request: finds its prefix and its layout, and checks its tensors."""

from __future__ import annotations

from collections.abc import Mapping

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_checks import check
from qkv.attention.layers.layer_options import LayerOptions
from qkv.attention.layers.layer_weights import Array
from qkv.attention.layers.layout_catalogue import Layout
from qkv.attention.layers.sent_tensors import Heads, SentTensors
from qkv.errors import InvalidContent


def read_layer(
    options: LayerOptions, tensors: Mapping[str, Array], pointer: str = "/layer"
) -> Layer:
    """Returns the layer of a request.

    Args:
        options: its fields.
        tensors: all tensors that the request has for it.
        pointer: JSON pointer to the layer.

    Raises:
        InvalidContent: a tensor is missing or wrong, or the layout is not clear.
    """
    if options.input != "attention":
        raise InvalidContent(
            f"input is invalid: got {options.input!r}, expected 'attention': only a loaded layer "
            "has the norm of its model",
            pointer=f"{pointer}/input",
        )
    shapes = {name: array.shape for name, array in tensors.items()}
    layout = None
    if options.layout != layout_catalogue.AUTO:
        layout = layout_catalogue.find(options.layout, f"{pointer}/layout")
    prefix = find_prefix(options.prefix, layout, shapes, pointer)
    if layout is None:
        layout = layout_catalogue.recognize(shapes, prefix, f"{pointer}/layout")
    sent = SentTensors(
        tensors,
        f"{pointer}/tensors",
        prefix,
        layout.spellings,
        Heads(options.heads, options.kv_heads),
    )
    weights = layout.read(sent)
    ignored = sent.finish(layout.modules)
    layer = Layer(
        options.model_copy(update={"layout": layout.name, "prefix": prefix}),
        layout,
        {name: tensors[name] for name in sent.used.values()},
        sent.used,
        weights,
        ignored,
        pointer,
    )
    check(layer)
    return layer


def find_prefix(
    prefix: str | None, layout: Layout | None, shapes: layout_catalogue.Shapes, pointer: str
) -> str:
    """Returns the prefix of the layer's names, with its last dot.

    Args:
        prefix: as the request has it, or a part of it; None: that of the only layer.
        layout: of the layer; None: any.
        shapes: of all tensors, by name.
        pointer: JSON pointer to the layer.

    Raises:
        InvalidContent: no tensor has the prefix, or there are several layers.
    """
    if prefix:
        whole = prefix if prefix.endswith(".") else f"{prefix}."
        if not any(name.startswith(whole) for name in shapes):
            raise InvalidContent(
                f"prefix fits no tensor: got {prefix!r:.200}, expected the beginning of "
                f"{next(iter(shapes), 'a name')!r:.200} or another",
                pointer=f"{pointer}/prefix",
            )
        shapes = {n.removeprefix(whole): s for n, s in shapes.items() if n.startswith(whole)}
    else:
        whole = ""
    prefixes = [whole + layer.prefix for layer in layout_catalogue.find_layers(shapes, layout)]
    if prefix == "" or not prefixes or whole in prefixes:
        return whole
    if len(prefixes) == 1:
        return prefixes[0]
    listed = ", ".join(repr(p.rstrip(".")) for p in prefixes[:8])
    raise InvalidContent(
        f"prefix is {'too short' if whole else 'missing'}: there are {len(prefixes)} layers, at "
        f"{listed}"
        f"{', ...' if len(prefixes) > 8 else ''}",
        pointer=f"{pointer}/prefix",
    )
