"""Models of bodies: built once for the same variants, so that forked workers have them."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from qkv.api import models
from qkv.api.app import build_models, create_app
from qkv.attention import catalogue
from qkv.settings import Settings


def test_models_are_built_again_for_other_variants_only(monkeypatch: pytest.MonkeyPatch) -> None:
    build = models.of_catalogue(object)
    first = build()
    assert build() is first
    fewer = {name: v for name, v in catalogue.variants().items() if name != "softmax"}
    monkeypatch.setattr(catalogue, "variants", lambda: fewer)
    assert build() is not first


def test_application_of_a_worker_has_the_models_of_its_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_models()
    built: list[str] = []

    def note(cls: type[pydantic.BaseModel], **_: object) -> None:
        built.append(cls.__name__)

    name = "__pydantic_init_subclass__"
    replacement: Any = note
    monkeypatch.setattr(pydantic.BaseModel, name, classmethod(replacement))
    create_app(Settings(device="cpu", threads=1))
    of_variants = {name for name in built if name.endswith(("Request", "Response", "Parameters"))}
    assert not of_variants, built
