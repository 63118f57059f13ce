"""The results of a run, of a request for gradients and of a conversion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qkv.client.notebook import picture
from qkv.client.tables import Table
from qkv.errors import InvalidContent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from qkv.client.tokens import Tokens


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """The result of a run. A notebook shows the weights as one heat map per head.

    Attributes:
        variant: its name.
        outputs: arrays by name, of the same kind as the inputs.
        timing: milliseconds by stage, batch size, device, backend, flops, bytes.
        weights_are: "stochastic" (no weight is negative, and each row sums to 1, or to 0 if its
            query sees no key), "signed" or "unnormalised"; None if there are no weights.
        form: the requested form of the weights: "full", "none", "stats", {"rows": [...]},
            {"top_k": k} or {"pool": bins}.
        notes: what a loaded layer has and the variant lacks, and facts that make the numbers less
            exact.
    """

    variant: str
    outputs: Mapping[str, Any]
    timing: Mapping[str, Any]
    weights_are: str | None = None
    form: str | Mapping[str, Any] = "full"
    notes: Sequence[str] = ()

    @property
    def output(self) -> Any:
        """The output (B, H, L, E), with as many axes as the inputs have.

        Raises:
            KeyError: the run did not return it; the same for `weights` and `scores`.
        """
        return self._find("output")

    @property
    def weights(self) -> Any:
        """The weights (B, H, L, S), with as many axes as the inputs have.

        Other forms than "full" have (B, H, R, S) for rows, (B, H, L, K) for the top k, and
        (B, H, P, Q) for a pool.
        """
        return self._find("weights")

    @property
    def scores(self) -> Any:
        """The scores (B, H, L, S), scaled, capped and masked."""
        return self._find("scores")

    @property
    def state(self) -> dict[str, Any]:
        """The tensors of the state behind the tokens; `attend` takes them as `state`.

        Their names begin with `state.`; the dict is empty if the run did not return them.
        """
        return {n: array for n, array in self.outputs.items() if n.startswith("state.")}

    @property
    def steps(self) -> dict[str, Any]:
        """The tensors between inputs and output, in the order of computation.

        Their names are those in the catalogue; the dict is empty if the run did not return them.
        """
        prefix = "steps."
        return {n.removeprefix(prefix): a for n, a in self.outputs.items() if n.startswith(prefix)}

    def _find(self, name: str) -> Any:
        if name not in self.outputs:
            raise KeyError(
                f"{name} is not in the response: got {', '.join(self.outputs)}, expected a request "
                f"with {name!r} among its outputs"
            )
        return self.outputs[name]

    def figure(
        self,
        *,
        tokens: Tokens | None = None,
        key_tokens: Tokens | None = None,
        batch: int = 0,
        heads: Sequence[int] | None = None,
        shared_scale: bool = True,
        title: str | None = None,
        ax: Axes | None = None,
    ) -> Figure:
        """Draws the weights as heat maps, one for each head, with tokens on the axes.

        Colours follow the square root of a weight, and a weight of 0 has none. A matrix of more
        than 256 rows or columns is drawn in cells: sums over adjacent keys, and means over adjacent
        queries.

        Args:
            tokens: L strings, or such a list for each sequence. They label the queries, and the
                keys too if there are as many. The form rows takes the tokens of all queries.
            key_tokens: S strings that label the keys, or such a list for each sequence.
            batch: the sequence to draw.
            heads: the heads to draw; None: the first 16, or all of them if there are fewer.
            shared_scale: True gives all heads one colour scale, False each head its own.
            title: above the figure; None: the variant and the parts that are drawn, "": none.
            ax: axes of matplotlib to draw one head into; None: a new figure.

        Raises:
            ValueError: an argument does not fit the run, or the run has no weights.
            ModuleNotFoundError: matplotlib is not installed.
        """
        from qkv.client.figures.run_figure import draw_run  # needs matplotlib

        kind = f", {self.weights_are} weights" if self.weights_are else ""
        return draw_run(
            self.outputs, self.form, subject=f"{self.variant}{kind}", tokens=tokens,
            key_tokens=key_tokens, batch=batch, heads=heads, shared_scale=shared_scale, title=title,
            ax=ax,
        )  # fmt: skip

    def __repr__(self) -> str:
        return _describe("Run", self.variant, self.outputs, self.timing)

    def _repr_html_(self) -> str:
        """Returns the picture of any weights, and a table of the outputs."""
        return self._picture() + self._table().html()

    def _picture(self) -> str:
        drawn = self.outputs.get("weights", self.outputs.get("entropy"))
        is_matrix = drawn is not None and len(drawn.shape) > ("weights" in self.outputs)
        return picture(self.figure) if is_matrix and math.prod(drawn.shape) else ""

    def _table(self) -> Table:
        rows = [
            [name, _dtype(array), "×".join(map(str, array.shape))]
            for name, array in self.outputs.items()
        ]
        time = f"{self.timing['compute_ms']:.3g} ms on {self.timing['device']}"
        heading = self.variant + (f", {self.weights_are} weights" if self.weights_are else "")
        notes = [f"{time} ({self.timing['backend']})", *self.notes]
        return Table(["output", "dtype", "shape"], [(heading, rows)], notes)


@dataclass(frozen=True, slots=True, repr=False)
class Gradients:
    """The result of a request for gradients.

    Attributes:
        variant: its name.
        gradients: an array for each input and each tensor of the layer, by its name.
        timing: as for a run.
    """

    variant: str
    gradients: Mapping[str, Any]
    timing: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Returns the gradient of an input or of a tensor of the layer.

        Raises:
            KeyError: there is none by this name.
        """
        if name not in self.gradients:
            raise KeyError(f"there is no gradient of {name}: got {', '.join(self.gradients)}")
        return self.gradients[name]

    def __repr__(self) -> str:
        return _describe("Gradients", self.variant, self.gradients, self.timing)


@dataclass(frozen=True, slots=True, repr=False)
class Converted:
    """The result of a conversion.

    Attributes:
        tensors: the weights in the target layout, by name.
        check: the largest difference between the outputs of both layers on one random input, and
            the largest output.
        source: the layout of the tensors that were sent, found by the service for "auto".
        prefix: of the layer's names among them; "" if they had none.
        ignored: the names of sent tensors that belong to no part of the attention.
        rotary_order: the order of the query's and key's channels, "half" or "interleaved"; None if
            neither layout nor `rope` gives one.
        options: of a layer with these tensors: layout, heads, and `rope` if the request had it.
    """

    tensors: Mapping[str, Any]
    check: Mapping[str, Any]
    source: str
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    rotary_order: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layer(self) -> dict[str, Any]:
        """The argument `layer=` of `attend`, with its tensors.

        `alibi`, `qk_norm`, `softcap` and `window` are those of the model; no tensor shows them.

        Raises:
            InvalidContent: the channels have a rotary order, but `convert` was called without
                `rope`, so that the layer would run without positions.
        """
        if self.rotary_order is not None and "rope" not in self.options:
            raise InvalidContent(
                f"rope is missing: got a conversion of {self.source} without it, whose models "
                'have rotary positions, expected rope={"base": 10000} or another base in '
                "`convert`. A layer without rotary positions is options | {'tensors': tensors}",
                pointer="/rope",
            )
        return {**self.options, "tensors": self.tensors}

    def __repr__(self) -> str:
        return f"Converted({', '.join(_describe_arrays(self.tensors))})"


def _describe(kind: str, variant: str, arrays: Mapping[str, Any], timing: Mapping[str, Any]) -> str:
    """Returns one line: the variant, each array's dtype and shape, and the total time."""
    parts = [repr(variant), *_describe_arrays(arrays)]
    if "total_ms" in timing:
        parts.append(f"total_ms={timing['total_ms']:.3g}")
    return f"{kind}({', '.join(parts)})"


def _describe_arrays(arrays: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {_dtype(array)} {tuple(array.shape)}" for name, array in arrays.items()]


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")
