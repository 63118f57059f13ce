"""One captured attention call: its tensors, and any variant run on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from qkv.client.client import Client
from qkv.client.results import Run
from qkv.models.model_call import ModelCall
from qkv.models.variant_signature import VariantSignature, variant_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from qkv.client.figures.tokens import Tokens

__all__ = ["AttentionCall"]


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
        from qkv.models.call_figure import draw_call  # needs matplotlib

        return draw_call(
            self, self.heads, tokens=tokens, key_tokens=key_tokens, batch=batch, heads=heads,
            variant=variant, weights=weights, shared_scale=shared_scale, title=title, ax=ax,
            client=client, parameters=parameters,
        )  # fmt: skip

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
