"""What an operator may set: one frozen class, read from the environment with the prefix QKV_."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Final, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["Settings", "is_tracing_enabled", "reject_unknown_variables"]

_PREFIX: Final = "QKV_"
_CLI_VARIABLES: Final = {"QKV_URL", "QKV_API_KEY"}  # the asking commands' own

_OTLP: Final = "EXPORTER_OTLP"
_OTEL: Final = (
    *("SDK_DISABLED", "TRACES_EXPORTER", f"{_OTLP}_ENDPOINT", f"{_OTLP}_TRACES_ENDPOINT"),
    *(f"{_OTLP}_PROTOCOL", f"{_OTLP}_TRACES_PROTOCOL"),
)

_KEY: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # token68 of RFC 9110, section 11.2
_ORIGIN: Final = re.compile(r"https?://[a-z0-9.:\[\]-]+|\*")

_MiB = 1 << 20
_GiB = 1 << 30


class Settings(BaseSettings):
    """Settings of the service. Each is `QKV_` and its name in capitals in the environment."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="forbid")

    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Field(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    ] = 8000
    api_keys: Annotated[
        SecretStr | None,
        Field(
            description="Keys, with commas between them; who sends none of them as `Authorization: "
            "Bearer` is refused, but on /livez, /readyz, /v2/health/* and the playground's own "
            "files. None: whoever comes is let in."
        ),
    ] = None
    cors_origins: Annotated[
        str | None,
        Field(
            description="Origins whose pages may ask from a browser, with commas between them, or "
            "`*`; None: none may."
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Field(description="Where attention runs; auto: a CUDA device where there is one."),
    ] = "auto"
    workers: Annotated[
        int,
        Field(
            ge=0,
            le=1024,
            description="Worker processes; 0: on a CPU as many as the CPUs that affinity and "
            "cgroup quota allow, on a GPU 1.",
        ),
    ] = 0
    device_process: Annotated[
        Literal["auto", "each", "one"],
        Field(
            description="Who has the device: each worker for itself, or one process more for all "
            "of them, which then speak HTTP and nothing else; auto: one for several workers on a "
            "GPU, else each."
        ),
    ] = "auto"
    threads: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            description="CPU threads of one call, in each worker; some variants' last bits depend "
            "on it. A large request that is alone takes as many as there are workers, where they "
            "do not.",
        ),
    ] = 1
    max_batch: Annotated[
        int,
        Field(
            ge=0,
            le=4096,
            description="Most requests that run together; 1: no batching; 0: 1 on a CPU, 64 on "
            "a GPU.",
        ),
    ] = 0
    max_body_bytes: Annotated[
        int, Field(ge=1, description="Largest request body; more is 413.")
    ] = 256 * _MiB
    max_answer_bytes: Annotated[
        int, Field(ge=1, description="Largest answer, counted in tensor bytes; more is 413.")
    ] = _GiB
    max_scores: Annotated[
        int,
        Field(
            ge=1,
            description="Most scores (B H L S) that one request may compute, or what takes as "
            "long; more is 413.",
        ),
    ] = 1 << 34
    max_queue: Annotated[
        int,
        Field(
            ge=1,
            description="Requests that may wait, or whose bodies come in, in each process; more is "
            "503.",
        ),
    ] = 1024
    max_queue_bytes: Annotated[
        int, Field(ge=1, description="Tensor bytes that may wait; more is 503.")
    ] = 4 * _GiB
    read_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Seconds that the head of a request may take to come, and each 64 KiB of "
            "its body; more is 408.",
        ),
    ] = 30.0
    write_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Seconds in which a caller may take nothing of its answer; past them its "
            "connection is closed.",
        ),
    ] = 30.0
    busy_poll_us: Annotated[
        int,
        Field(
            ge=0,
            le=100_000,
            description="Microseconds that a worker stays awake after an answer to the service's "
            "only caller, who then waits less for the next; 0: none.",
        ),
    ] = 200
    request_log: Annotated[
        Literal["off", "json"],
        Field(description="json: a line of JSON for each request, on standard output."),
    ] = "off"
    max_queue_flops: Annotated[
        int, Field(ge=1, description="Floating-point operations that may wait; more is 503.")
    ] = 1 << 50
    request_timeout_s: Annotated[
        float,
        Field(ge=0, description="Seconds that a request may wait for its turn; 0: any number."),
    ] = 0.0
    drain_s: Annotated[
        int,
        Field(ge=0, description="Seconds that accepted requests have left when the service stops."),
    ] = 30
    stuck_s: Annotated[
        float, Field(gt=0, description="Seconds of silence after which an event loop is stuck.")
    ] = 30.0
    stuck_device_s: Annotated[
        float, Field(gt=0, description="Seconds after which a device in one batch is stuck.")
    ] = 600.0

    @field_validator("api_keys")
    @classmethod
    def _are_keys(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not all(map(_KEY.fullmatch, _split(value.get_secret_value()))):
            raise ValueError("a key is letters, digits and ._~+/- with = at its end, and not empty")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str | None) -> str | None:
        if value is not None and not all(map(_ORIGIN.fullmatch, _split(value))):
            raise ValueError("an origin is https://host or https://host:port in small letters")
        return value

    @property
    def keys(self) -> list[str]:
        """The API keys; none: whoever comes is let in."""
        return [] if self.api_keys is None else _split(self.api_keys.get_secret_value())

    @property
    def origins(self) -> list[str]:
        """The origins whose pages may ask."""
        return [] if self.cors_origins is None else _split(self.cors_origins)

    @property
    def traces(self) -> bool:
        """Whether the environment asks for traces, in the words of OpenTelemetry.

        Raises:
            ValueError: it asks for some that are not made here.
        """
        return is_tracing_enabled(os.environ)


def is_tracing_enabled(environment: Mapping[str, str]) -> bool:
    """Whether the standard's variables say where traces go.

    Raises:
        ValueError: they want another exporter or protocol than there is.
    """
    variables = {name: environment.get(f"OTEL_{name}", "").strip() for name in _OTEL}
    if variables["SDK_DISABLED"].lower() == "true" or variables["TRACES_EXPORTER"] == "none":
        return False
    exporter = (
        variables["TRACES_EXPORTER"]
        or variables[f"{_OTLP}_ENDPOINT"]
        or variables[f"{_OTLP}_TRACES_ENDPOINT"]
    )
    if not exporter:
        return False
    protocol = (
        variables[f"{_OTLP}_TRACES_PROTOCOL"] or variables[f"{_OTLP}_PROTOCOL"] or "http/protobuf"
    )
    if variables["TRACES_EXPORTER"] not in ("", "otlp"):
        raise ValueError(
            f"OTEL_TRACES_EXPORTER is {variables['TRACES_EXPORTER']}; there are otlp, none"
        )
    if protocol != "http/protobuf":
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}; there is http/protobuf")
    return True


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def reject_unknown_variables(environment: Iterable[str]) -> None:
    """Refuses a variable that looks like a setting and is none, which would change nothing.

    Raises:
        ValueError: it says which, and the setting that was meant, or all there are.
    """
    known = [_PREFIX + name.upper() for name in Settings.model_fields]
    for name in sorted(environment):
        # pydantic reads them whatever their case
        if name.upper().startswith(_PREFIX) and name.upper() not in {*known, *_CLI_VARIABLES}:
            close = get_close_matches(name.upper(), known, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ValueError(f"{name} is no setting; {hint}")
