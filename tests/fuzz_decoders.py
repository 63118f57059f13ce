"""Feeds changed bodies to every decoder, for as long as is wanted.

With atheris (a fuzzer that sees which lines were reached; it is no dependency, and installed by
hand) where it is there, else by random changes. The first fault ends it: it is shown, and what
made it is kept.

    python tests/fuzz_decoders.py [--minutes 10] [--random] [name ...]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from starlette.requests import Request

from qkv.api.request_body import read_body
from qkv.wire import json, open_inference, safetensors
from qkv.wire.message import Message
from support.decoder_fuzz import (
    DECODERS,
    LIMIT,
    PIECE,
    SNIPPETS,
    VALID_BODIES,
    assert_allocates_below,
    assert_decodes_or_refuses,
    decompress,
    result_or_refusal,
)

_LONGEST: Final = 1 << 14
_GUIDED: Final = (
    "wire.json_arrays",
    "wire.json_document",
    "wire.json",
    "wire.safetensors",
    "wire.open_inference",
    "api.request_body",
)
_WRITERS: Final[dict[str, Callable[[Message], bytes]]] = {
    "json": lambda m: b"".join(json.encode(_faithful(m), "inputs")),
    "safetensors": lambda m: b"".join(safetensors.encode(m, "inputs")),
    "v2 in JSON": lambda m: b"".join(open_inference.encode(m, "inputs", ())[0]),
}


def _faithful(message: Message) -> Message:
    """The message, not to be written as lists where these would not say all: what came in base64
    has a dtype, which they have not."""
    tensors = (*message.tensors.values(), *message.layer.values())
    is_literal = all(tensor.is_untyped for tensor in tensors)
    return message if is_literal else replace(message, encoding="base64")


def same(one: Message, other: Message) -> None:
    """Fields and numbers are equal; NaN is one number here."""
    assert one.fields == other.fields
    for first, second in ((one.tensors, other.tensors), (one.layer, other.layer)):
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert tensor.shape == second[name].shape
            assert tensor.dtype == second[name].dtype or tensor.is_untyped
            # numpy does not see that bfloat16's NaN is one; whole numbers stay whole
            wide, again = (
                x.numpy().astype("f8") if x.dtype == "bfloat16" else x.numpy()
                for x in (tensor, second[name])
            )
            np.testing.assert_array_equal(wide, again)


def decoded(name: str, data: bytes) -> None:
    """Checks a decoded message: valid, of bounded memory, and equal after a round trip."""
    decode = DECODERS[name][0]
    assert_decodes_or_refuses(decode, data)
    message = result_or_refusal(lambda: decode(data))
    if message is not None and name in _WRITERS:
        again = DECODERS[name][0](_WRITERS[name](message))
        same(message, again)


def unpacked(data: bytes) -> None:
    """Checks that the output of gzip and zlib is bounded."""
    whole = result_or_refusal(
        lambda: assert_allocates_below(PIECE + LIMIT, lambda: decompress(data))
    )
    assert whole is None or len(whole) <= LIMIT


def received(data: bytes) -> None:
    """Checks that a body is the same in any pieces; its first bytes seed the pieces."""
    draw, payload = random.Random(data[:4]), data[4:]
    coding = draw.choice(["identity", "gzip", "deflate", "GZIP ", "br"])
    at = draw.choice([None, 0, 8, 13])
    pieces = list(cut(payload, draw))
    headers = [(b"content-encoding", coding.encode())]
    if draw.random() < 0.5:
        headers.append((b"content-length", str(len(payload)).encode()))
    limit = draw.choice([1, 10, len(payload), LIMIT])

    async def receive() -> dict[str, Any]:
        if not pieces:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    request = Request({"type": "http", "headers": headers, "method": "POST", "path": "/"}, receive)
    whole = result_or_refusal(lambda: asyncio.run(read_body(request, limit, lambda _: at)))
    if whole is not None:
        assert len(whole) <= limit
        assert (
            coding == "identity" or result_or_refusal(lambda: decompress(payload, limit)) == whole
        )
        assert coding != "identity" or whole == payload


def cut(whole: bytes, draw: random.Random) -> Iterator[bytes]:
    """In pieces, some of them empty; none where the caller has left."""
    if draw.random() < 0.5:
        yield b""
    while whole:
        size = draw.choice([0, 1, 7, 100, 5000])
        yield whole[:size]
        whole = whole[size:]


TARGETS: Final[dict[str, tuple[Callable[[bytes], None], list[str]]]] = {
    **{
        name: (lambda data, name=name: decoded(name, data), valid)  # type: ignore[misc]
        for name, (_, valid) in DECODERS.items()
    },
    "packed": (unpacked, ["gzip", "deflate"]),
    "body": (received, ["lists", "gzip", "deflate"]),
}


def changed(valid: bytes, draw: random.Random) -> bytes:
    """With some things flipped, cut, doubled or put in."""
    made = bytearray(valid)
    for _ in range(draw.randint(1, 5)):
        at = draw.randrange(len(made) + 1)
        match draw.randrange(5):
            case 0 if at < len(made):
                made[at] ^= 1 << draw.randrange(8)
            case 1:
                del made[at : at + draw.randint(1, 20)]
            case 2:
                made[at:at] = made[at : at + draw.randint(1, 40)] * draw.randint(1, 4)
            case 3:
                made[at : at + draw.choice([0, 0, 1, 8])] = draw.choice(SNIPPETS)
            case 4:
                made[at : at + 8] = draw.randrange(1 << 64).to_bytes(8, "little")
    return bytes(made[:_LONGEST])


def run_random(name: str, seconds: float, seed: int = 0) -> int:
    """Random changes, and changes of those; how many were tried."""
    target, valid = TARGETS[name]
    draw, until, count = random.Random(seed), time.monotonic() + seconds, 0
    corpus = [b"seed" * (name == "body") + VALID_BODIES[v] for v in valid]
    while time.monotonic() < until:
        data = changed(draw.choice(corpus), draw)
        try:
            target(data)
        except BaseException:
            kept = Path(tempfile.gettempdir()) / f"fuzz-{name.replace(' ', '-')}"
            kept.write_bytes(data)
            print(f"{name}: a fault after {count:,}; what made it is in {kept}", flush=True)
            raise
        count += 1
        if draw.random() < 0.001 and len(corpus) < 1000:
            corpus.append(data)
    return count


def run_guided(name: str, seconds: float, atheris: Any) -> None:
    """By atheris, which ends the process."""
    target, valid = TARGETS[name]
    with atheris.instrument_imports(include=["qkv"]):
        for module in _GUIDED:  # in the order in which they import each other
            importlib.reload(sys.modules[f"qkv.{module}"])
    with tempfile.TemporaryDirectory() as corpus:
        for v in valid:
            Path(corpus, v.replace(" ", "-")).write_bytes(
                b"seed" * (name == "body") + VALID_BODIES[v]
            )
        words = [f"-max_total_time={seconds:.0f}", f"-max_len={_LONGEST}", "-timeout=20"]
        words += ["-print_final_stats=1", f"-artifact_prefix={tempfile.gettempdir()}/fuzz-"]
        atheris.Setup([sys.argv[0], *words, corpus], target)
        atheris.Fuzz()


def main() -> None:
    """Fuzzes each decoder in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="in all")
    parser.add_argument("--random", action="store_true", help="even where atheris is there")
    parser.add_argument("names", nargs="*", choices=[*TARGETS, []], help="decoders; else all")
    given = parser.parse_args()
    names = given.names or list(TARGETS)
    seconds = given.minutes * 60 / len(names)
    if len(names) == 1:
        _fuzz(names[0], seconds, given.random)
        return
    failed = 0
    for name in names:
        words = [sys.executable, __file__, "--minutes", str(seconds / 60), name]
        words += ["--random"] * given.random
        failed += subprocess.run(words, env=os.environ, check=False).returncode != 0
    sys.exit(failed)


def _fuzz(name: str, seconds: float, is_random: bool) -> None:
    try:
        import atheris
    except ModuleNotFoundError:
        atheris = None
    tracemalloc.start()
    if atheris is None or is_random:
        count = run_random(name, seconds, time.time_ns())
        print(f"{name}: {count:,} changed bodies in {seconds:.0f} s, no fault", flush=True)
        return
    run_guided(name, seconds, atheris)


if __name__ == "__main__":
    main()
