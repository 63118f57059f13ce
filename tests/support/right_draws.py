"""Draws of right functions with gradients: of every variant, in many forms, in four dtypes."""

from __future__ import annotations

from random import Random
from typing import Any, Final, NamedTuple

from qkv.testing import FAMILIES, Report, verify
from qkv.testing.families import families_of
from support.flash_kernel import Attention
from support.right_functions import right_functions
from support.right_variants import RIGHT_VARIANTS, of_the_service

DTYPES: Final = ("float32", "bfloat16", "float16", "float64")

_CAUSAL: Final = {"causal": True, "query_offset": "end"}
_PARAMETERS: Final[dict[str, list[dict[str, Any]]]] = {
    "softmax": [{}, _CAUSAL], "linear": [{}, _CAUSAL, {"normalize": False}],
    "efficient": [{}, _CAUSAL], "taylor": [{}, _CAUSAL], "sigmoid": [{}, _CAUSAL],
    "mean": [{}, {"causal": False}, {"normalize": False}],
}  # fmt: skip
_SOFTMAX: Final = {name: function for name, function in right_functions() if " " not in name}


class RightDraw(NamedTuple):
    """A right function of a variant, and how it is verified.

    Attributes:
        form: the name of the function among those of the variant.
        function: the function.
        variant, dtype, parameters, seed: arguments of `verify`.
    """

    form: str
    function: Attention
    variant: str
    dtype: str
    parameters: dict[str, Any]
    seed: int

    @classmethod
    def of(cls, seed: int) -> RightDraw:
        """Returns the draw of a seed; eight seeds in a row have every variant."""
        random, names = Random(seed), ["softmax", *RIGHT_VARIANTS]
        variant = names[seed % len(names)]
        forms = dict(RIGHT_VARIANTS.get(variant, _SOFTMAX))
        forms["service"] = of_the_service(variant)
        form, dtype = random.choice(sorted(forms)), random.choice(DTYPES)
        parameters = random.choice(_PARAMETERS.get(variant, [{}]))
        return cls(form, forms[form], variant, dtype, parameters, seed)

    def verify(self, family_count: int = len(FAMILIES)) -> Report:
        """Returns the oracle's report on the function and its gradients.

        Args:
            family_count: the number of families of inputs, which the seed chooses.
        """
        names = [n for n in families_of(self.variant) if not FAMILIES[n].is_strict]
        # sums of a thousand products leave the range of float16
        if self.form == "in its dtype" and self.dtype == "float16":
            names.remove("long sum")
        chosen = set(Random(self.seed).sample(names, min(family_count, len(names))))
        return verify(
            self.function,
            self.variant,
            dtype=self.dtype,
            families=[n for n in names if n in chosen],
            gradients=True,
            seed=self.seed,
            **self.parameters,
        )
