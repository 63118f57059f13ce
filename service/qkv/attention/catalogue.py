"""The variants by name: the files of `variants/`, each with defaults for the parts it leaves out.

`find` and `variants` are the entry points. `add` adds a file outside the package. `broken` has the
files that cannot be used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from qkv.attention import variant_file
from qkv.attention.identity_weights import weights_letters
from qkv.attention.signature import Input, Output, read_signature
from qkv.attention.step import MAX_BYTES, MAX_ITEMS, MAX_TOKENS, read_steps
from qkv.attention.variant import Variant
from qkv.attention.variant_file import BrokenRule, BrokenVariant
from qkv.errors import NotFound

_log = logging.getLogger(__name__)


@cache
def _catalogue() -> tuple[dict[str, Variant], dict[str, BrokenVariant]]:
    """Reads all files; logs those that are broken, once in a process."""
    variants: dict[str, Variant] = {}
    errors: dict[str, BrokenVariant] = {}
    for path in variant_file.files(variant_file.FOLDER):
        try:
            variants[path.stem] = load(path)
        except BrokenVariant as error:
            errors[path.stem] = error
            _log.error("%s", error)
    return variants, errors


def variants() -> Mapping[str, Variant]:
    """Returns every variant by name, sorted: the files in `variants/` that are not broken.

    Those of `add` are beside them. A file whose name begins with an underscore is no variant.
    """
    return _catalogue()[0]


def broken() -> Mapping[str, BrokenVariant]:
    """Returns the files in `variants/` that cannot be used, by name, each with its problem."""
    return _catalogue()[1]


def find(name: str) -> Variant:
    """Returns the variant of that name.

    Raises:
        NotFound: the variant does not exist.
    """
    variant = variants().get(name)
    if variant is None:
        reason = " (its file is broken: see the service's log)" if name in broken() else ""
        raise NotFound(f"no variant {name!r}{reason}; there are {', '.join(variants())}")
    return variant


def add(path: Path) -> Variant:
    """Adds the variant of a file outside the package, and returns it.

    Call it before requests arrive: a plan is sent to another process by the variant's name.

    Raises:
        BrokenVariant: the file breaks a rule of `variants/README.md`, or another has its name.
    """
    known, errors = _catalogue()
    if path.stem in known or path.stem in errors:
        raise BrokenVariant(path, f"another variant has the name {path.stem!r}")
    known[path.stem] = variant = load(path)
    for name in sorted(known):  # a dictionary has the order in which its names are put
        known[name] = known.pop(name)
    return variant


def load(path: Path) -> Variant:
    """Returns the variant of a file, which may be outside the package.

    Raises:
        BrokenVariant: the file breaks a rule of `variants/README.md`.
    """
    return read_module(variant_file.load_module(path), path)


def read_module(module: ModuleType, path: Path) -> Variant:
    """Returns the variant of an imported file; arguments and errors as those of `load`."""
    try:
        variant_file.check_texts(module)
        signature = read_signature(module, path.stem)
        steps = read_steps(module, signature)
    except BrokenRule as error:
        raise BrokenVariant(path, str(error)) from None
    outputs, output = dict(signature.outputs), signature.outputs["output"]
    letters = weights_letters(signature.inputs, output)
    if "weights" not in outputs and letters is not None:
        outputs["weights"] = Output("weights", letters, is_exact=True)
    return Variant(
        name=path.stem,
        module=module,
        inputs=signature.inputs,
        outputs=outputs,
        parameters=signature.parameters,
        returned=None if signature.returns_tensor else frozenset(signature.outputs),
        from_engine=signature.from_engine,
        state=signature.state,
        call=signature.call,
        steps=steps,
    )


def describe(variant: Variant) -> dict[str, Any]:
    """Returns the variant's entry in the catalogue as JSON."""
    return {
        "variant": variant.name,
        "summary": variant.summary,
        "formula": variant.formula,
        "paper": variant.paper,
        "cost": variant.cost,
        "weights": variant.weights_text,
        "inputs": {
            i.name: {
                "shape": list(i.letters),
                "broadcasts": i.broadcasts,
                "dtypes": list(i.dtypes),
                "optional": i.is_optional,
                "random": i.name in variant.random_input_names,
            }
            for i in variant.tensors.values()
        },
        "parameters": variant.parameters.model_json_schema(),
        "refuses": dict(variant.refuses),
        "outputs": {
            o.name: {
                "shape": list(o.letters),
                "dtype": "float32, or float64 for float64 inputs" if o.is_exact else "the inputs'",
            }
            for o in variant.outputs.values()
        }
        | {
            i.name: {"shape": list(i.letters), "dtype": _dtype_of_state(i)}
            for i in (variant.state.inputs.values() if variant.state else ())
        },
        "steps": _describe_steps(variant),
        "gradients": [
            i.name
            for i in variant.inputs.values()
            if variant.backward is not None and "float32" in i.dtypes
        ],
    }


def _describe_steps(variant: Variant) -> dict[str, Any] | None:
    """Returns the steps and their bounds as JSON; None for a variant without steps."""
    if not variant.steps:
        return None
    bounds = {"max_tokens": MAX_TOKENS, "max_items": MAX_ITEMS, "max_bytes": MAX_BYTES}
    return bounds | {"names": [step.describe() for step in variant.steps.values()]}


def _dtype_of_state(spec: Input) -> str:
    """Returns the dtype of a state's tensor in words: its widest, or that of an input."""
    return "the input's" if "float16" in spec.dtypes else spec.dtypes[0]
