"""Weights are read straight into shared memory: the numbers of every layout, and the peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import safetensors.numpy

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.layer_options import LayerOptions
from qkv.attention.layers.layer_reader import read_layer
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.layers.sent_tensors import Heads
from qkv.jobs.loaded import weight_reader
from qkv.jobs.loaded.weight_reader import WeightMemory, read_weights, size_in_memory
from qkv.wire.checkpoint.checkpoint import Checkpoint
from support.checkpoints import write_raw
from support.peak_memory import needs_proc, peaks

MiB: Final = 1 << 20
LAYOUTS: Final = sorted(layout_catalogue.known())


def tensors_of(layout: Any, H: int, G: int, D: int) -> dict[str, Any]:
    """Returns random tensors of a layer in a layout, with all that it holds."""
    draw = np.random.default_rng(0).standard_normal
    M = H * D
    weights = {
        f"{role}.{kind}": draw((M, n * D) if kind == "weight" else n * D).astype(np.float32)
        for role, n in (("query", H), ("key", G), ("value", G), ("output", H))
        for kind in ("weight", "bias")
    }
    held = {n: w for n, w in weights.items() if n in layout.holds or n[:-7] in ROLES}
    return {n: np.ascontiguousarray(t) for n, t in layout.write(held, Heads(H, G)).items()}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("block", [1, 100, 16 * MiB])
def test_weights_are_those_of_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block: int
) -> None:
    # private: a block only bounds the memory, and layers of several real ones take seconds
    monkeypatch.setattr(weight_reader, "_BLOCK", block)
    layout = layout_catalogue.known()[name]
    for H, G, D in ((4, 4, 3), (4, 2, 3), (4, 1, 3), (4, 2, 1), (4, 4, 1)):
        if G < H and not layout.is_grouped:
            continue
        tensors = tensors_of(layout, H, G, D)
        path = tmp_path / "a.safetensors"
        safetensors.numpy.save_file(tensors, path)
        options = LayerOptions(layout=name, prefix="", heads=H, kv_heads=G)
        expected = read_layer(options, tensors)
        layer = read_layer(
            options, {n: np.broadcast_to(np.ones((), t.dtype), t.shape) for n, t in tensors.items()}
        )
        memory = WeightMemory(size_in_memory(layer.weights))
        weights = read_weights(layer, Checkpoint(path), memory)
        assert weights.keys() == expected.weights.keys()
        for weight, array in weights.items():
            np.testing.assert_array_equal(array, expected.weights[weight], strict=True)


_LOAD: Final = """
from pathlib import Path
from qkv.jobs.loaded.checkpoint_loader import load_checkpoints
for path in map(Path, sys.argv[1:]):
    start()
    (name,) = load_checkpoints({"a": path}, SIZE, is_strict=True).names
    say()
"""
MOST: Final = {"llama": 1.25, "gpt2": 1.25, "neox": 1.75}
"""Peaks of layouts, of the size of a layer: heads that are interleaved need their whole matrix."""


def write_sparse(path: Path, layout: str, M: int) -> int:
    """Writes a checkpoint of one layer, in which no part of a matrix is all zeros."""
    shapes = {
        "llama": {f"{role}_proj.weight": (M, M) for role in "qkvo"},
        "gpt2": {"c_attn.weight": (M, 3 * M), "c_proj.weight": (M, M)},
        "neox": {"query_key_value.weight": (3 * M, M), "dense.weight": (M, M)},
    }[layout]
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    write_raw(path, header, size=end)
    start = path.stat().st_size - end
    with path.open("r+b") as file:
        for tensor in header.values():
            first, last = tensor["data_offsets"]
            for at in range(first, last, 4 * 1_000_003):
                file.seek(start + at)
                file.write(np.float32(1).tobytes())
    lines = ("heads = 32", 'positions = "none"', "causal = true", f'layout = "{layout}"')
    path.with_suffix(".toml").write_text("\n".join(lines))
    return end


@pytest.mark.slow
@needs_proc
def test_sparse_checkpoint_takes_little_more_than_its_layer(tmp_path: Path) -> None:
    """It fills `QKV_MAX_CHECKPOINT_BYTES`."""
    paths = {layout: tmp_path / f"{layout}.safetensors" for layout in MOST}
    (size,) = {write_sparse(path, layout, 3072) for layout, path in paths.items()}
    found = peaks(_LOAD.replace("SIZE", str(size)), *paths.values())
    for (layout, most), peak in zip(MOST.items(), found, strict=True):
        assert size < peak.above < most * size, layout
