"""One captured attention call: its tensors, and any variant run on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from qkv.client.client import Client
from qkv.client.results import Run
from qkv.errors import InvalidContent
from qkv.models.masks import is_self_attention, parts_of
from qkv.models.model_call import ModelCall, choose_numbers, select_heads
from qkv.models.variants import VariantSignature, variant_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from qkv.client.tokens import Tokens

_DRAWN_HEADS: Final = 16  # by default
_LONG: Final = 1024  # queries or keys, beyond which weights are pooled
_POOLED: Final = {"pool": 128}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AttentionCall(ModelCall):
    """A captured attention call: its record, and what is known after it. Tensors are on the CPU.

    Its other attributes are those of `ModelCall`: layer, query, key, value, mask, causal,
    query_offset, softcap, window, sinks, dropout and is_self.

    Attributes:
        index: the number of the call in its capture.
        output: (B, H, L, E), as the model computed it. It is random if the model dropped weights.
        scale: factor of the scores.
        heads: the numbers of the captured heads in the model.
        items: the numbers of the sequences in the model's batch.
    """

    index: int
    output: Tensor
    scale: float
    heads: tuple[int, ...]
    items: tuple[int, ...]

    def weights(
        self,
        form: str | Mapping[str, Any] = "full",
        *,
        variant: str = "softmax",
        client: Client | None = None,
        **parameters: Any,
    ) -> Any:
        """Computes the attention weights of a variant on this call.

        Args:
            form: "full", {"rows": [0, 5]}, {"pool": 64}, {"top_k": 8} or "stats".
            variant: its name; softmax has the weights that the model used.
            client: of a service that computes them; None: this process.
            **parameters: of the variant; they override those of the call.

        Returns:
            The weights (B, H, L, S), the rows (B, H, R, S) or the pool (B, H, P, Q). For top_k and
            stats a dictionary of tensors, as in `Run.outputs`.

        Raises:
            QkvError: the form or a parameter is invalid, or the variant cannot see what the call
                sees, such as a mask of its own.
        """
        run = self.run(variant, outputs=["weights"], weights=form, client=client, **parameters)
        is_array = form == "full" or (isinstance(form, Mapping) and "top_k" not in form)
        return run.weights if is_array else dict(run.outputs)

    def run(
        self,
        variant: str = "softmax",
        *,
        outputs: list[str] | None = None,
        weights: str | Mapping[str, Any] | None = None,
        client: Client | None = None,
        **parameters: Any,
    ) -> Run:
        """Runs a variant on this call, as `Client.attend` does.

        Args:
            variant: its name.
            outputs: the names of the outputs to return; None: output and weights.
            weights: the form of the weights.
            client: of a service; None: this process.
            **parameters: of the variant; they override those of the call.

        Raises:
            QkvError: as for `weights`.
        """
        arguments = VariantSignature.find(variant, client).arguments_of(self)
        return variant_run(
            variant, {**arguments, **parameters}, outputs=outputs, weights=weights, client=client
        )

    def figure(
        self,
        *,
        tokens: Tokens | None = None,
        key_tokens: Tokens | None = None,
        batch: int = 0,
        heads: Sequence[int] | None = None,
        variant: str = "softmax",
        weights: str | Mapping[str, Any] | None = None,
        shared_scale: bool = True,
        title: str | None = None,
        ax: Axes | None = None,
        client: Client | None = None,
        **parameters: Any,
    ) -> Figure:
        """Draws the weights of a sequence without its padding, a heat map for each head.

        Args:
            tokens: L strings that label the queries, padding included, or such a list for each
                sequence. They label the keys too if queries and keys are the same sequence.
            key_tokens: S strings that label the keys, or such a list for each sequence.
            batch: the number of the sequence in the call.
            heads: numbers of heads in the model; None: the first 16 captured.
            variant: its name; softmax has the weights that the model used.
            weights: form of the weights; None: "full", or {"pool": 128} for more than 1,024 keys or
                queries without tokens.
            shared_scale, title, ax: as for `Run.figure`; without a title, layer and variant.
            client: of a service that computes the weights; None: this process.
            **parameters: of the variant; they override those of the call.

        Raises:
            QkvError: as for `weights`, or there is no such sequence or head.
            ValueError, ModuleNotFoundError: as for `Run.figure`.
        """
        from qkv.client.figures.run_figure import draw_run  # needs matplotlib
        from qkv.client.tokens import choose_tokens

        some = self.heads[:_DRAWN_HEADS] if heads is None else heads
        chosen = choose_numbers("heads", some, self.heads, self.layer)
        single = _select(self, batch, chosen)
        parts = parts_of(single)
        if not parts:
            raise InvalidContent(f"sequence {batch} of {self.layer} is all padding")
        (part,) = parts
        B, _, L, _ = self.query.shape
        S = self.key.shape[2]
        if key_tokens is None and L == S and is_self_attention(self):
            key_tokens = tokens
        query_labels = choose_tokens("tokens", tokens, batch, B)
        key_labels = choose_tokens("key_tokens", key_tokens, batch, B)
        if weights is None:
            weights = _POOLED if tokens is None and max(L, S) > _LONG else "full"
        arguments = VariantSignature.find(variant, client).arguments(single, part)
        run = variant_run(
            variant,
            {**arguments, **parameters},
            outputs=["weights"],
            weights=weights,
            client=client,
        )
        return draw_run(
            run.outputs,
            run.form,
            subject=run.variant,
            tokens=_tokens_at("tokens", query_labels, part.queries, L),
            key_tokens=_tokens_at("key_tokens", key_labels, part.keys, S),
            heads=range(len(chosen)),
            head_names=chosen,
            shared_scale=shared_scale,
            title=_title(self.layer, variant, chosen) if title is None else title,
            ax=ax,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.query, self.key, self.value, self.output, self.mask, self.sinks)
        return sum(x.nbytes for x in tensors if x is not None)

    def __repr__(self) -> str:
        """Returns one line: layer and shapes."""
        B, H, L, D = self.query.shape
        S = self.key.shape[2]
        dtype = str(self.query.dtype).removeprefix("torch.")
        return f"AttentionCall({self.layer!r}, {B=}, {H=}, {L=}, {S=}, {D=}, {dtype})"


def _title(layer: str, variant: str, heads: tuple[int, ...]) -> str:
    """Returns the default title of a figure; it names the heads if they are not the first ones."""
    title = f"{layer}, {variant}"
    if heads == tuple(range(len(heads))):
        return title
    return f"{title}, heads {', '.join(map(str, heads))}"


def _select(call: AttentionCall, batch: int, heads: tuple[int, ...]) -> ModelCall:
    """Returns these heads of one sequence of a call.

    Raises:
        InvalidContent: the call has no such sequence.
    """
    B = len(call.query)
    if not B:
        raise InvalidContent(f"{call.layer} has no sequences: expected at least one to draw")
    if not 0 <= batch < B:
        raise InvalidContent(f"batch is invalid: got {batch}, expected 0 to {B - 1}")
    index = [call.heads.index(head) for head in heads]
    return select_heads(call, index, slice(batch, batch + 1))


def _tokens_at(
    name: str, tokens: Sequence[str] | None, positions: Tensor | None, length: int
) -> list[str] | None:
    """Returns the tokens at the positions that are no padding.

    Raises:
        InvalidContent: their number is not the length of the sequence.
    """
    if tokens is None:
        return None
    if len(tokens) != length:
        raise InvalidContent(
            f"{name} has the wrong length: got {len(tokens)}, expected {length}, with padding"
        )
    return list(tokens) if positions is None else [tokens[n] for n in positions.tolist()]
