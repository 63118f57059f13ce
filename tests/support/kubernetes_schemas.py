"""Schemas of Kubernetes' types, and the classes of KServe's SDK as schemas of KServe's types.

kubernetes-validate has the former. Where a class of the SDK names a type of Kubernetes, its schema
checks the data. So the SDK is installed alone, without its requirements, such as gRPC and pandas.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import jsonschema
from referencing import Registry
from referencing import Resource as Schema

VERSIONS: Final = ("1.30", "1.37")
"""The oldest version of Kubernetes that the manifests support, and the newest with schemas."""

_PLAIN: Final = {"str": str, "int": int, "bool": bool, "float": float, "object": object}
_QUANTITIES: Final = ("ResourceQuantity", "V1beta1MetricQuantity")
_KUBERNETES: Final = {
    "V1ObjectMeta": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
    "K8sIoApiAppsV1DeploymentStrategy": "io.k8s.api.apps.v1.DeploymentStrategy",
    "K8sIoApiAutoscalingV2HorizontalPodAutoscalerBehavior": (
        "io.k8s.api.autoscaling.v2.HorizontalPodAutoscalerBehavior"
    ),
} | dict.fromkeys(_QUANTITIES, "io.k8s.apimachinery.pkg.api.resource.Quantity")


def check_type(data: Any, name: str) -> None:
    """Validates data with the strict schema of a type, such as "io.k8s.api.core.v1.Container".

    Raises:
        jsonschema.ValidationError: the data is not of this type, or has an unknown field.
    """
    definitions = _definitions()
    registry: Registry[Any] = Registry().with_resource(
        definitions["$id"], Schema.from_contents(definitions)
    )
    schema = {"$ref": f"{definitions['$id']}#/$defs/{name}"}
    jsonschema.Draft202012Validator(schema, registry=registry).validate(data)


@cache
def _definitions() -> Any:
    folder = f"kubernetes-json-schema/v{VERSIONS[-1]}.0-local-strict"
    return json.loads(
        files("kubernetes_validate").joinpath(folder, "_definitions.json").read_text()
    )


def through_sdk(resource: dict[str, Any]) -> Any:
    """Returns a resource of KServe after a round trip through the SDK's classes.

    Raises:
        ValueError, TypeError: a field is unknown, missing or of a wrong type.
        jsonschema.ValidationError: a part that is a type of Kubernetes is not valid.
    """
    version = resource["apiVersion"].rpartition("/")[2]
    name = f"{version[0].upper()}{version[1:]}{resource['kind']}"
    return _to_data(_from_data(resource, name, resource["kind"]))


@cache
def _sdk() -> dict[str, Any]:
    """Returns the SDK's classes by name; the packages' own imports do not run."""
    spec = find_spec("kserve")
    assert spec is not None
    assert spec.origin is not None
    folder, before, classes = Path(spec.origin).parent, set(sys.modules), dict[str, Any]()
    try:
        for name in ("kserve", "kserve.models"):
            sys.modules[name] = package = ModuleType(name)
            package.__path__ = [str(folder / name.replace(".", "/").partition("/")[2])]
        for path in sorted(folder.glob("models/v1*.py")):
            module = importlib.import_module(f"kserve.models.{path.stem}")
            classes |= {n: c for n, c in vars(module).items() if hasattr(c, "openapi_types")}
    finally:  # no other code finds a part of a package
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "kserve":
                del sys.modules[name]
    return classes


def _from_data(data: Any, name: str, where: str) -> Any:
    """Returns data as the SDK's type of this name."""
    if element := re.fullmatch(r"list\[(.+)\]", name):
        _check_class(data, list, where)
        return [_from_data(each, element[1], f"{where}[]") for each in data]
    if element := re.fullmatch(r"dict\(str, (.+)\)", name):
        _check_class(data, dict, where)
        return {key: _from_data(each, element[1], f"{where}.{key}") for key, each in data.items()}
    if name in _PLAIN:
        _check_class(data, _PLAIN[name], where)
        return data
    if (sdk_class := _sdk().get(name)) is None:
        check_type(data, _KUBERNETES.get(name, f"io.k8s.api.core.v1.{name.removeprefix('V1')}"))
        return data
    _check_class(data, dict, where)
    names = {field: attribute for attribute, field in sdk_class.attribute_map.items()}
    if unknown := data.keys() - names:
        raise ValueError(f"{where} has unknown fields: got {sorted(unknown)}")
    types = sdk_class.openapi_types
    return sdk_class(
        **{
            names[field]: _from_data(each, types[names[field]], f"{where}.{field}")
            for field, each in data.items()
        }
    )


def _check_class(data: Any, expected: type, where: str) -> None:
    if not isinstance(data, expected) or (isinstance(data, bool) and expected is int):
        raise TypeError(f"{where} is not valid: got {data!r}, expected {expected.__name__}")


def _to_data(value: Any) -> Any:
    """Returns an object of the SDK as the data of a manifest.

    None and an empty string, the defaults of the SDK, stand for an absent field.
    """
    if isinstance(value, list):
        return [_to_data(each) for each in value]
    if isinstance(value, dict):
        return {key: _to_data(each) for key, each in value.items()}
    if not hasattr(value, "attribute_map"):
        return value
    fields = {f: _to_data(getattr(value, a)) for a, f in value.attribute_map.items()}
    return {field: each for field, each in fields.items() if each not in (None, "")}
