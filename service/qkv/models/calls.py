"""The attention calls of a captured model."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self, overload

from torch import Tensor

from qkv.client.client import Client
from qkv.client.request_builders import Choice
from qkv.client.tokens import Tokens
from qkv.errors import InvalidContent
from qkv.models.attention_call import AttentionCall
from qkv.models.call_files import load_file, save_file
from qkv.models.comparison import PieceResults, compare_calls
from qkv.models.head_comparison import HeadComparison
from qkv.models.model_call import Missed
from qkv.models.received import Received, received_mass
from qkv.models.rollout import rollout_of
from qkv.models.selection import choose_calls


class Calls(Sequence[AttentionCall]):
    """The captured calls of a model, in order.

    Attributes:
        missed: layers whose attention was not captured, with the reason.
        tokens: of each sequence without padding, by its number in the model's batch; empty unless
            the calls are from a file that has them.
    """

    def __init__(self) -> None:
        self._calls: list[AttentionCall] = []
        self.missed: list[Missed] = []
        self.tokens: dict[int, list[str]] = {}
        self._unfinished: dict[str, PieceResults] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Returns the calls of a file, as `qkv.load_calls` does."""
        calls = cls()
        calls._calls, calls.missed, calls.tokens = load_file(path)
        return calls

    @overload
    def __getitem__(self, index: int) -> AttentionCall: ...
    @overload
    def __getitem__(self, index: slice) -> list[AttentionCall]: ...
    def __getitem__(self, index: int | slice) -> AttentionCall | list[AttentionCall]:
        """Returns a call, or several."""
        return self._calls[index]

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[AttentionCall]:
        return iter(self._calls)

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in the order of their first calls."""
        return list(dict.fromkeys(call.layer for call in self._calls))

    def of_layer(self, layer: str) -> list[AttentionCall]:
        """Returns the calls of a layer."""
        return [call for call in self._calls if call.layer == layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; a tensor that calls share counts once."""
        tensors = {
            id(x): x
            for c in self._calls
            for x in (c.query, c.key, c.value, c.output, c.mask, c.sinks)
            if x is not None
        }
        return sum(x.nbytes for x in tensors.values())

    def append(self, call: AttentionCall) -> None:
        """Adds a call."""
        self._calls.append(call)

    def compare(
        self,
        variants: Sequence[Choice],
        *,
        anchor: Choice = "softmax",
        rows: int | None = 1024,
        client: Client | None = None,
        progress: bool = True,
        **parameters: Any,
    ) -> HeadComparison:
        """Compares variants with a baseline in each head of each layer.

        Each sequence is compared without its padding, on the mask, scale, window and sinks of its
        call. Memory holds a few sequences or heads at a time. If a connection breaks, the error is
        raised; the same call later continues at the heads that are missing.

        Args:
            variants: names, or objects such as {"variant": "taylor", "parameters": {...}}.
            anchor: the baseline, a variant like the others.
            rows: rows of each head's weights that are compared, evenly spread; None: all.
            client: of a service that compares; None: this process.
            progress: True shows a progress bar in a terminal or a notebook.
            **parameters: for the baseline and all variants that take them. They override those of
                the calls; a variant's own parameters override them.

        Returns:
            A row for each layer, head and variant, and the layers that were missed. A variant that
            cannot see what the queries of a layer see has rows with a problem.

        Raises:
            QkvError: a variant or a parameter does not exist, or the service rejects all requests.
            ServiceUnreachable: no service accepts connections at the address.
            httpx.TransportError: the connection broke or timed out.
        """
        if rows is not None and (type(rows) is not int or rows < 0):
            raise InvalidContent(f"rows is invalid: got {rows!r:.60}, expected 0 or more, or None")
        return compare_calls(
            self._calls, self._unfinished, variants, anchor=anchor, rows=rows, client=client,
            progress=progress, parameters=parameters, missed=self.missed,
        )  # fmt: skip

    def rollout(
        self,
        *,
        rows: Sequence[int] | None = None,
        items: Sequence[int] | None = None,
        layers: Collection[str] | None = None,
        calls: Sequence[int] | None = None,
        residual: float = 0.5,
        heads: str = "mean",
        variant: str = "softmax",
        client: Client | None = None,
        **parameters: Any,
    ) -> Tensor:
        """Multiplies the attention of all layers: from which tokens a position collects its input.

        Each layer counts as r I + (1 - r) A, with rows that are divided by their sums (Abnar and
        Zuidema, Quantifying Attention Flow in Transformers, arXiv:2005.00928, section 3). A is the
        mean of the captured heads. Attention weights are no explanation by themselves (Jain and
        Wallace, Attention is not Explanation, arXiv:1902.10186).

        Memory holds the result, two more copies of a sequence's rows, and a block of weights.

        Args:
            rows: positions in the last layer; None: all.
            items: numbers of the sequences in the model's batch; None: all.
            layers: names of layers of self-attention, or of modules around them; None: all.
            calls: the numbers of the calls of one forward pass, in order; None: all. They are
                needed if a layer was called more than once.
            residual: r, the share of the residual connection, from 0 to 1.
            heads: "mean", "max" or "min" over the heads.
            variant: its name; softmax has the weights that the model used.
            client: of a service that computes the weights; None: this process.
            **parameters: of the variant; they override those of the calls.

        Returns:
            The rollout (B, R, S): each row sums to 1. Rows and columns of padding are zero.

        Raises:
            InvalidContent: the calls are no chain of self-attention, or an argument is invalid.
            QkvError: as for `AttentionCall.weights`.
        """
        chain = choose_calls(self._calls, self.missed, layers, calls, items)
        return rollout_of(
            chain, rows=rows, items=items, residual=residual, heads=heads, variant=variant,
            client=client, parameters=parameters,
        )  # fmt: skip

    def received(
        self,
        *,
        items: Sequence[int] | None = None,
        layers: Collection[str] | None = None,
        calls: Sequence[int] | None = None,
        variant: str = "softmax",
        client: Client | None = None,
        **parameters: Any,
    ) -> Received:
        """Computes the mass that each key receives, the mean of its weights over the queries.

        Memory does not grow with the square of the length. Attention weights are no explanation by
        themselves (Jain and Wallace, Attention is not Explanation, arXiv:1902.10186).

        Args:
            items: selects the calls that have these sequences; None: all calls.
            layers: names of layers, or of modules around them; None: all.
            calls: the numbers of the calls, one of each layer; None: all.
            variant, client, **parameters: as for `rollout`.

        Returns:
            A mapping from each layer to its (B, H, S). Padding receives 0.

        Raises:
            InvalidContent: a layer was called more than once, or there is no such layer.
            QkvError: as for `AttentionCall.weights`.
        """
        chosen = choose_calls(self._calls, (), layers, calls, items)
        return received_mass(chosen, variant, client, parameters)

    def save(self, path: str | os.PathLike[str], tokens: Tokens | None = None) -> None:
        """Writes the calls to a .safetensors file, which `qkv.load_calls` and the playground read.

        Each group of sequences with the same padding becomes one call without padding.

        Args:
            path: the file; an existing file is replaced.
            tokens: a string for each position, padding included, or such a list for each sequence
                of the model's batch; None: those of the file that the calls are from. The
                playground labels its maps with them.

        Raises:
            InvalidContent: the suffix is another one, or a tensor has a dtype of no file.
            ValueError: the tokens do not fit the calls.
            OSError: the file cannot be written.
        """
        save_file(path, self._calls, self.missed, self.tokens if tokens is None else tokens)

    def __repr__(self) -> str:
        """Returns one line: the number of calls and layers, and of missed layers."""
        missed = f", {len(self.missed)} missed" if self.missed else ""
        return f"Calls({len(self)} calls of {len(self.layers)} layers{missed})"
