"""Tests checkpoints in the playground, in Chromium: real files of small random models."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from playwright.sync_api import Page, expect
from safetensors import safe_open
from safetensors.torch import save_file

from qkv import Client
from support.accessibility import looks, problems
from support.browser import (
    Open,
    expect_shown,
    open_narrow,
    read_weights,
    record_slices,
    wait_until_drawn,
)
from support.javascript import Modules
from support.service import Server

ATOL: Final = 0.51e-4  # the table has four decimals
LLAMA: Final = "model.layers.{}.self_attn"
ROWS: Final = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small random models of transformers, saved as their users save them."""
    from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    gpt2 = GPT2Config(n_embd=128, n_head=4, n_layer=3, vocab_size=50, n_positions=32)
    GPT2Model(gpt2).save_pretrained(folder / "gpt2")
    llama = LlamaConfig(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=64, vocab_size=50, rope_parameters={"rope_theta": 500.0,
        "rope_type": "default"}, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(llama).to(torch.bfloat16).save_pretrained(folder / "llama")
    return folder


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as opened:
        yield opened


def choose(page: Page, *files: Path) -> None:
    """Chooses the files of a checkpoint and waits until its layers are listed."""
    page.locator("#checkpoint").set_input_files([str(file) for file in files])
    page.locator("#checkpoint-panel").wait_for()


def random_x(modules: Modules, width: int, dtype: str) -> torch.Tensor:
    """Returns the page's random hidden states."""
    data: list[int] = modules.evaluate(
        "(given) => [...hidden_states.createHiddenStates(...given).tensor.data]",
        [ROWS, width, dtype],
    )
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(ROWS, width)


def tensors_of(file: Path, prefix: str) -> dict[str, torch.Tensor]:
    with safe_open(file, framework="pt") as opened:
        names = [n for n in opened.keys() if n.startswith(f"{prefix}.")]  # noqa: SIM118
        return {name: opened.get_tensor(name) for name in names}


def shown(page: Page) -> np.ndarray[Any, Any]:
    return np.array(list(read_weights(page).values()))


def test_config_can_be_chosen_later_the_page_is_busy_at_once_and_a_checkpoint_closes(
    open_page: Open, server: Server, models: Path
) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    choose(page, models / "gpt2/model.safetensors")
    wait_until_drawn(opened)
    expect(page.get_by_label("causal", exact=True)).not_to_be_checked()
    page.locator("#config").set_input_files(str(models / "gpt2/config.json"))
    expect(page.locator("#layer-heads")).to_have_value("4/4")
    expect(page.locator("#status")).to_contain_text("4 heads")
    expect(page.get_by_label("causal", exact=True)).to_be_checked()
    for control in ("#parameter-causal", "#layer-positions", "#layer-layer"):
        wait_until_drawn(opened)
        busy = page.locator(control).evaluate(
            """(element) => {
                if (element.type === "checkbox") element.checked = true;
                else element.selectedIndex = 1;
                element.dispatchEvent(new Event("change"));
                return document.querySelector("main").getAttribute("aria-busy");
            }"""
        )
        assert busy == "true", control
    wait_until_drawn(opened)

    # an example or the button closes the checkpoint
    page.get_by_label("Example").select_option("layer")
    expect(page.locator("#checkpoint-panel")).to_be_hidden()
    expect(page.locator("#status")).to_contain_text(": 6 queries")
    choose(page, models / "gpt2/model.safetensors")
    wait_until_drawn(opened)
    page.get_by_role("button", name="Close the checkpoint").click()
    expect(page.locator("#checkpoint-panel")).to_be_hidden()
    expect(page.locator("#status")).to_contain_text(": 6 queries")


@pytest.mark.representative
def test_layer_of_gpt2_gives_the_weights_of_the_client(
    open_page: Open, server: Server, client: Client, models: Path, modules: Modules
) -> None:
    file = models / "gpt2/model.safetensors"
    opened = open_narrow(open_page, server.url)
    page = opened.page
    choose(page, file)
    expect(page.locator("#layer-layer option")).to_have_text([f"h.{i}.attn" for i in range(3)])
    expect(page.locator("#layer-positions")).to_have_value("none")
    page.locator("#layer-layer").select_option("h.2.attn")
    page.locator("#layer-heads").select_option("4/4")
    page.get_by_role("button", name="head 3").wait_for()
    page.get_by_role("button", name="head 3").click()
    wait_until_drawn(opened)
    page.get_by_label("causal", exact=True).check()
    wait_until_drawn(opened)
    run = client.attend(
        "softmax",
        x=random_x(modules, 128, "float32"),
        causal=True,
        layer={"layout": "gpt2", "heads": 4, "tensors": tensors_of(file, "h.2.attn")},
    )
    np.testing.assert_allclose(shown(page), run.weights[3], rtol=0, atol=ATOL)
    expect(page.locator("#output-about")).to_have_text("16 × 128")  # projected, heads merged


def test_config_sets_heads_positions_and_parameters_of_its_layer_alone(
    open_page: Open,
    server: Server,
    client: Client,
    models: Path,
    modules: Modules,
    tmp_path: Path,
) -> None:
    """A layer in bfloat16 with grouped heads; the page changes none of its bytes."""
    folder = models / "llama"
    opened = open_narrow(open_page, server.url)
    page = opened.page
    choose(page, folder / "model.safetensors", folder / "config.json")
    expect(page.locator("#layer-heads")).to_have_value("8/2")
    expect(page.locator("#layer-positions")).to_have_value("rotary")
    expect(page.locator("#layer-base")).to_have_value("500")
    expect(page.locator("#config-about")).to_have_text(
        "Applied: 8 heads, positions rotary, causal true."
    )
    expect(page.get_by_label("causal", exact=True)).to_be_checked()
    expect(page.locator("#status")).to_contain_text("8 heads")
    wait_until_drawn(opened)
    x, weights = random_x(modules, 64, "bfloat16"), {}
    for index in (0, 1):
        page.locator("#layer-layer").select_option(index=index)
        if index == 0:
            page.locator("#layer-order").select_option("interleaved")
        wait_until_drawn(opened)
        order = "interleaved" if index == 0 else "half"
        tensors = tensors_of(folder / "model.safetensors", LLAMA.format(index))
        layer = {
            "layout": "auto",
            "heads": 8,
            "kv_heads": 2,
            "rope": {"base": 500.0, "order": order},
            "tensors": tensors,
        }
        run = client.attend("softmax", x=x, causal=True, layer=layer)
        weights[index] = shown(page)
        np.testing.assert_allclose(weights[index], run.weights[0].float(), rtol=0, atol=ATOL)
    assert np.abs(weights[0] - weights[1]).max() > 0.01

    # parameters of the layer before do not stay
    config = json.loads((models / "llama/config.json").read_text())
    config |= {"model_type": "gemma2", "sliding_window": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    choose(page, models / "llama/model.safetensors", tmp_path / "config.json")
    expect(page.locator("#config-about")).to_contain_text("window [3,null]")
    wait_until_drawn(opened)
    page.locator("#layer-layer").select_option(index=1)
    expect(page.locator("#config-about")).not_to_contain_text("window")
    wait_until_drawn(opened)
    assert np.tril(shown(page), -4).any()  # a window of 4 would hide these


GEMMA3: Final = {
    "model_type": "gemma3_text",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8},
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
}
YARN: Final = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
LINEAR: Final = {"rope_type": "linear", "factor": 8}
READ: Final[list[tuple[dict[str, Any], int, str, dict[str, Any], dict[str, Any]]]] = [
    (GEMMA3, 0, "rotary", {"base": 1e4}, {"window": [511, None], "scale": 1 / 16}),
    (GEMMA3, 5, "rotary", {"base": 1e6, "scaling": LINEAR}, {"scale": 1 / 16}),
    ({"model_type": "gemma2", "sliding_window": 8}, 0, "rotary", {}, {"window": [7, None]}),
    ({"model_type": "gemma2", "sliding_window": 8}, 1, "rotary", {}, {}),
    ({"model_type": "qwen2", "sliding_window": 8}, 30, "rotary", {}, {}),
    ({"model_type": "cohere"}, 0, "rotary", {"order": "interleaved", "base": 5e5}, {}),
    (
        {"model_type": "cohere2", "sliding_window": 8, "rope_theta": 5e4},
        3,
        "none",
        {"order": "interleaved", "base": 5e4},
        {},
    ),
    (
        {"model_type": "glm4", "head_dim": 128},
        0,
        "rotary",
        {"order": "interleaved", "dims": 64},
        {},
    ),
    (
        {"model_type": "gptj", "rotary_dim": 32},
        0,
        "rotary",
        {"order": "interleaved", "dims": 32},
        {},
    ),
    ({"model_type": "smollm3"}, 2, "rotary", {"base": 2e6}, {}),
    ({"model_type": "smollm3"}, 3, "none", {"base": 2e6}, {}),
    ({"model_type": "gpt_neo"}, 0, "none", {}, {"scale": 1}),
    ({"model_type": "gpt_neo"}, 1, "none", {}, {"scale": 1, "window": [255, None]}),
    (
        {"model_type": "gpt_oss", "max_position_embeddings": 9, "rope_scaling": YARN},
        1,
        "rotary",
        {"base": 15e4, "scaling": YARN | {"original_max_position_embeddings": 9}},
        {},
    ),
    ({"model_type": "falcon", "alibi": True}, 0, "alibi", {}, {}),
]


READ_CONFIGS: Final = "cases => cases.map(([c, index]) => model_config.readConfig(c, index))"


def test_layers_of_known_models_are_read(modules: Modules) -> None:
    read = modules.evaluate(READ_CONFIGS, [case[:2] for case in READ])
    for (config, _, positions, rope, parameters), layer in zip(READ, read, strict=True):
        got = (layer["positions"], layer["rope"], layer["parameters"])
        assert got == (positions, rope, {"causal": True} | parameters), config
        assert layer["notes"] == []


def test_positions_of_other_models_are_not_guessed(modules: Modules) -> None:
    other = {"model_type": "codegen", "rope_theta": 1e4}
    (read,) = modules.evaluate(READ_CONFIGS, [[other, 0]])
    assert read.get("positions") is None
    assert read["notes"] == ["positions of codegen are not known: set them"]


def test_uploaded_hidden_states_replace_the_random_ones(
    open_page: Open, server: Server, client: Client, models: Path, tmp_path: Path
) -> None:
    """Its name is free, and its dtype becomes that of the layer."""
    file = models / "llama/model.safetensors"
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    np.save(tmp_path / "hidden.npy", x)
    opened = open_narrow(open_page, server.url)
    page = opened.page
    choose(page, file)
    wait_until_drawn(opened)
    expect(page.locator("#random-note")).to_contain_text("The hidden states x are random.")
    page.get_by_label("Upload").set_input_files(str(tmp_path / "hidden.npy"))
    expect(page.locator("#tensors .name")).to_have_text(["hidden"])
    expect(page.locator("#random-note")).to_be_hidden()
    expect(page.get_by_label("Role of hidden")).to_have_value("x")
    expect(page.locator("#status")).to_have_text(re.compile("5 queries, 5 keys"))
    page.locator("#layer-heads").select_option("8/2")
    expect(page.locator("#status")).to_contain_text("8 heads")
    wait_until_drawn(opened)
    layer = {
        "layout": "llama",
        "heads": 8,
        "rope": {},
        "tensors": tensors_of(file, LLAMA.format(0)),
    }
    run = client.attend("softmax", x=torch.from_numpy(x).bfloat16(), layer=layer)
    np.testing.assert_allclose(shown(page), run.weights[0].float(), rtol=0, atol=ATOL)
    page.get_by_role("button", name="Remove hidden").click()
    expect(page.locator("#tensors .needed .name")).to_have_text(["x"])
    page.locator("#layer-rows").fill("7")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text(re.compile("7 queries, 7 keys"))


def test_only_the_header_and_the_chosen_layer_are_read_of_chosen_dropped_and_sharded_files(
    open_page: Open, server: Server, models: Path, tmp_path: Path
) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    record_slices(page)
    file = models / "gpt2/model.safetensors"
    choose(page, file)
    wait_until_drawn(opened)
    header = struct.unpack("<Q", file.read_bytes()[:8])[0]
    layer = sum(t.nbytes for t in tensors_of(file, "h.0.attn").values() if t.ndim < 4)
    assert page.evaluate("() => window.slices.reduce((a, b) => a + b)") == 9 + header + layer
    expect(page.locator("#checkpoint-panel")).to_contain_text("Each run sends the layer: 258 KiB")

    # a dropped checkpoint is opened
    transfer = page.evaluate_handle(
        """bytes => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "model.safetensors"));
            return transfer;
        }""",
        list((models / "llama/model.safetensors").read_bytes()),
    )
    page.dispatch_event("#request-form", "drop", {"dataTransfer": transfer})
    expect(page.locator("#layer-layer option")).to_have_text([LLAMA.format(i) for i in range(2)])

    # shards are chosen together
    every = tensors_of(models / "llama/model.safetensors", "model")
    for shard in range(2):
        own = {name: t for i, (name, t) in enumerate(sorted(every.items())) if i % 2 == shard}
        save_file(own, tmp_path / f"model-{shard}.safetensors")
    choose(page, tmp_path / "model-0.safetensors", tmp_path / "model-1.safetensors")
    expect(page.locator("#checkpoint-panel")).to_contain_text("2 files")
    wait_until_drawn(opened)
    expect(page.locator("#layer-layer option")).to_have_count(2)
    expect(page.locator("#alert")).to_be_hidden()


def file_with(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def entry(*shape: int, dtype: str = "F32", size: int = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, size * int(np.prod(shape))]}


def header_of(**tensors: dict[str, Any]) -> bytes:
    return json.dumps(tensors).encode()


def wrong_files() -> dict[str, tuple[str, bytes, str]]:
    """Returns the name, the content and the message of files that cannot be read."""
    return {
        "pickle": (
            "model.pt",
            b"PK\x03\x04" + bytes(99),
            "torch.load('model.pt', weights_only=True, map",
        ),
        "text": ("a.safetensors", b"hello, world", "this is not a safetensors file"),
        "short": ("a.safetensors", b"12", "this is not a safetensors file"),
        "empty": ("a.safetensors", b"", "this is not a safetensors file"),
        "long header": (
            "a.safetensors",
            struct.pack("<Q", 100_000_001) + b"{}",
            "the format allows 100000000",
        ),
        "large header": (
            "a.safetensors",
            file_with(header_of(a=entry(1)).ljust(17 * 2**20), bytes(4)),
            "takes 17 MiB, and this page reads at most 16 MiB: save the attention layers",
        ),
        "many tensors": (
            "a.safetensors",
            file_with(json.dumps({f"{i}": entry(0) for i in range(65537)}).encode()),
            "there are 65537 tensors, and this page reads 65536: save the attention layers",
        ),
        "cut header": (
            "a.safetensors",
            struct.pack("<Q", 99) + b"{}",
            "is cut off inside its header",
        ),
        "cut data": ("a.safetensors", file_with(header_of(a=entry(8, 8))), "or cut off"),
        "no JSON": (
            "a.safetensors",
            file_with(b"{nope}"),
            "the header of this .safetensors is not",
        ),
        "wrong entry": (
            "a.safetensors",
            file_with(b'{"a": 1}'),
            'tensor "a" has the wrong fields',
        ),
        "no layers": (
            "a.safetensors",
            file_with(header_of(a=entry(2)), bytes(8)),
            'No attention layers found among 1 tensors, such as "a"',
        ),
        "no tensors": ("a.safetensors", file_with(b"{}"), "has no tensors"),
        "index": ("model.safetensors.index.json", b"{}", "choose the .safetensors files beside it"),
        "config": ("config.json", b'{"model_type": "gpt2"}', "choose the .safetensors file too"),
        "other JSON": ("config.json", b'{"a": 1}', "no configuration of a model"),
    }


def test_wrong_file_has_a_readable_message_and_wrong_heads_one_beside_the_field(
    open_page: Open, server: Server, models: Path, tmp_path: Path
) -> None:
    opened = open_narrow(open_page, server.url)
    opened.expect_status(422)
    page = opened.page
    for kind, (name, content, message) in wrong_files().items():
        folder = tmp_path / kind
        folder.mkdir()
        (folder / name).write_bytes(content)
        page.locator("#checkpoint").set_input_files(str(folder / name))
        expect_shown(page.locator("#inputs-error"), message)
        expect(page.locator("#checkpoint-panel")).to_be_hidden()
    expect(page.get_by_label("Example")).to_have_value("words")
    at, tensors = 0, {}  # a quantized layer
    for name in "qkvo":
        offsets = {"data_offsets": [at, at + 64 * 64]}
        tensors[f"a.{name}_proj.weight"] = entry(64, 64, dtype="F8_E4M3", size=1) | offsets
        at += 64 * 64
    (tmp_path / "a.safetensors").write_bytes(file_with(json.dumps(tensors).encode(), bytes(at)))
    page.locator("#checkpoint").set_input_files(str(tmp_path / "a.safetensors"))
    expect_shown(page.locator("#alert"), "is F8_E4M3, a quantized dtype")

    choose(page, models / "llama/model.safetensors")
    expect(page.locator("#layer-layer option")).to_have_text([LLAMA.format(i) for i in range(2)])
    wait_until_drawn(opened)
    page.locator("#layer-heads").select_option("other")
    page.get_by_label("Query heads").fill("")
    page.keyboard.press("Enter")
    expect_shown(page.locator("#alert"), "Query heads is missing")
    page.get_by_label("Query heads").fill("7")
    page.keyboard.press("Enter")
    expect(page.locator("#checkpoint-panel .wrong")).to_contain_text("multiple of heads=7")
    page.get_by_label("Query heads").fill("16")
    page.get_by_label("Key heads").fill("4")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("16 heads")
    expect(page.locator("#alert")).to_be_hidden()


def test_ambiguous_layout_is_a_choice(open_page: Open, server: Server, tmp_path: Path) -> None:
    torch.manual_seed(1)
    name = "h.0.self_attention"
    tensors = {
        f"{name}.query_key_value.weight": torch.randn(192, 64),
        f"{name}.dense.weight": torch.randn(64, 64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    opened = open_page(server.url)
    opened.expect_status(422)  # linear attention takes no ALiBi, and the page compares with it
    page = wait_until_drawn(opened)
    choose(page, tmp_path / "model.safetensors")
    page.get_by_label("Layout", exact=True).wait_for()
    wait_until_drawn(opened)
    page.locator("#layer-heads").select_option("4/4")
    page.get_by_label("Layout", exact=True).select_option("falcon")
    expect(page.locator("#layer-positions")).to_have_value("rotary")
    expect(page.locator("#layer-heads")).to_have_value("4/4")
    wait_until_drawn(opened)
    expect(page.locator("#alert")).to_be_hidden()
    config = {"model_type": "falcon", "alibi": True, "num_attention_heads": 4, "multi_query": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    page.locator("#config").set_input_files(str(tmp_path / "config.json"))
    expect(page.locator("#layer-positions")).to_have_value("alibi")
    wait_until_drawn(opened)
    expect(page.locator("#status")).to_contain_text("4 heads")
    expect(page.locator("#alert")).to_be_hidden()


def test_layer_above_the_limit_of_a_body_is_not_sent(
    open_page: Open, serve: Any, models: Path
) -> None:
    served = serve(max_body_bytes=100_000)
    opened = open_page(served.url)
    page = wait_until_drawn(opened)
    sent = len(opened.bodies)
    page.locator("#checkpoint").set_input_files(str(models / "gpt2/model.safetensors"))
    expect_shown(
        page.locator("#alert"),
        "takes 258 KiB, and the service accepts 97.7 KiB: start it with a larger",
    )
    page.wait_for_load_state("networkidle")
    assert [path for path, _ in opened.bodies[sent:]] == ["/v1/layers"]
    page.get_by_label("Example").select_option("words")
    expect(page.locator("#alert")).to_be_hidden()
    expect(page.locator("#checkpoint-panel")).to_be_hidden()


def test_code_of_a_layer_gives_the_same_weights(
    open_page: Open, server: Server, models: Path, tmp_path: Path
) -> None:
    opened = open_narrow(open_page, server.url, path="/#open=request")
    page = opened.page
    folder = models / "llama"
    choose(page, folder / "model.safetensors", folder / "config.json")
    expect(page.locator("#status")).to_contain_text("8 heads")
    wait_until_drawn(opened)
    panel = page.locator("#request")
    panel.get_by_label("Code for").select_option("weights")
    with page.expect_download() as download:
        panel.get_by_role("button", name="Save request.safetensors").click()
    download.value.save_as(tmp_path / "request.safetensors")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    codes = {}
    for kind in ("curl", "Python"):
        panel.get_by_role("button", name=kind, exact=True).click()
        panel.get_by_role("button", name="Copy", exact=True).click()
        codes[kind] = page.evaluate("() => navigator.clipboard.readText()")
    response = json.loads(done(["bash", "-c", codes["curl"]], tmp_path))
    assert response["weights_are"] == "stochastic"
    saved = codes["Python"] + '\nprint("first", *run.weights[0].astype("float64").flat)\n'
    line = done([sys.executable, "-c", saved], tmp_path).rpartition("first ")[2]
    weights = np.array(line.split(), np.float64).reshape(ROWS, ROWS)
    np.testing.assert_allclose(shown(page), weights, rtol=0, atol=ATOL)


def done(command: list[str], folder: Path) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_section_has_no_axe_violation_and_no_overflow(
    open_page: Open, server: Server, models: Path
) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    choose(page, models / "llama/model.safetensors", models / "llama/config.json")
    wait_until_drawn(opened)
    page.locator("#layer-heads").select_option("other")
    wait_until_drawn(opened)
    for look in looks(page):
        assert problems(page) == [], look
