"""The results of a run, of a request for gradients and of a conversion."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv.client.figures.figure import Figure
    from qkv.client.figures.run_grid import Options
    from qkv.client.figures.token_labels import Tokens

__all__ = ["Converted", "Gradients", "Run", "draw_run"]


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
    """

    variant: str
    outputs: Mapping[str, Any]
    timing: Mapping[str, Any]
    weights_are: str | None = None
    form: str | Mapping[str, Any] = "full"

    @property
    def output(self) -> Any:
        """The output (B, H, L, E), with as many axes as the inputs have."""
        return self.outputs["output"]

    @property
    def weights(self) -> Any:
        """The weights (B, H, L, S), with as many axes as the inputs have.

        Other forms than "full" have (B, H, R, S) for rows, (B, H, L, K) for the top k, and
        (B, H, P, Q) for a pool.
        """
        return self.outputs["weights"]

    @property
    def scores(self) -> Any:
        """The scores (B, H, L, S), scaled, capped and masked."""
        return self.outputs["scores"]

    def figure(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        tokens: Tokens | None = None,
        key_tokens: Tokens | None = None,
        batch: int = 0,
        heads: Sequence[int] | None = None,
        shared_scale: bool = True,
        title: str | None = None,
    ) -> Figure:
        """Draws the weights as heat maps, one for each head, with tokens on the axes.

        Args:
            path: the file to write; its suffix is .svg, .pdf or .png. None: no file.
            tokens: L strings, or such a list for each sequence. They label the queries, and the
                keys too if there are as many. The form rows takes the tokens of all queries.
            key_tokens: S strings that label the keys, or such a list for each sequence.
            batch: the sequence to draw.
            heads: the heads to draw; None: the first 16, or all of them if there are fewer.
            shared_scale: True gives all heads one colour scale, False each head its own.
            title: above the figure; None: the variant, "": none.

        Raises:
            ValueError: an argument does not fit the run, the run has no weights, or the suffix of
                the path is unknown.
            ModuleNotFoundError: matplotlib is not installed, which .pdf and .png need.
            OSError: the file cannot be written.
        """
        from qkv.client.figures.run_grid import Options  # only figures need it

        options = Options(tokens, key_tokens, batch, heads, shared_scale, title)
        figure = draw_run(self, options)
        if path is not None:
            figure.save(path)
        return figure

    def __repr__(self) -> str:
        return _describe("Run", self.variant, self.outputs, self.timing)

    def _repr_html_(self) -> str:
        from qkv.client import notebook  # only notebooks need it

        return notebook.run_html(
            self.variant, self.outputs, self.timing, self.weights_are, self.form
        )


def draw_run(run: Run, options: Options) -> Figure:
    """Returns the figure of a run's weights.

    Raises:
        ValueError: the options do not fit the run, or it has no weights.
    """
    from qkv.client.arrays import to_raw  # programs without figures need none of this
    from qkv.client.figures.figure import draw
    from qkv.client.figures.run_grid import build_grid

    arrays = {name: to_raw(array).numpy() for name, array in run.outputs.items()}
    grid = build_grid(run.variant, run.weights_are, arrays, run.form, options)
    if grid is None:
        raise ValueError(
            f"the run has no matrix of weights to draw: got the outputs {', '.join(arrays)}, "
            "expected a run with weights"
        )
    return draw(grid)


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
        """Returns the gradient of an input or of a tensor of the layer."""
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
    """

    tensors: Mapping[str, Any]
    check: Mapping[str, Any]
    source: str
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    rotary_order: str | None = None

    def __repr__(self) -> str:
        return f"Converted({', '.join(_describe_arrays(self.tensors))})"


def _describe(kind: str, variant: str, arrays: Mapping[str, Any], timing: Mapping[str, Any]) -> str:
    """Returns one line: the variant, each array's dtype and shape, and the total time."""
    parts = [repr(variant), *_describe_arrays(arrays)]
    if "total_ms" in timing:
        parts.append(f"total_ms={timing['total_ms']:.3g}")
    return f"{kind}({', '.join(parts)})"


def _describe_arrays(arrays: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {str(array.dtype).removeprefix('torch.')} {tuple(array.shape)}"
        for name, array in arrays.items()
    ]
