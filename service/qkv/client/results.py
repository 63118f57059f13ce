"""What a run, a request for gradients and a conversion answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Converted", "Gradients", "Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """What a run answered.

    Attributes:
        variant: its name.
        outputs: arrays by name, of the kind that the inputs were.
        timing: milliseconds by stage, batch size, device, backend, flops, bytes.
        weights_are: "stochastic" (none negative, each row's sum is 1, or 0 where it sees nothing),
            "signed" or "unnormalised"; None where there are none.
        form: that the weights were asked for in: "full", "none", "stats", {"rows": [...]},
            {"top_k": k} or {"pool": bins}.

    A notebook shows the weights as a heat map by heads, whatever their form.
    """

    variant: str
    outputs: Mapping[str, Any]
    timing: Mapping[str, Any]
    weights_are: str | None = None
    form: str | Mapping[str, Any] = "full"

    @property
    def output(self) -> Any:
        """(B, H, L, E), in the rank of the inputs."""
        return self.outputs["output"]

    @property
    def weights(self) -> Any:
        """(B, H, L, S), in the rank of the inputs; of other forms than "full" (B, H, R, S) for
        rows, (B, H, L, K) for the top k, (B, H, P, Q) for a pool."""
        return self.outputs["weights"]

    @property
    def scores(self) -> Any:
        """(B, H, L, S), in the rank of the inputs: scaled, capped and masked."""
        return self.outputs["scores"]

    def _repr_html_(self) -> str:
        from qkv.client import notebook  # who has no notebook has no need of it

        return notebook.run_html(
            self.variant, self.outputs, self.timing, self.weights_are, self.form
        )


@dataclass(frozen=True, slots=True)
class Gradients:
    """What a request for gradients answered.

    Attributes:
        variant: its name.
        gradients: arrays by the name of what they are the gradients of, of the inputs' kind.
        timing: as a run has it.
    """

    variant: str
    gradients: Mapping[str, Any]
    timing: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """The gradient of that input, or of that tensor of the layer."""
        return self.gradients[name]


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion answered.

    Attributes:
        tensors: the weights in the target layout, by name.
        check: how far both layers' outputs lie apart on the same random input.
    """

    tensors: Mapping[str, Any]
    check: Mapping[str, Any]
