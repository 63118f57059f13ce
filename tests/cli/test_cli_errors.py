"""Tests of the one-line errors of the commands: files, flags, content, services, this machine."""

from __future__ import annotations

import io
import pickle
import resource
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.format import write_array_header_1_0 as write_header

from support.clients import delays as delays
from support.commands import (
    error_of,
    normal,
    one_error,
    read_tensors,
    stdout_of,
    target_options,
    tensors,
    write_tensors,
)
from support.commands import source as source
from support.processes import Process, run_command, wait_until_asleep
from support.service import Server


def test_npz_with_an_unsupported_dtype_names_the_array(tmp_path: Path) -> None:
    write_tensors(
        tmp_path / "in.npz", "inputs", tensors() | {"key": np.zeros((2, 2), ml_dtypes.bfloat16)}
    )
    line = error_of(
        tmp_path, "attend", "softmax", tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--local"
    )
    assert "in.npz: key has an unsupported dtype: got void16, expected float64" in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"hello text", "not an .npz file: got b'hello text', expected an archive that numpy"),
        (pickle.dumps([1]), "not an .npz file: got b'"),
        (b"", "not an .npz file: got b''"),
        ({"query": np.array([[1, None]])}, "query has an unsupported dtype: got object, expected"),
        ({"query": np.ones((2, 2), "i4")}, "query has an unsupported dtype: got int32, expected"),
    ],
)
def test_file_that_is_no_npz_gives_no_advice_to_load_pickles(
    tmp_path: Path, content: Any, expected: str
) -> None:
    source = tmp_path / "in.npz"
    if isinstance(content, bytes):
        source.write_bytes(content)
    else:
        np.savez(source, **content)
    line = error_of(tmp_path, "attend", "softmax", source, "-o", tmp_path / "out.npz", "--local")
    assert f"in.npz: {expected}" in line
    assert "allow_pickle" not in line
    assert "unsafe" not in line


def test_parameter_has_one_value_and_may_be_written_as_in_python(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.npz"
    words = ("attend", "softmax", source, "-o", target, "--local", "-p")
    written = []
    for value in ("causal=true", "causal=True", "causal=False", "window=None"):
        stdout_of(*words, value)
        written.append(read_tensors(target)["weights"].tobytes())
    assert written[0] == written[1] != written[2] == written[3]
    line = error_of(tmp_path, *words, "causal=true", "-p", "scale=2", "-p", "causal=false")
    assert "-p causal is given twice: got true and false, expected one value" in line
    line = error_of(tmp_path, "sweep", "linear", "--local", "-p", "scale=1", "-p", "scale=1")
    assert "-p scale is given twice: got 1 and 1, expected one value" in line


@pytest.mark.slow
def test_npz_of_zeros_is_not_unpacked(tmp_path: Path) -> None:
    """Headers are read first: the archive takes 1/1000 of its arrays."""
    source, target = tmp_path / "in.npz", tmp_path / "out.npz"
    with (
        zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("query.npy", "w") as file,
    ):
        write_header(file, {"descr": "<f4", "fortran_order": False, "shape": (300 << 20,)})
        for _ in range(300):
            file.write(bytes(4 << 20))
    words = ("attend", "softmax", source, "-o", target, "--local")
    done = run_command(*words, limits={resource.RLIMIT_DATA: 1 << 30})
    assert "compressed arrays are too large: got 1,258,291," in one_error(done.stderr)


def test_npz_has_only_the_arrays_below_the_prefix_unpacked(tmp_path: Path) -> None:
    arrays = {f"a.W_{role}": normal(6, 4) for role in ("query", "key", "value")}
    source = write_tensors(tmp_path / "in.npz", "tensors", arrays | {"b.other": normal(64, 64)})
    content = source.read_bytes()
    with zipfile.ZipFile(source) as archive:  # a byte of the other layer's numbers is wrong
        start = archive.getinfo("b.other.npy").header_offset
    at = start + 10_000
    source.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    words = ("convert", source, "--to", "v2", "-o", tmp_path / "out.npz", "--local")
    assert "not an .npz file" in error_of(tmp_path, *words)
    assert "written to" in stdout_of(*words, "--prefix", "a")


def test_npz_with_a_header_of_more_than_it_has_is_an_error(tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(tmp_path / "in.npz", "w") as archive,
        archive.open("query.npy", "w") as file,
    ):
        write_header(file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    words = ("attend", "softmax", tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--local")
    assert "query.npy is smaller than its shape" in error_of(tmp_path, *words)


def npz_of(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def damage() -> list[tuple[str, bytes]]:
    """Returns suffixes, and contents that do not match them."""
    npz = npz_of(query=normal(2, 2))
    return [
        (".json", b""),
        (".json", b'{"inputs": {"query": [[1], [1, 2]]}}'),
        (".safetensors", b""),
        (".safetensors", (2).to_bytes(8, "little") + b"[]"),
        (".npz", b"PK\x03\x04broken"),
        (".npz", b"\x93NUMPY\x01\x00v\x00{}"),
        (".npz", npz[: len(npz) // 2]),
        (".npz", npz.replace(b"(2, 2)", b"(9, 9)")),
        (".npz", npz.replace(b"<f4", b"|O8")),
    ]


@pytest.mark.parametrize(("suffix", "content"), damage())
def test_error_names_the_damaged_file(tmp_path: Path, suffix: str, content: bytes) -> None:
    source = tmp_path / f"in{suffix}"
    source.write_bytes(content)
    words = ("attend", "softmax", source, "-o", tmp_path / "out.json", "--local")
    assert str(source) in error_of(tmp_path, *words)


@pytest.mark.parametrize("command", ["attend", "convert"])
def test_files_that_cannot_be_read_or_written_are_named(
    source: Path, tmp_path: Path, command: str
) -> None:
    words = {
        "attend": ("attend", "softmax", "--local"),
        "convert": ("convert", "--from", "v2", "--to", "v1", "--local"),
    }[command]
    (tmp_path / "folder.json").mkdir()
    target = tmp_path / "out.npz"
    for name, expected in (
        ("none.json", "none.json: No such file or directory"),
        ("folder.json", "folder.json"),
        ("in.txt", "in.txt has none of the suffixes .safetensors, .npz, .json"),
        ("in", "suffixes"),
    ):
        assert expected in error_of(tmp_path, *words, tmp_path / name, "-o", target)
    for name, expected in (
        ("out.txt", "out.txt has none of the suffixes .safetensors, .npz, .json"),
        ("none/out.npz", "none/out.npz is in a directory that does not exist"),
        ("folder.json", "folder.json is a directory"),
        ("in.json/out.npz", "does not exist"),
    ):
        assert expected in error_of(tmp_path, *words, source, "-o", tmp_path / name)


WRONG_FLAGS: Final[list[tuple[tuple[str, ...], list[str]]]] = [
    (("-p", "causal"), ["'causal'", "NAME=VALUE"]),
    (("-p", "=3"), ["'=3'", "NAME=VALUE"]),
    (("-p", "nope=3"), ["'nope'", "causal", "(-p nope=3)"]),
    (("-p", "causal=maybe"), ["maybe", "(-p causal=maybe)"]),
    (("-p", "scale={"), ["(-p scale={)"]),
    (("--return", "nope"), ["nope", "scores", "(--return)"]),
    (("--weights", "bins"), ["bins", "(--weights)", '"top_k"']),
    (("--weights", "top_k=0"), ["got 0", "(--weights)"]),
    (("--layout", "v7"), ['"v7"', "v1", "v2", "(--layout)"]),
    (("--layout", "v2"), ["W_query.weight"]),
    (("--layout", "v2", "--heads", "0"), ["--heads", "got 0"]),
    (("--heads", "2"), ["layout is missing", "(--layout)"]),
]


@pytest.mark.parametrize(
    ("place", "flags", "expected"),
    [*(("local", *row) for row in WRONG_FLAGS), *(("service", *row) for row in WRONG_FLAGS[2:4])],
)
def test_error_names_the_wrong_flag_as_typed(
    url: str, source: Path, tmp_path: Path, place: str, flags: tuple[str, ...], expected: list[str]
) -> None:
    target = tmp_path / "out.npz"
    line = error_of(
        tmp_path, "attend", "softmax", source, "-o", target, *flags, *target_options(place, url)
    )
    assert all(word in line for word in expected), line
    assert "(/" not in line or "W_query" in line  # a pointer is for a field of the file


@pytest.mark.parametrize(
    ("field", "value"), [("parameters", [1]), ("layer", 3), ("outputs", "word"), ("weights", True)]
)
def test_error_has_the_pointer_of_a_wrong_field_in_the_file(
    tmp_path: Path, field: str, value: Any
) -> None:
    source = write_tensors(tmp_path / "in.safetensors", "inputs", tensors(), **{field: value})
    words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", "--local")
    assert "(/" in error_of(tmp_path, *words)


@pytest.mark.parametrize(
    ("field", "value", "flags"),
    [
        *(("parameters", v, ("-p", "causal=true")) for v in ([1], None)),
        ("layer", [1], ("--layout", "v2")),
    ],
)
def test_flag_does_not_hide_a_wrong_field_of_the_file(
    tmp_path: Path, field: str, value: Any, flags: tuple[str, ...]
) -> None:
    """The flag is one more name of the object in that field."""
    source = write_tensors(tmp_path / "in.safetensors", "inputs", tensors(), **{field: value})
    words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", *flags, "--local")
    assert "(/" in error_of(tmp_path, *words)


def test_error_names_the_wrong_tensor_and_its_file(tmp_path: Path) -> None:
    for change, place_of_error in (
        ({"key": normal(2, 2, 6, 7)}, "(key in in.npz)"),
        ({"extra": normal(2)}, "(extra in in.npz)"),
        ({"mask": normal(4, 4)}, "(mask in in.npz)"),
    ):
        source = write_tensors(tmp_path / "in.npz", "inputs", tensors() | change)
        words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", "--local")
        assert place_of_error in error_of(tmp_path, *words)


@pytest.mark.parametrize("name", ["softmax?", "softmax#x", "softmax/..", "ä", "a\nb"])
def test_name_of_a_variant_is_one_part_of_the_path(
    url: str, source: Path, tmp_path: Path, name: str
) -> None:
    words = ("attend", name, source, "-o", tmp_path / "out.npz", "--url", url)
    assert error_of(tmp_path, *words)


@pytest.mark.slow
@pytest.mark.usefixtures("delays")
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
def test_missing_service_is_an_error_with_its_address(
    source: Path, tmp_path: Path, address: str
) -> None:
    words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", "--url", address)
    said = "no response from" if address == "http://nosuch.invalid" else "nothing was sent to"
    assert f"{said} {address!r}: " in error_of(tmp_path, *words)


def test_key_that_cannot_be_sent_is_no_missing_response(url: str, tmp_path: Path) -> None:
    for key in ("secret key", "sécret", " "):
        line = error_of(tmp_path, "variants", "--url", url, "--api-key", key)
        assert f"nothing was sent to {url!r}: the API key is empty or has characters" in line
        assert "cret" not in line


def test_invalid_proxy_is_an_error(tmp_path: Path) -> None:
    for proxy in ("socks9://127.0.0.1", "http://[::"):
        line = error_of(tmp_path, "variants", "--url", "http://127.0.0.1", ALL_PROXY=proxy)
        assert "nothing was sent to 'http://127.0.0.1': " in line


def test_usage_error_is_one_line(source: Path, tmp_path: Path) -> None:
    words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", "--local")
    for more, expected in (
        (("--weights", "rows=all"), "rows=0,5"),
        (("--wieghts", "full"), "--weights"),
        (("--heads", "two"), "two"),
        (("more",), "more"),
    ):
        line = error_of(tmp_path, *words, *more)
        assert expected in line
        assert "--help" in line
    assert "--output" in error_of(tmp_path, "attend", "softmax", source)
    assert "atend" in error_of(tmp_path, "atend")


@pytest.mark.process
def test_local_run_without_enough_memory_is_an_error(tmp_path: Path) -> None:
    long = np.zeros((1 << 17, 1), np.float32)
    source = write_tensors(
        tmp_path / "in.npz", "inputs", {"query": long, "key": long, "value": long}
    )
    words = ("attend", "softmax", source, "-o", tmp_path / "out.npz", "--local")
    done = run_command(*words, limits={resource.RLIMIT_AS: 1 << 35})
    assert "out of memory" in one_error(done.stderr)
    assert done.returncode == 1


def test_ctrl_c_prints_one_line(
    serve: Callable[..., Server],
    command: Callable[..., Process],
    source: Path,
    tmp_path: Path,
) -> None:
    served = serve()
    with served.hold():
        process = command(
            "attend", "softmax", str(source), "-o", str(tmp_path / "out.npz"), "--url", served.url
        )
        served.wait_until_queued(1)
        wait_until_asleep(process.popen.pid)
        assert process.end(signal.SIGINT) == 130
    assert process.lines == ["Error: interrupted"]
    assert list(tmp_path.iterdir()) == [source]
