"""One verdict on a safetensors file: that of the library of the format, in every reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors

from qkv.errors import QkvError
from qkv.wire import safetensors as codec
from qkv.wire.checkpoint.checkpoint import Checkpoint
from support.commands import error_of
from support.safetensors_files import INVALID, STRICTER, VALID, file, of_tensors, tensor

REFUSED = INVALID | STRICTER
UNSUPPORTED = f"expected {', '.join(codec.DTYPES)}"
"""Ends the error for a valid dtype that requests do not have."""


def is_read_by_library(body: bytes) -> bool:
    try:
        safetensors.deserialize(body)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return False
    return True


@pytest.mark.parametrize("name", VALID | REFUSED)
def test_table_has_the_verdict_of_the_library(name: str) -> None:
    assert is_read_by_library((VALID | REFUSED)[name]) == (name not in INVALID)


def test_table_has_every_dtype_of_the_library() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(of_tensors(a=tensor("other")))  # type: ignore[no-untyped-call]
    known = re.findall("`([A-Z0-9_]+)`", str(caught.value))
    assert {f"four of {code}" for code in known} <= VALID.keys()
    assert len(known) > 20


@pytest.mark.parametrize("name", VALID)
def test_valid_file_is_a_message_and_a_checkpoint(tmp_path: Path, name: str) -> None:
    read = dict(safetensors.deserialize(VALID[name]))  # type: ignore[no-untyped-call]
    try:
        message = codec.decode(VALID[name], "tensors")
    except QkvError as error:
        assert error.detail.endswith(UNSUPPORTED)  # noqa: PT017 (only some are refused)
    else:
        assert message.tensors.keys() == read.keys()
    path = tmp_path / "a.safetensors"
    path.write_bytes(VALID[name])
    checkpoint = Checkpoint(path)
    assert set(checkpoint.names) == read.keys()
    for name, theirs in read.items():
        assert list(checkpoint.shape(name)) == theirs["shape"]
        if checkpoint.dtype(name) in codec.DTYPES.values():
            assert bytes(checkpoint.read(name).data) == bytes(theirs["data"])


@pytest.mark.parametrize("name", REFUSED)
def test_other_file_is_neither_a_message_nor_a_checkpoint(tmp_path: Path, name: str) -> None:
    with pytest.raises(QkvError) as of_message:
        codec.decode(REFUSED[name], "tensors")
    assert not of_message.value.detail.endswith(UNSUPPORTED)
    path = tmp_path / "a.safetensors"
    path.write_bytes(REFUSED[name])
    with pytest.raises(QkvError) as of_checkpoint:
        Checkpoint(path)
    assert of_checkpoint.value.detail.startswith(f"{path}: not a safetensors file: ")


def test_conversion_of_a_file_whose_tensors_share_bytes_is_refused(tmp_path: Path) -> None:
    square = tensor(shape=[8, 8], offsets=[0, 256])
    names = (f"{role}_proj.weight" for role in "qkvo")
    path = tmp_path / "a.safetensors"
    path.write_bytes(of_tensors(256, **dict.fromkeys(names, square)))
    target = tmp_path / "b.safetensors"
    line = error_of(
        tmp_path, "convert", path, "--to", "meta", "--heads", "2", "-o", target, "--local"
    )
    assert "has invalid data_offsets: got 0 to 256 of 256 bytes, expected a start at 256" in line


def test_error_has_no_byte_of_a_file_of_another_format(tmp_path: Path) -> None:
    """A link may lead to any file of the machine, and clients see the problem of a checkpoint."""
    path = tmp_path / "a.safetensors"
    for content in (b"password=0123456789", file(b'{"\xba": 1}'), file(b"{secret}")):
        path.write_bytes(content)
        with pytest.raises(QkvError) as caught:
            Checkpoint(path)
        said = caught.value.detail.removeprefix(str(path))
        assert str(int.from_bytes(content[:8], "little")) not in said.split()
        assert "ba" not in said.split("0x")[1:]
        assert "secret" not in said
