"""Feeds changed bodies to every decoder for a number of minutes.

Uses atheris if it is installed: a fuzzer that measures line coverage, and no dependency. Otherwise
the changes are random. The run ends at the first fault, prints it, and saves the body.

    python tests/tools/fuzz_decoders.py [--minutes 10] [--random] [name ...]
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

from qkv.api import request_record
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
    "json": lambda m: b"".join(json.encode(_without_loss(m), "inputs")),
    "safetensors": lambda m: b"".join(safetensors.encode(m, "inputs")),
    "v2 in JSON": lambda m: b"".join(open_inference.encode(m, "inputs", ())[0]),
}


def _without_loss(message: Message) -> Message:
    """Returns the message in an encoding that keeps its dtypes: lists have none, base64 has."""
    tensors = (*message.tensors.values(), *message.layer.values())
    is_literal = all(tensor.is_untyped for tensor in tensors)
    return message if is_literal else replace(message, encoding="base64")


def assert_same(one: Message, other: Message) -> None:
    """Asserts equal fields and numbers; all NaN count as equal."""
    assert one.fields == other.fields
    for first, second in ((one.tensors, other.tensors), (one.layer, other.layer)):
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert tensor.shape == second[name].shape
            assert tensor.dtype == second[name].dtype or tensor.is_untyped
            # numpy does not treat the NaN of bfloat16 as NaN; integers are not converted
            wide, again = (
                x.numpy().astype("f8") if x.dtype == "bfloat16" else x.numpy()
                for x in (tensor, second[name])
            )
            np.testing.assert_array_equal(wide, again)


def check_decoder(name: str, data: bytes) -> None:
    """Checks a decoded message: valid, of bounded memory, and equal after a round trip."""
    decode = DECODERS[name][0]
    assert_decodes_or_refuses(decode, data)
    message = result_or_refusal(lambda: decode(data))
    if message is not None and name in _WRITERS:
        again = DECODERS[name][0](_WRITERS[name](message))
        assert_same(message, again)


def check_decompression(data: bytes) -> None:
    """Checks that the output of gzip and zlib is bounded."""
    whole = result_or_refusal(
        lambda: assert_allocates_below(PIECE + LIMIT, lambda: decompress(data))
    )
    assert whole is None or len(whole) <= LIMIT


def check_pieces(data: bytes) -> None:
    """Checks that a body is the same in any pieces. The first bytes of `data` seed the pieces."""
    draw, payload = random.Random(data[:4]), data[4:]
    coding = draw.choice(["identity", "gzip", "deflate", "GZIP ", "br"])
    at = draw.choice([None, 0, 8, 13])
    pieces = list(split(payload, draw))
    headers = [(b"content-encoding", coding.encode())]
    if draw.random() < 0.5:
        headers.append((b"content-length", str(len(payload)).encode()))
    limit = draw.choice([1, 10, len(payload), LIMIT])

    async def receive() -> dict[str, Any]:
        if not pieces:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def read() -> bytes | memoryview:
        request_record.begin(headers)
        scope = {"type": "http", "headers": headers, "method": "POST", "path": "/"}
        return await read_body(Request(scope, receive), limit, lambda _: at)

    whole = result_or_refusal(lambda: asyncio.run(read()))
    if whole is not None:
        assert len(whole) <= limit
        unpacked = result_or_refusal(lambda: decompress(payload, limit))
        assert coding == "identity" or (unpacked is not None and b"".join(unpacked) == whole)
        assert coding != "identity" or whole == payload


def split(whole: bytes, draw: random.Random) -> Iterator[bytes]:
    """Yields pieces of random sizes, some of them empty; none if the client disconnects."""
    if draw.random() < 0.5:
        yield b""
    while whole:
        size = draw.choice([0, 1, 7, 100, 5000])
        yield whole[:size]
        whole = whole[size:]


TARGETS: Final[dict[str, tuple[Callable[[bytes], None], list[str]]]] = {
    **{
        name: (lambda data, name=name: check_decoder(name, data), valid)  # type: ignore[misc]
        for name, (_, valid) in DECODERS.items()
    },
    "packed": (check_decompression, ["gzip", "deflate"]),
    "body": (check_pieces, ["lists", "gzip", "deflate"]),
}


def mutate(valid: bytes, draw: random.Random) -> bytes:
    """Returns the body with one to five changes: flipped bits, cuts, repetitions, insertions."""
    body = bytearray(valid)
    for _ in range(draw.randint(1, 5)):
        at = draw.randrange(len(body) + 1)
        match draw.randrange(5):
            case 0 if at < len(body):
                body[at] ^= 1 << draw.randrange(8)
            case 1:
                del body[at : at + draw.randint(1, 20)]
            case 2:
                body[at:at] = body[at : at + draw.randint(1, 40)] * draw.randint(1, 4)
            case 3:
                body[at : at + draw.choice([0, 0, 1, 8])] = draw.choice(SNIPPETS)
            case 4:
                body[at : at + 8] = draw.randrange(1 << 64).to_bytes(8, "little")
    return bytes(body[:_LONGEST])


def run_random(name: str, seconds: float, seed: int = 0) -> int:
    """Decodes randomly changed bodies, and changes of these; returns their number."""
    target, valid = TARGETS[name]
    draw, deadline, count = random.Random(seed), time.monotonic() + seconds, 0
    corpus = [b"seed" * (name == "body") + VALID_BODIES[v] for v in valid]
    while time.monotonic() < deadline:
        data = mutate(draw.choice(corpus), draw)
        try:
            target(data)
        except BaseException:
            file = Path(tempfile.gettempdir()) / f"fuzz-{name.replace(' ', '-')}"
            file.write_bytes(data)
            print(f"{name}: a fault after {count:,} bodies; the last one is in {file}", flush=True)
            raise
        count += 1
        if draw.random() < 0.001 and len(corpus) < 1000:
            corpus.append(data)
    return count


def run_guided(name: str, seconds: float, atheris: Any) -> None:
    """Runs atheris, which ends the process."""
    target, valid = TARGETS[name]
    with atheris.instrument_imports(include=["qkv"]):
        for module in _GUIDED:  # a module after those that it imports
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
    """Runs the command line; fuzzes each decoder in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="in total")
    parser.add_argument(
        "--random", action="store_true", help="random changes even if atheris is installed"
    )
    parser.add_argument("names", nargs="*", choices=[*TARGETS, []], help="decoders; default: all")
    options = parser.parse_args()
    names = options.names or list(TARGETS)
    seconds = options.minutes * 60 / len(names)
    if len(names) == 1:
        _fuzz(names[0], seconds, options.random)
        return
    failed = 0
    for name in names:
        words = [sys.executable, __file__, "--minutes", str(seconds / 60), name]
        words += ["--random"] * options.random
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
