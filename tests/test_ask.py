"""The commands that ask: attend, convert and variants, against a real service and without one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from cases import Array, as_array, as_json
from click.testing import CliRunner, Result
from conftest import PATIENCE, Process, Server
from hypothesis import given
from hypothesis import strategies as st
from test_cli import free_port

from qkv import Client, files
from qkv.cli import main
from qkv.errors import QkvError

SUFFIXES: Final = (".safetensors", ".npz", ".json")
PLACES: Final = ("service", "local")
Ask = Callable[..., Result]


def ask(*words: object, **environment: str) -> Result:
    """What a command says and how it ends, in 80 columns."""
    return CliRunner().invoke(
        main, [str(word) for word in words], env=environment, terminal_width=80
    )


def answered(*words: object, **environment: str) -> str:
    """What a command that ends well prints."""
    done = ask(*words, **environment)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    return done.stdout


def refused(folder: Path, *words: object, **environment: str) -> str:
    """The one line of a command that fails and leaves every file as it was."""
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    done = ask(*words, **environment)
    assert isinstance(done.exception, SystemExit), done.exception  # no traceback
    assert done.exit_code != 0
    assert done.stdout == ""
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before
    return one_error(done.stderr)


def one_error(stderr: str) -> str:
    (line,) = stderr.splitlines()
    assert line.startswith("Error: ")
    return line


def where(place: str, url: str) -> tuple[str, ...]:
    return ("--local",) if place == "local" else ("--url", url)


def put(path: Path, group: str, arrays: dict[str, Array], **fields: Any) -> Path:
    """Writes a file apart from the service's own code; a layer's arrays begin with `layer.`."""
    if path.suffix == ".npz":
        assert not fields
        np.savez(path, allow_pickle=False, **arrays)
    elif path.suffix == ".safetensors":
        metadata = {"qkv": json.dumps(fields)} if fields else None
        safetensors.numpy.save_file(arrays, path, metadata)
    else:
        written = {n: as_json(a, fields.get("encoding", "lists")) for n, a in arrays.items()}
        layer = {n.removeprefix("layer."): t for n, t in written.items() if n.startswith("layer.")}
        fields[group] = {n: t for n, t in written.items() if not n.startswith("layer.")}
        if layer:
            fields["layer"] = fields.get("layer", {}) | {"tensors": layer}
        path.write_text(json.dumps(fields))
    return path


def got(path: Path, group: str = "outputs") -> dict[str, Array]:
    """Reads a file apart from the service's own code; lists as float64."""
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return dict(archive)
    if path.suffix == ".safetensors":
        return safetensors.numpy.load_file(path)
    return {name: as_array(tensor) for name, tensor in json.loads(path.read_text())[group].items()}


def same(ours: dict[str, Array], theirs: Any) -> None:
    """Bit for bit, once what had been lists has its dtype again."""
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].shape == array.shape
        assert ours[name].astype(array.dtype).tobytes() == array.tobytes(), name


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tensors() -> dict[str, Any]:
    """Grouped heads, a mask of booleans and lengths: every dtype that a file must carry."""
    return {
        "query": normal(2, 4, 5, 8),
        "key": normal(2, 2, 6, 8, seed=1),
        "value": normal(2, 2, 6, 3, seed=2),
        "mask": normal(5, 6, seed=3) > -1,
        "key_lengths": np.array([6, 4]),
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file that can be run."""
    return put(tmp_path / "in.json", "inputs", tensors())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("written", SUFFIXES)
@pytest.mark.parametrize("read", SUFFIXES)
def test_every_format_in_and_out_has_the_clients_bits(
    url: str, tmp_path: Path, read: str, written: str, place: str
) -> None:
    source = put(tmp_path / f"in{read}", "inputs", tensors())
    target = tmp_path / f"out{written}"
    said = answered(
        "attend", "softmax", source, "-o", target, "-p", "causal=true", *where(place, url)
    )
    with Client(url) as client:
        run = client.attend("softmax", **tensors(), causal=True)
    same(got(target), run.outputs)
    assert f"written to {target}" in said
    assert "output           float32   2x4x5x3" in said
    assert list(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_run_here_has_the_services_bits(url: str, tmp_path: Path, dtype: str) -> None:
    """Long enough for blocks and threads to differ, if they could."""
    arrays = {n: normal(2, 3, 300, 64, seed=i) for i, n in enumerate(("query", "key", "value"))}
    typed = {n: a.astype(dtype) for n, a in arrays.items()}
    source = put(tmp_path / "in.npz", "inputs", typed)
    for place in PLACES:
        target = tmp_path / f"{place}.safetensors"
        answered("attend", "softmax", source, "-o", target, *where(place, url))
    same(got(tmp_path / "local.safetensors"), got(tmp_path / "service.safetensors"))


def test_json_in_base64_comes_back_so(url: str, tmp_path: Path) -> None:
    source = put(tmp_path / "in.json", "inputs", tensors(), encoding="base64")
    for place in PLACES:
        answered("attend", "softmax", source, "-o", tmp_path / "out.json", *where(place, url))
        outputs = json.loads((tmp_path / "out.json").read_text())["outputs"]
        assert outputs["output"]["dtype"] == "float32"


@pytest.mark.parametrize("place", PLACES)
def test_bfloat16_stays_or_is_exact(url: str, tmp_path: Path, place: str) -> None:
    inputs: dict[str, Any] = {}
    inputs |= {n: torch.from_numpy(a).bfloat16() for n, a in tensors().items() if a.dtype == "f4"}
    safetensors.torch.save_file(inputs, tmp_path / "in.safetensors")
    with Client(url) as client:
        run = client.attend("softmax", **inputs, outputs=["output"])
    for suffix in SUFFIXES:
        target = tmp_path / f"out{suffix}"
        words = ("attend", "softmax", tmp_path / "in.safetensors", "-o", target)
        said = answered(*words, "--return", "output", *where(place, url))
        assert ("(bfloat16 as float32)" in said) == (suffix == ".npz")
        if suffix == ".safetensors":
            out = safetensors.torch.load_file(target)["output"]
            assert out.dtype == torch.bfloat16
        elif suffix == ".npz":
            out = torch.from_numpy(got(target)["output"])
            assert out.dtype == torch.float32
        else:  # in as few digits as tell one bfloat16 from the next
            out = torch.from_numpy(got(target)["output"]).bfloat16()
        assert torch.equal(out.double(), run.output.double())


def test_an_npz_of_a_dtype_that_does_not_travel_says_which(tmp_path: Path) -> None:
    put(tmp_path / "in.npz", "inputs", tensors() | {"key": np.zeros((2, 2), ml_dtypes.bfloat16)})
    line = refused(
        tmp_path, "attend", "softmax", tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--local"
    )
    assert "key: dtype" in line
    assert "in.npz" in line


def test_flags_go_before_the_environment(url: str, source: Path, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    answered("variants", "--url", url, QKV_URL=nobody)
    answered("variants", QKV_URL=url)
    answered("variants", "--local", QKV_URL=nobody)
    assert nobody in refused(tmp_path, "variants", QKV_URL=nobody)
    assert nobody in refused(tmp_path, "variants", "--url", nobody, QKV_URL=url)
    (option,) = (p for p in main.commands["variants"].params if p.name == "url")
    assert option.default == "http://127.0.0.1:8000"  # where somebody may listen


@pytest.mark.parametrize(
    "parameters",
    [
        {"causal": True, "query_offset": "end"},
        {"window": [2, 0], "scale": 0.5},
        {"softcap": 2.5, "scale": None},
        {"dropout": 0.5, "seed": 7},
    ],
)
def test_parameters_are_json_or_bare_words(
    url: str, source: Path, tmp_path: Path, parameters: dict[str, Any]
) -> None:
    flags: list[str] = []
    for name, value in parameters.items():
        flags += ["-p", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    with Client(url) as client:
        run = client.attend("softmax", **tensors(), **parameters)
    for place in PLACES:
        answered("attend", "softmax", source, "-o", tmp_path / "o.npz", *flags, *where(place, url))
        same(got(tmp_path / "o.npz"), run.outputs)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_flags_go_before_what_the_file_says(url: str, tmp_path: Path, suffix: str) -> None:
    fields = {
        "parameters": {"causal": True, "scale": 3.0},
        "outputs": ["scores"],
        "weights": "none",
    }
    source = put(tmp_path / f"in{suffix}", "inputs", tensors(), **fields)
    flags = ("-p", "scale=0.25", "--return", "output", "--return", "weights", "--weights", "full")
    with Client(url) as client:
        run = client.attend("softmax", **tensors(), causal=True, scale=0.25)
    for place in PLACES:
        answered("attend", "softmax", source, "-o", tmp_path / "o.npz", *flags, *where(place, url))
        same(got(tmp_path / "o.npz"), run.outputs)


def test_what_is_returned(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    for flags, names in (
        ((), {"output", "weights"}),
        (("--weights", "none"), {"output"}),
        (("--return", "scores"), {"scores"}),
        (("--weights", "top_k=2"), {"output", "weights", "indices"}),
        (("--weights", "rows=0,2", "--return", "weights"), {"weights"}),
        (("--weights", "rows=0"), {"output", "weights"}),
        (("--weights", "pool=2"), {"output", "weights"}),
        (("--return", "output", "--return", "scores"), {"output", "scores"}),
    ):
        answered("attend", "softmax", source, "-o", target, "--local", *flags)
        assert got(target).keys() == names


def weights_v2(dtype: str = "float32", bias: bool = False) -> dict[str, Array]:
    """A layer of 6 in, 4 out."""
    made = {}
    for i, role in enumerate(("query", "key", "value")):
        made[f"W_{role}.weight"] = normal(4, 6, seed=10 + i).astype(dtype)
        if bias:
            made[f"W_{role}.bias"] = normal(4, seed=20 + i).astype(dtype)
    return made


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_layer(url: str, tmp_path: Path, suffix: str, place: str) -> None:
    x, weights = normal(2, 5, 6), weights_v2(bias=True)
    arrays = {"x": x} | {f"layer.{name}": array for name, array in weights.items()}
    source = put(tmp_path / f"in{suffix}", "inputs", arrays)
    target = tmp_path / f"out{suffix}"
    with Client(url) as client:
        run = client.attend(
            "softmax", x=x, layer={"layout": "v2", "heads": 2, "tensors": weights}, causal=True
        )
    flags = ("--layout", "v2", "--heads", "2", "-p", "causal=true", *where(place, url))
    answered("attend", "softmax", source, "-o", target, *flags)
    same(got(target), run.outputs)


def test_a_layers_flags_go_before_what_the_file_says(tmp_path: Path) -> None:
    arrays = {"x": normal(2, 5, 6)} | {f"layer.{n}": a for n, a in weights_v2().items()}
    said = {"layout": "v1", "heads": 4}
    source = put(tmp_path / "in.json", "inputs", arrays, layer=said)
    words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", "--local")
    answered(*words, "--layout", "v2")
    assert got(tmp_path / "out.npz")["weights"].shape == (2, 4, 5, 5)
    answered(*words, "--layout", "v2", "--heads", "2")
    assert got(tmp_path / "out.npz")["weights"].shape == (2, 2, 5, 5)


def test_heads_without_a_layer_are_not_forgotten(source: Path, tmp_path: Path) -> None:
    words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", "--local", "--heads", "2")
    assert "layer" in refused(tmp_path, *words)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("between", SUFFIXES)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_there_and_back_not_a_bit_is_lost(
    url: str, tmp_path: Path, suffix: str, between: str, dtype: str, place: str
) -> None:
    weights = weights_v2(dtype)
    fields = {"dtype": dtype} if suffix == ".json" else {}
    v2 = put(tmp_path / f"v2{suffix}", "tensors", weights, **fields)
    v1, back = tmp_path / f"v1{between}", tmp_path / f"back{suffix}"
    said = answered("convert", v2, "--from", "v2", "--to", "v1", "-o", v1, *where(place, url))
    assert "differ by" in said
    answered("convert", v1, "--from", "v1", "--to", "v2", "-o", back, *where(place, url))
    same(got(v1, "tensors"), {n.removesuffix(".weight"): a.T.copy() for n, a in weights.items()})
    same(got(back, "tensors"), weights)
    if suffix != ".json" or dtype == "float64":  # lists have no dtype, where that loses nothing
        assert all(a.dtype == dtype for a in got(back, "tensors").values())


@pytest.mark.parametrize("place", PLACES)
def test_a_bias_is_refused_or_taken_exactly(url: str, tmp_path: Path, place: str) -> None:
    weights = weights_v2(bias=True)
    v2 = put(tmp_path / "v2.safetensors", "tensors", weights)
    words = ("convert", v2, "--from", "v2", "--to", "v1", *where(place, url))
    for flags in ((), ("--bias", "refuse")):
        line = refused(tmp_path, *words, "-o", tmp_path / "v1.npz", *flags)
        assert "W_query.bias" in line
        assert "(/tensors/W_query.bias)" in line
    answered(*words, "-o", tmp_path / "v1.npz", "--bias", "augment")
    with Client(url) as client:
        converted = client.convert(weights, source="v2", target="v1", bias="augment")
    same(got(tmp_path / "v1.npz"), converted.tensors)


def test_a_link_stays_one_and_what_was_there_is_replaced(source: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "real.npz", tmp_path / "link.npz"
    real.write_bytes(b"old")
    link.symlink_to(real)
    answered("attend", "softmax", source, "-o", link, "--local")
    assert link.is_symlink()
    assert got(real).keys() == {"output", "weights"}


def test_variants_are_the_same_here_and_there(url: str, tmp_path: Path) -> None:
    for name in ((), ("softmax",)):
        texts = {answered("variants", *name, *where(place, url)) for place in PLACES}
        (text,) = texts
        assert re.search(r"^softmax\b", text, re.MULTILINE)
    assert all(word in text for word in ("formula", "arXiv", "query_offset", "(B, H, L, D)"))
    for place in PLACES:
        line = refused(tmp_path, "variants", "soft", *where(place, url))
        assert "'soft'" in line
        assert "softmax" in line


def test_help_tells_all_there_is_within_80_columns() -> None:
    top = answered("--help")
    for name, command in main.commands.items():
        text = answered(name, "--help")
        assert text == answered(name, "-h")
        assert max(map(len, (top + text).splitlines())) <= 80
        assert f"  {name} " in top
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, f"{name}: {option.name}"
                assert all(flag in text for flag in option.opts)
    assert "..." not in top.replace("[ARGS]...", "")


def damage() -> list[tuple[str, bytes]]:
    """Contents that are not what their suffix says."""
    npz = files._npz({"query": normal(2, 2)})
    length = (20).to_bytes(8, "little")
    return [
        (".json", b""),
        (".json", b'{"inputs": {'),
        (".json", b"[1]"),
        (".json", b'"\xff"'),
        (".json", b'{"inputs": [1]}'),
        (".json", b'{"inputs": {"query": [[1], [1, 2]]}}'),
        (".json", b'{"encoding": 3, "inputs": {}}'),
        (".safetensors", b""),
        (".safetensors", b"1234567"),
        (".safetensors", length + b"{}"),
        (".safetensors", (2).to_bytes(8, "little") + b"[]"),
        (".safetensors", b"\xff" * 100),
        (".npz", npz[: len(npz) // 2]),
        (".npz", npz.replace(b"(2, 2)", b"(9, 9)")),
        (".npz", npz.replace(b"<f4", b"|O8")),
    ]


@pytest.mark.parametrize(("suffix", "content"), damage())
def test_a_damaged_file_is_one_line_that_names_it(
    tmp_path: Path, suffix: str, content: bytes
) -> None:
    source = tmp_path / f"in{suffix}"
    source.write_bytes(content)
    words = ("attend", "softmax", source, "-o", tmp_path / "out.json", "--local")
    assert str(source) in refused(tmp_path, *words)


@given(st.data())
def test_no_npz_is_damaged_in_a_way_that_is_not_known(data: st.DataObject) -> None:
    content = bytearray(files._npz({"query": normal(2, 2), "key": normal(3)}))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(QkvError):
        files._read_npz(bytes(content))


@pytest.mark.parametrize("command", ["attend", "convert"])
def test_files_that_cannot_be_read_or_written(source: Path, tmp_path: Path, command: str) -> None:
    words = {
        "attend": ("attend", "softmax", "--local"),
        "convert": ("convert", "--from", "v2", "--to", "v1", "--local"),
    }[command]
    (tmp_path / "folder.json").mkdir()
    target = tmp_path / "out.npz"
    for name, said in (
        ("none.json", "none.json: No such file or directory"),
        ("folder.json", "folder.json: Is a directory"),
        ("in.txt", "in.txt has none of the suffixes .safetensors, .npz, .json"),
        ("in", "suffixes"),
    ):
        assert said in refused(tmp_path, *words, tmp_path / name, "-o", target)
    for name, said in (
        ("out.txt", "out.txt has none of the suffixes .safetensors, .npz, .json"),
        ("none/out.npz", "none/out.npz lies in a directory that is not there"),
        ("folder.json", "folder.json is a directory"),
        ("in.json/out.npz", "is not there"),
    ):
        assert said in refused(tmp_path, *words, source, "-o", tmp_path / name)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-p", "causal"), ["'causal'", "NAME=VALUE"]),
        (("-p", "=3"), ["'=3'", "NAME=VALUE"]),
        (("-p", "nope=3"), ["'nope'", "causal", "(/parameters/nope)"]),
        (("-p", "causal=maybe"), ["maybe", "(/parameters/causal)"]),
        (("-p", "scale={"), ["(/parameters/scale)"]),
        (("--return", "nope"), ["nope", "scores", "(/outputs/0)"]),
        (("--layout", "v7"), ['"v7"', "v1, v2", "(/layer/layout)"]),
        (("--layout", "v2"), ["W_query.weight"]),
    ],
)
def test_wrong_flags(
    url: str, source: Path, tmp_path: Path, place: str, flags: tuple[str, ...], said: list[str]
) -> None:
    target = tmp_path / "out.npz"
    line = refused(tmp_path, "attend", "softmax", source, "-o", target, *flags, *where(place, url))
    assert all(word in line for word in said), line


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("flags", [(), ("-p", "causal=true"), ("--layout", "v2")])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field in ("parameters", "layer", "outputs", "weights")
        for value in ([1], "word", 3, None, True)
        if value is not None or field not in ("layer", "outputs")  # where null is as if absent
    ],
)
def test_fields_of_the_wrong_kind_in_the_file(
    url: str, tmp_path: Path, field: str, value: Any, flags: tuple[str, ...], place: str
) -> None:
    source = put(tmp_path / "in.safetensors", "inputs", tensors(), **{field: value})
    target = tmp_path / "out.npz"
    line = refused(tmp_path, "attend", "softmax", source, "-o", target, *flags, *where(place, url))
    if not flags or field in ("parameters", "layer"):
        assert "(/" in line


@pytest.mark.parametrize("place", PLACES)
def test_wrong_content_says_where(url: str, tmp_path: Path, place: str) -> None:
    for change, pointer in (
        ({"key": normal(2, 2, 6, 7)}, "(/inputs/key)"),
        ({"extra": normal(2)}, "(/inputs/extra)"),
        ({"mask": normal(4, 4)}, "(/inputs/mask)"),
    ):
        source = put(tmp_path / "in.npz", "inputs", tensors() | change)
        words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", *where(place, url))
        assert pointer in refused(tmp_path, *words)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["soft", "softmax?", "softmax#x", "softmax/..", "ä", "a\nb"])
def test_no_such_variant(url: str, source: Path, tmp_path: Path, place: str, name: str) -> None:
    words = ("attend", name, source, "-o", tmp_path / "out.npz", *where(place, url))
    assert refused(tmp_path, *words)


@pytest.mark.parametrize(
    "address",
    [
        "http://nosuch.invalid",
        "http://a..b",
        "http://xn--/",
        "http://[::",
        "http://127.0.0.1:port",
        "ftp://127.0.0.1",
        "127.0.0.1:8000",
        "here",
        "",
    ],
)
def test_no_service_there(source: Path, tmp_path: Path, address: str) -> None:
    words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", "--url", address)
    assert f"no answer from {address!r}: " in refused(tmp_path, *words)


def test_a_proxy_that_is_none(tmp_path: Path) -> None:
    for proxy in ("socks9://127.0.0.1", "http://[::"):
        line = refused(tmp_path, "variants", "--url", "http://127.0.0.1", ALL_PROXY=proxy)
        assert "no answer" in line


def test_usage_is_one_line_too(source: Path, tmp_path: Path) -> None:
    words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", "--local")
    for more, said in (
        (("--weights", "rows=all"), "rows=0,5"),
        (("--wieghts", "full"), "--weights"),
        (("--heads", "two"), "two"),
        (("more",), "more"),
    ):
        line = refused(tmp_path, *words, *more)
        assert said in line
        assert "--help" in line
    assert "--output" in refused(tmp_path, "attend", "softmax", source)
    assert "atend" in refused(tmp_path, "atend")


def test_an_answer_too_large_for_the_service(
    serve: Callable[..., Server], source: Path, tmp_path: Path
) -> None:
    served = serve(max_answer_bytes=100)
    words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", "--url", served.url)
    assert "100" in refused(tmp_path, *words)


def limited(limit: str, size: int, *words: object) -> subprocess.CompletedProcess[str]:
    """A command in a process that the system lets have no more than so much."""
    program = (
        f"import resource; resource.setrlimit(resource.{limit}, ({size}, {size}));"
        f"from qkv.cli import main; main({[str(word) for word in words]!r})"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_run_too_large_for_this_machine(tmp_path: Path) -> None:
    long = np.zeros((1 << 17, 1), np.float32)
    source = put(tmp_path / "in.npz", "inputs", {"query": long, "key": long, "value": long})
    words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", "--local")
    done = limited("RLIMIT_AS", 1 << 35, *words)
    assert "out of memory" in one_error(done.stderr)
    assert done.returncode == 1


def test_a_full_disk_leaves_what_was_there(url: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    target.write_bytes(b"old")
    done = limited("RLIMIT_FSIZE", 100, "attend", "softmax", source, "-o", target, "--url", url)
    assert f"{target}: File too large" in one_error(done.stderr)
    assert done.returncode == 1
    assert target.read_bytes() == b"old"
    assert set(tmp_path.iterdir()) == {source, target}


def test_ctrl_c_ends_it_in_one_line(
    serve: Callable[..., Server],
    command: Callable[..., Process],
    source: Path,
    tmp_path: Path,
) -> None:
    served = serve()
    with served.engine.hold():
        asking = command(
            "attend", "softmax", str(source), "-o", str(tmp_path / "out.npz"), "--url", served.url
        )
        served.await_waiting(1)
        assert asking.end(signal.SIGINT) == 130
    assert asking.lines == ["Error: interrupted"]
    assert list(tmp_path.iterdir()) == [source]
