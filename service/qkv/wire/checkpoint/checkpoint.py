"""A checkpoint: the tensors of a safetensors file, or of several that an index names.

Only the headers are read, until `read` reads a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, Final

from qkv.errors import InvalidContent, QkvError
from qkv.tensors import RawTensor
from qkv.wire.checkpoint.tensor_file import MAX_HEADERS, TensorFile
from qkv.wire.checkpoint.torch_files import refuse_torch_file
from qkv.wire.plain_json import load_names
from qkv.wire.safetensors import decode_metadata

SUFFIX: Final = ".safetensors"
_INDEX: Final = ".index.json"
_MAX_INDEX: Final = 32 << 20  # bytes; that of 100,000 tensors has fewer


def is_checkpoint(path: Path) -> bool:
    """Returns True for a safetensors file, an index of some, or a folder."""
    return path.suffix == SUFFIX or path.name.endswith(_INDEX) or path.is_dir()


class Checkpoint:
    """The tensors of a model, or of a layer, in one or several safetensors files.

    Args:
        path: a safetensors file, an index of some (`model.safetensors.index.json`), or a folder
            that contains one of them.

    Attributes:
        path: of the file or the index.
        names: of all tensors, layer 2 before layer 10.

    Raises:
        InvalidContent: a file is damaged or missing, or the folder has none.
        OSError: a file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = _find_in(path) if path.is_dir() else path
        self._open: dict[Path, TensorFile] = {}
        self._inodes: dict[tuple[int, int], TensorFile] = {}  # links share the file that is open
        self._header_bytes = 0
        self._files: Mapping[str, Path]  # of each tensor
        if self.path.name.endswith(_INDEX):
            self._files = _read_index(self.path)
        else:
            self._files = dict.fromkeys(self._file(self.path).names, self.path)
        self.names = sorted(self._files, key=_natural)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a request or response that qkv wrote beside the tensors.

        Raises:
            QkvError: they are not JSON.
        """
        if self.path.name.endswith(_INDEX):
            return {}
        try:
            return decode_metadata(self._file(self.path).metadata)
        except QkvError as error:
            error.detail = f"{self.path}: {error.detail}"
            raise

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, from the header of its file."""
        return self._file_of(name).shape(name)

    def dtype(self, name: str) -> str:
        """Returns the dtype of a tensor; its code in the file, such as U8, if requests have none.

        It is read from the header.
        """
        return self._file_of(name).dtype(name)

    def read(self, name: str) -> RawTensor:
        """Reads a tensor whose dtype requests support.

        Raises:
            InvalidContent: they do not support it, or the file was shortened.
        """
        return self._file_of(name).read(name)

    def read_into(self, name: str, first: int, buffer: memoryview) -> None:
        """Reads bytes of a tensor, from byte `first` of it, until the buffer is full.

        Raises:
            InvalidContent: the file was shortened.
            OSError: the file cannot be read.
        """
        self._file_of(name).read_into(name, first, buffer)

    def check_unchanged(self) -> None:
        """Checks that no file has changed since it was opened.

        Raises:
            InvalidContent: one has.
        """
        for file in self._inodes.values():
            file.check_unchanged()

    def close(self) -> None:
        """Closes the files."""
        for file in self._inodes.values():
            file.close()

    def _file_of(self, name: str) -> TensorFile:
        file = self._file(self._files[name])
        if name not in file:
            raise InvalidContent(
                f"{self.path}: {name} is not in {self._files[name].name}, where the index expects "
                "it"
            )
        return file

    def _file(self, path: Path) -> TensorFile:
        if path not in self._open:
            self._open[path] = self._file_at(path)
        return self._open[path]

    def _file_at(self, path: Path) -> TensorFile:
        try:
            status = path.stat()
        except FileNotFoundError:
            if path == self.path:
                raise
            raise InvalidContent(
                f"{self.path}: a file of the index is missing: got no {path.name} beside it"
            ) from None
        inode = (status.st_dev, status.st_ino)
        if inode not in self._inodes:
            file = TensorFile(path, MAX_HEADERS - self._header_bytes)
            self._header_bytes += file.header_bytes
            self._inodes[inode] = file
        return self._inodes[inode]


def read_document(path: Path, max_bytes: int) -> bytes:
    """Returns the bytes of a small file.

    Raises:
        InvalidContent: it is no regular file, or too long.
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait
        raise InvalidContent(f"{path} is no regular file")
    with path.open("rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise InvalidContent(f"{path} is too long: expected at most {max_bytes} bytes")
    return text


def _natural(name: str) -> list[str | int]:
    """Returns a sort key: numbers in a name count as numbers."""
    return [int(p) if i % 2 else p for i, p in enumerate(re.split(r"(\d{1,18})", name))]


def _find_in(folder: Path) -> Path:
    """Returns the model in a folder: as transformers, one file before an index of several.

    Raises:
        InvalidContent: there is none, or there are several.
    """
    for name in (f"model{SUFFIX}", f"model{SUFFIX}{_INDEX}"):
        if (folder / name).exists():
            return folder / name
    files = sorted(p for p in folder.iterdir() if p.is_file())
    models = [p for p in files if p.name.endswith(f"{SUFFIX}{_INDEX}")]
    models = models or [p for p in files if p.suffix == SUFFIX]
    if len(models) == 1:
        return models[0]
    if models:
        names = ", ".join(p.name for p in models[:4])
        raise InvalidContent(
            f"{folder} has {len(models)} models: got {names}{', ...' if len(models) > 4 else ''}; "
            "name one of them"
        )
    for path in files:
        refuse_torch_file(path)
    raise InvalidContent(f"{folder} is a directory without a {SUFFIX} file")


def _read_index(path: Path) -> dict[str, Path]:
    """Returns the file of each tensor of an index.

    Raises:
        InvalidContent: it is no index of safetensors files in its folder.
        OSError: it cannot be read.
    """
    try:
        document = load_names(read_document(path, _MAX_INDEX))
    except ValueError as error:
        raise InvalidContent(f"{path}: not JSON: {error}") from None
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict) or not names:
        raise InvalidContent(f"{path}: not an index: expected weight_map, an object of file names")
    for tensor, name in names.items():
        if not isinstance(name, str) or not _is_inside(name):
            raise InvalidContent(
                f"{path}: weight_map is wrong at {tensor}: got {name!r:.200}, expected the name of "
                "a file in the same folder"
            )
        refuse_torch_file(path.parent / name)
        if not name.endswith(SUFFIX):
            raise InvalidContent(
                f"{path}: weight_map is wrong at {tensor}: got {name!r:.200}, expected a {SUFFIX} "
                "file"
            )
    return {tensor: path.parent / name for tensor, name in names.items()}


def _is_inside(name: str) -> bool:
    """Returns True if a path stays in the folder that it begins in, on any system.

    A file may be a link to elsewhere, as in the cache of huggingface_hub.
    """
    path = PureWindowsPath(name)  # splits at both kinds of slash
    return bool(path.name) and not path.anchor and ".." not in path.parts and "\0" not in name
