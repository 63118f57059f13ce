"""Measures the effect of substituted heads of all-MiniLM-L6-v2 on the embeddings of sentences."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

import qkv
from support import minilm

__all__ = ["Effect", "Embedder", "Head", "Task", "effect_of", "measure_effects", "spearman"]

_BATCH: Final = 6  # sentences of similar length, so that there is little padding

Head = tuple[int, int]
"""The number of a layer, and of a head in it."""


class Task(NamedTuple):
    """Heads to substitute at once.

    Attributes:
        choice: the variant, as `qkv.substitute` takes it.
        heads: of the model.
    """

    choice: Mapping[str, Any]
    heads: tuple[Head, ...]

    @property
    def substitutes(self) -> dict[str, Any]:
        """The argument of `qkv.substitute`."""
        by_layer: dict[int, list[int]] = {}
        for layer, head in sorted(self.heads):
            by_layer.setdefault(layer, []).append(head)
        return {f"encoder.layer.{n}": {**self.choice, "heads": h} for n, h in by_layer.items()}


class Effect(NamedTuple):
    """The effect of a task on the embeddings of all sentences, compared with the model's own.

    Attributes:
        mean_cosine, worst_cosine: of the cosine similarities of each sentence to itself.
        rank_correlation: Spearman's, of the similarities of all pairs of sentences.
        same_neighbours: the share of sentences that have the same nearest sentence.
    """

    mean_cosine: float
    worst_cosine: float
    rank_correlation: float
    same_neighbours: float


class Embedder:
    """The model and its batches of sentences, which have padding.

    Args:
        sentences: at least three.
    """

    def __init__(self, sentences: Sequence[str]) -> None:
        torch.set_num_threads(1)
        self.model: Any = deepcopy(minilm.bert())
        self.model.set_attn_implementation("sdpa")
        tokenizer = minilm.tokenizer()
        self.tokens = [len(tokenizer(sentence)["input_ids"]) for sentence in sentences]
        order = sorted(range(len(sentences)), key=lambda n: self.tokens[n])
        self._parts = [order[n : n + _BATCH] for n in range(0, len(order), _BATCH)]
        self.batches: list[Any] = [
            tokenizer([sentences[n] for n in part], padding=True, return_tensors="pt")
            for part in self._parts
        ]

    def embed(self) -> Tensor:
        """Returns the embeddings (N, M) of norm 1: means of the last hidden states."""
        found: dict[int, Tensor] = {}
        for part, batch in zip(self._parts, self.batches, strict=True):
            with torch.no_grad():
                last_BLM = self.model(**batch).last_hidden_state
            is_token_BL1 = batch["attention_mask"][..., None]
            mean_BM = (last_BLM * is_token_BL1).sum(1) / is_token_BL1.sum(1)
            found |= zip(part, mean_BM, strict=True)
        return normalize(torch.stack([found[n] for n in sorted(found)]).double(), dim=-1)

    def embed_with(self, task: Task) -> Tensor:
        """Returns the embeddings (N, M) of the model with a task's substitutes."""
        with qkv.substitute(self.model, task.substitutes):
            return self.embed()


def effect_of(own_NM: Tensor, changed_NM: Tensor) -> Effect:
    """Returns the effect, from embeddings of norm 1."""
    cosine_N = (own_NM * changed_NM).sum(-1)
    own_NN, changed_NN = own_NM @ own_NM.T, changed_NM @ changed_NM.T
    pairs = torch.triu_indices(len(own_NM), len(own_NM), offset=1).unbind()
    neighbours = [x.clone().fill_diagonal_(-2).argmax(-1) for x in (own_NN, changed_NN)]
    return Effect(
        float(cosine_N.mean()),
        float(cosine_N.min()),
        spearman(own_NN[pairs].tolist(), changed_NN[pairs].tolist()),
        float((neighbours[0] == neighbours[1]).double().mean()),
    )


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns Spearman's rank correlation of numbers of which no two are equal."""
    ranks = [
        torch.tensor(each, dtype=torch.float64).argsort().argsort().double() for each in (x, y)
    ]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def measure_effects(
    sentences: Sequence[str], tasks: Sequence[Task], processes: int = 1
) -> list[Effect]:
    """Returns the effect of each task.

    Args:
        sentences: to embed.
        tasks: in any order.
        processes: that share the tasks, with one thread each.
    """
    if processes > 1:
        shares = [tasks[n::processes] for n in range(processes)]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            found = list(pool.map(measure_effects, [sentences] * processes, shares))
        return [found[n % processes][n // processes] for n in range(len(tasks))]
    embedder = Embedder(sentences)
    own_NM = embedder.embed()
    return [effect_of(own_NM, embedder.embed_with(task)) for task in tasks]
