"""Gradients over HTTP: every variant, layers of both layouts, every format.

The reference is torch's autograd in float64."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn.functional import linear as dense

from qkv import AsyncClient, Client, QkvError
from qkv.attention.catalogue import variants
from qkv.attention.signature import fixed_size
from qkv.attention.variant import Variant
from qkv.cli.main import main
from support.known_requests import EPS, FLOATING, assert_problem
from support.service import Server

PATH: Final = "/v1/gradients/softmax"
SIZES: Final = {"B": 2, "H": 4, "G": 2, "J": 4, "V": 2, "L": 5, "S": 5, "D": 3, "E": 3}
with_gradients = pytest.mark.parametrize(
    "variant", [v for v in variants().values() if v.backward], ids=lambda v: v.name
)


@pytest.fixture
def client(server: Server) -> Any:
    with Client(server.url) as client:
        yield client


def inputs_of(variant: Variant, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Returns random required inputs, and the gradient of the output."""
    inputs = {
        i.name: torch.randn([fixed_size(x) or SIZES.get(x, 7) for x in i.letters]).to(dtype)
        for i in variant.inputs.values()
        if not i.is_optional
    }
    output = variant.attend(
        **{variant.inputs[n].argument: x for n, x in inputs.items()}, outputs=frozenset({"output"})
    ).output
    return inputs | {"grad_output": torch.randn(output.shape).to(dtype)}


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    """Softmax attention in torch operations; query head h uses key head h // (H / G)."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return torch.softmax(scores, -1) @ value


def split(x_BNX: Tensor, heads: int) -> Tensor:
    split_BHNX: Tensor = x_BNX.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split_BHNX


def assert_gradients(
    found: Mapping[str, Any], output: Tensor, grad_output: Tensor, of: Mapping[str, Tensor]
) -> None:
    """Asserts gradients of autograd, up to rounding errors of the largest in float64.

    A key's bias cancels in a softmax; its gradient consists of rounding errors.
    """
    expected = torch.autograd.grad(output, list(of.values()), grad_output)
    assert found.keys() == of.keys()
    close = 1000 * EPS["float64"] * max(float(gradient.abs().max()) for gradient in expected)
    for (name, tensor), gradient in zip(of.items(), expected, strict=True):
        assert found[name].shape == tensor.shape
        torch.testing.assert_close(torch.as_tensor(found[name]), gradient, rtol=0, atol=close)


@pytest.mark.slow
@with_gradients
@pytest.mark.parametrize("dtype", FLOATING)
def test_gradient_has_the_dtype_of_its_input(client: Client, variant: Variant, dtype: str) -> None:
    inputs = inputs_of(variant, getattr(torch, dtype))
    found = client.gradients(variant.name, **inputs)
    wide = client.gradients(variant.name, **{n: x.double() for n, x in inputs.items()})
    for name, gradient in found.gradients.items():
        assert gradient.dtype == inputs[name].dtype
        scale = float(wide[name].abs().max())
        close = EPS[dtype] * scale + 100 * EPS["float32" if dtype != "float64" else dtype] * scale
        torch.testing.assert_close(gradient.double(), wide[name], rtol=0, atol=close)


def test_gradients_of_seed_004(client: Client) -> None:
    """x, Wq, Wk and Wv of the layer in the seed: B=2, N=3, D=4."""
    x, *weights = (
        torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True),
        *(torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)),
    )
    tensors = dict(zip(("W_query", "W_key", "W_value"), weights, strict=True))
    grad = torch.randn(2, 3, 4, dtype=torch.float64)
    plain = {n: t.detach() for n, t in tensors.items()}
    found = client.gradients(
        "softmax", x=x.detach(), grad_output=grad, layer={"layout": "v1", "tensors": plain}
    )
    query, key, value = ((x @ w)[:, None] for w in weights)
    assert_gradients(found.gradients, attention(query, key, value)[:, 0], grad, {"x": x} | tensors)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_gradients_through_a_layer_with_heads_and_biases(
    client: Client, causal: bool, separate: bool
) -> None:
    """Four query heads over two key heads; one embedding, or one for each role."""
    roles, widths = ("query", "key", "value"), (12, 6, 10)
    names = roles if separate else ("x",)
    lengths = (4, 6, 6) if separate else (5,)
    embeddings: dict[str, Any] = {
        n: torch.randn(2, size, 7, dtype=torch.float64, requires_grad=True)
        for n, size in zip(names, lengths, strict=True)
    }
    tensors: dict[str, Any] = {}
    for role, width in zip(roles, widths, strict=True):
        tensors[f"W_{role}.weight"] = torch.randn(width, 7, dtype=torch.float64)
        tensors[f"W_{role}.bias"] = torch.randn(width, dtype=torch.float64)
    for tensor in tensors.values():
        tensor.requires_grad_()
    grad = torch.randn(2, lengths[0], 20, dtype=torch.float64)
    found = client.gradients(
        "softmax",
        grad_output=grad,
        layer={"layout": "v2", "heads": 4, "tensors": {n: t.detach() for n, t in tensors.items()}},
        causal=causal,
        **{n: x.detach() for n, x in embeddings.items()},
    )
    query, key, value = (
        split(
            dense(
                embeddings.get("x", embeddings.get(role)),  # type: ignore[arg-type]
                tensors[f"W_{role}.weight"],
                tensors[f"W_{role}.bias"],
            ),
            heads,
        )
        for role, heads in zip(roles, (4, 2, 2), strict=True)
    )
    output = attention(query, key, value, causal).transpose(1, 2).flatten(2)
    assert_gradients(found.gradients, output, grad, embeddings | tensors)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_gradient_has_the_rank_of_its_input(client: Client, rank: int) -> None:
    shape = (2, 3, 4, 5)[4 - rank :]
    tensors: dict[str, Any] = {
        n: torch.randn(shape, dtype=torch.float64) for n in ("query", "key", "value")
    }
    grad = torch.randn(shape, dtype=torch.float64)
    found = client.gradients("softmax", grad_output=grad, **tensors)
    for tensor in tensors.values():
        tensor.requires_grad_()
    whole = [t.view((1,) * (4 - rank) + shape) for t in tensors.values()]
    output = attention(*whole).view(shape)
    assert_gradients(found.gradients, output, grad, tensors)


def test_floating_mask_has_a_gradient_and_key_lengths_have_none(client: Client) -> None:
    tensors: dict[str, Any] = {
        n: torch.randn(2, 1, 4, 5, dtype=torch.float64) for n in ("query", "key", "value")
    }
    mask = torch.randn(4, 4, dtype=torch.float32)
    lengths = torch.tensor([4, 2])
    grad = torch.randn(2, 1, 4, 5, dtype=torch.float64)
    found = client.gradients("softmax", grad_output=grad, mask=mask, key_lengths=lengths, **tensors)
    assert found.gradients.keys() == {"query", "key", "value", "mask"}
    assert found["mask"].shape == (4, 4)
    assert found["mask"].dtype == torch.float32
    assert not found["key"][1, :, 2:].any()
    booleans = client.gradients("softmax", grad_output=grad, mask=mask > 0, **tensors)
    assert booleans.gradients.keys() == {"query", "key", "value"}


def test_every_format_gives_the_same_gradients(server: Server) -> None:
    inputs = {
        "query": [[1, 0], [0, 1]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]],
        "grad_output": [[1, -2], [3, 0]],
    }  # fmt: skip
    lists = server.http.post(PATH, json={"inputs": inputs}).json()
    arrays: dict[str, Any] = {n: np.array(v, np.float32) for n, v in inputs.items()}
    with Client(server.url) as client:
        exact = client.gradients("softmax", **arrays)
    for name, gradient in lists["gradients"].items():
        assert np.array_equal(np.array(gradient, np.float32), exact[name])
        assert isinstance(exact[name], np.ndarray)
    packed = server.http.post(PATH, json={"inputs": inputs, "encoding": "base64"}).json()
    assert packed["gradients"]["query"]["dtype"] == "float32"
    assert set(lists) == set(packed) == {"variant", "gradients", "timing"}
    assert "total;dur=" in server.http.post(PATH, json={"inputs": inputs}).headers["server-timing"]


def test_async_client_and_local_run_give_the_same_bits(server: Server, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        n: np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
        for n in ("query", "key", "value", "grad_output")
    }

    async def ask() -> Any:
        async with AsyncClient(server.url) as client:
            return await client.gradients("softmax", causal=True, **arrays)

    found = asyncio.run(ask())
    np.savez(tmp_path / "in.npz", **arrays)
    for more in (["--local"], ["--url", server.url]):
        done = CliRunner().invoke(
            main,
            ["gradients", "softmax", str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz"),
             "-p", "causal=true", *more],
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert "closed form" in done.output
        with np.load(tmp_path / "out.npz") as written:
            assert set(written) == {"query", "key", "value"}
            assert all(np.array_equal(written[n], found[n]) for n in written)


GOOD: Final = {"query": [[1, 0]], "key": [[1, 0]], "value": [[1, 2]], "grad_output": [[1, 2]]}


@pytest.mark.parametrize(
    ("body", "pointer", "words"),
    [
        ({"inputs": GOOD | {"grad_output": [[1, 2, 3]]}}, "/inputs/grad_output", "[1, 3]"),
        ({"inputs": GOOD | {"grad_output": [1, 2]}}, "/inputs/grad_output", "[1, 2]"),
        (
            {"inputs": GOOD | {"grad_output": {"dtype": "int64", "shape": [0], "data": ""}}},
            "/inputs/grad_output", "int64",
        ),
        (
            {"inputs": GOOD | {"grad_output": {"dtype": "float16", "shape": [1, 2],
                                               "data": "AAAAAA=="}}},
            "/inputs/grad_output", "float16",
        ),
        (
            {"inputs": {n: v for n, v in GOOD.items() if n != "grad_output"}},
            "/inputs", "need grad_output",
        ),
        ({"inputs": {n: v for n, v in GOOD.items() if n != "key"}}, "/inputs", "key"),
        ({"inputs": GOOD, "outputs": ["output"]}, "/outputs", "outputs"),
        ({"inputs": GOOD, "weights": "none"}, "/weights", "weights"),
        ({"inputs": GOOD, "layer": "mine"}, "/layer", "mine"),
    ],
)  # fmt: skip
def test_error_names_the_invalid_field(
    server: Server, body: dict[str, Any], pointer: str, words: str
) -> None:
    problem = assert_problem(server.http.post(PATH, json=body), 422, body)
    assert problem["pointer"] == pointer
    assert words in problem["detail"]


def test_unknown_variant_is_404(server: Server, client: Client) -> None:
    assert (
        "sotfmax"
        in assert_problem(server.http.post("/v1/gradients/sotfmax", json={}), 404)["detail"]
    )
    with pytest.raises(QkvError) as caught:
        client.gradients("so/ft?max", **inputs_of(variants()["softmax"]))
    assert caught.value.status == 404


def test_limits_hold_for_gradients(serve: Any) -> None:
    server = serve(max_response_bytes=100)
    wide = {n: [[0.0] * 20] for n in GOOD}
    assert "bytes" in assert_problem(server.http.post(PATH, json={"inputs": wide}), 413)["detail"]


def test_gradients_are_not_counted_as_inferences(serve: Any) -> None:
    """Statistics of the Open Inference Protocol count runs only."""
    server = serve()
    for path, times in ((PATH, 3), ("/v1/attention/softmax", 2)):
        inputs = GOOD if path == PATH else {n: v for n, v in GOOD.items() if n != "grad_output"}
        for _ in range(times):
            assert server.http.post(path, json={"inputs": inputs}).status_code == 200
    (stats,) = server.http.get("/v2/models/softmax/stats").json()["model_stats"]
    assert stats["inference_count"] == 2
