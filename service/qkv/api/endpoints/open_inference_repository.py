"""The models of the Open Inference Protocol, and the repository that lists, loads and unloads them.

Models are the variants, and the loaded layers. Source of the repository below `/v2`: Triton's
extension model_repository (github.com/triton-inference-server/server, docs/protocol).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pydantic
from fastapi import APIRouter

from qkv.api.bodies import BodyFormat, body_route
from qkv.api.openapi.open_inference_operation import error_responses, new_router
from qkv.api.openapi.operation import variant_name
from qkv.attention import catalogue
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.signature import Input
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, NotFound
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.jobs.state import SUMS
from qkv.telemetry.worker_state import SharedState
from qkv.wire.open_inference import DATATYPES
from qkv.wire.open_inference_responses import Loaded, RepositoryModel, Unloaded

VERSION: Final = "1"
"""The only version of every model."""

LAYER_VARIANT: Final = "softmax"
"""The variant of a loaded layer if a request does not name another one."""

_PREFERRED_DTYPES: Final = ("bool", "float32", "int64", "float64")
_MAX_BODY_BYTES: Final = 1 << 16
_FLAGS: Final = "Flags, without an effect."


@dataclass(frozen=True, eq=False)
class Model:
    """A variant, or a loaded layer with the variant that it runs by default.

    Attributes:
        name: of the model.
        variant: that runs.
        layer: that projects the input x; None: the model is the variant.
    """

    name: str
    variant: Variant
    layer: Layer | None = None

    @property
    def inputs(self) -> Sequence[Input]:
        """The inputs, tensors of a state included; those of a layer have x (B, L, M) in place of
        query, key and value."""
        inputs, layer = self.variant.tensors, self.layer
        if layer is None:
            return list(inputs.values())
        width = str(len(layer.weights["query.weight"]))
        x = replace(inputs["query"], name="x", letters=("B", "L", width), dtypes=(layer.dtype,))
        given = layer.variant_inputs.union(ROLES)
        return [x, *(spec for name, spec in inputs.items() if name not in given)]

    @property
    def outputs(self) -> Sequence[tuple[str, tuple[str, ...], str]]:
        """Name, axes and datatype of each output, those of a state and the steps included.

        The output of a layer is (B, L, M).
        """
        axes = {name: spec.letters for name, spec in self.variant.outputs.items()}
        if (layer := self.layer) is not None:
            heads, groups = layer.heads.query or 1, layer.heads.key or 1
            width = layer.output_width or layer.weights["value.weight"].shape[1] // groups * heads
            axes["output"] = ("B", "L", str(width))
        return [
            *((name, letters, "FP32") for name, letters in axes.items()),
            *(
                (name, spec.letters, "FP64" if name == SUMS else datatype_of(spec.dtypes))
                for specs in self.variant.groups.values()
                for name, spec in specs.items()
            ),
        ]


class ModelCatalogue:
    """The models by name.

    Args:
        shared_state: has the loaded flags of the models.
        layers: those that the operator loaded.
    """

    def __init__(self, shared_state: SharedState, layers: LoadedLayers) -> None:
        self._shared_state, self._layers = shared_state, layers

    @property
    def names(self) -> Sequence[str]:
        """The names of all models, loaded or not."""
        return self._shared_state.models

    @property
    def loaded_names(self) -> Sequence[str]:
        """The names of the loaded models."""
        return [name for name in self.names if self.is_loaded(name)]

    def is_loaded(self, name: str) -> bool:
        """Returns True if the model exists and is loaded."""
        return self._shared_state.is_loaded(name)

    def find(self, name: str, version: str = VERSION) -> Model:
        """Returns a model, loaded or not.

        Raises:
            NotFound: the model or the version does not exist.
        """
        if name not in self.names:
            raise NotFound(f"Request for unknown model: {name!r:.60} is not found")
        if version != VERSION:
            raise NotFound(
                f"Request for unknown model: {name!r} version {version!r:.20} is not found; "
                f"there is version {VERSION}"
            )
        if name in self._layers:
            return Model(name, catalogue.find(LAYER_VARIANT), self._layers[name])
        return Model(name, catalogue.find(name))

    def find_loaded(self, name: str, version: str = VERSION) -> Model:
        """Returns a loaded model.

        Raises:
            NotFound: the model or the version does not exist, or the model is unloaded.
        """
        model = self.find(name, version)
        if not self.is_loaded(name):
            raise NotFound(f"Request for unknown model: {name!r} has no available versions")
        return model

    def load(self, name: str, *, loaded: bool = True) -> None:
        """Loads or unloads a variant in all workers.

        Raises:
            NotFound: the model does not exist.
            InvalidContent: it is a loaded layer.
        """
        if self.find(name).layer is not None:
            raise InvalidContent(
                f"{name} cannot be {'' if loaded else 'un'}loaded while the service runs: it is a "
                "layer of a checkpoint, which is loaded at start"
            )
        self._shared_state.load(name, loaded=loaded)


def default_output(variant: Variant) -> str:
    """Returns the output of a request that names none."""
    return "output" if "output" in variant.outputs else next(iter(variant.outputs))


def datatype_of(dtypes: Sequence[str]) -> str:
    """Returns the datatype to report: the protocol has one for each tensor."""
    return DATATYPES[next(dtype for dtype in _PREFERRED_DTYPES if dtype in dtypes)]


class _Request(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class IndexRequest(_Request):
    """A filter."""

    ready: bool = False


class _Flags(_Request):
    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_configurations(cls, value: Any) -> Any:
        """Refuses what replaces a configuration or files of a model, as Triton's parameters do."""
        if not isinstance(value, dict):
            raise InvalidContent("parameters must be an object")
        for name in value:
            if name not in cls.model_fields:
                raise InvalidContent(
                    f"parameter {name!r:.60} is not supported: a model's configuration is fixed"
                )
        return value


class LoadRequestParameters(_Flags):
    """No parameters."""


class UnloadRequestParameters(_Flags):
    """Flags of an unload; no model has dependents."""

    unload_dependents: bool = False


class LoadRequest(_Request):
    """The body of a load."""

    parameters: LoadRequestParameters | None = None


class UnloadRequest(_Request):
    """The body of an unload."""

    parameters: UnloadRequestParameters | None = None


# bodies may be empty
_NO_FILTER: Final = IndexRequest()
_NO_LOAD_FLAGS: Final = LoadRequest()
_NO_UNLOAD_FLAGS: Final = UnloadRequest()


def router(models: ModelCatalogue) -> APIRouter:
    """Returns the routes of the repository."""
    routes = new_router(body_route(None, BodyFormat(_MAX_BODY_BYTES, is_optional=True)))
    name: Any = variant_name()

    @routes.post(
        "/v2/repository/index",
        summary="Lists every model, loaded or not.",
        response_description="OK.",
        responses=error_responses(400, 500, 503),
        openapi_extra={"requestBody": {"description": "A filter."}},
    )
    async def index(body: IndexRequest = _NO_FILTER) -> list[RepositoryModel]:
        loaded = models.loaded_names
        return [
            RepositoryModel(
                name=name,
                version=VERSION,
                state="READY" if name in loaded else "UNAVAILABLE",
                reason="" if name in loaded else "unloaded",
            )
            for name in (loaded if body.ready else models.names)
        ]

    @routes.post(
        "/v2/repository/models/{model}/load",
        operation_id="v2_load",
        summary="Loads a model.",
        response_description="OK.",
        responses=error_responses(400, 404, 500, 503),
        openapi_extra={"requestBody": {"description": _FLAGS}},
    )
    async def load(model: name, body: LoadRequest = _NO_LOAD_FLAGS) -> Loaded:
        models.load(model)
        return Loaded(name=model, load=True)

    @routes.post(
        "/v2/repository/models/{model}/unload",
        operation_id="v2_unload",
        summary="Unloads a model.",
        description="Requests for an unloaded model get 404 until it is loaded again.",
        response_description="OK.",
        responses=error_responses(400, 404, 500, 503),
        openapi_extra={"requestBody": {"description": _FLAGS}},
    )
    async def unload(model: name, body: UnloadRequest = _NO_UNLOAD_FLAGS) -> Unloaded:
        models.load(model, loaded=False)
        return Unloaded(name=model, unload=True)

    return routes
