"""Settings of the service, read from environment variables with the prefix QKV_.

The command reads them once; `Settings` is frozen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import DirectoryPath, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from qkv.api_keys import ApiKey, parse_api_keys, read_api_keys
from qkv.tracing_variables import is_tracing_enabled

_PREFIX: Final = "QKV_"
_CLI_VARIABLES: Final = {"QKV_URL", "QKV_API_KEY"}  # of the client commands

# Kubernetes adds them to every container of a namespace, for a Service named qkv or qkv-...: its
# documentation, page "Service", section "Environment variables".
_SERVICE_LINK: Final = re.compile(
    r"QKV_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)
_SERVICE_URL: Final = re.compile(r"(tcp|udp|sctp)://")

_DEVICE: Final = re.compile(r"cpu|cuda(:[0-9]{1,4})?")
_ORIGIN: Final = re.compile(r"https?://[a-z0-9.:\[\]-]+|\*")

_HOST: Final = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*|\[[0-9a-f:.]+\]|\*")

_CHECKPOINT: Final = re.compile(r"[a-z0-9-]{1,64}")

_MiB = 1 << 20
_GiB = 1 << 30


class Settings(BaseSettings):
    """Settings of the service; the variable of each is `QKV_` and its name in capitals."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="forbid")

    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Field(ge=0, le=65535, description="Port to listen on; 0 takes a free port.")
    ] = 8000
    api_keys: Annotated[
        SecretStr | None,
        Field(
            description="Comma-separated API keys: `KEY`, `NAME:KEY` or `NAME:KEY:WEIGHT`. "
            "Requests without one (`Authorization: Bearer <key>`) get 401, except on "
            "`/livez`, `/readyz`, `/v2/health/*` and the playground's own files. By "
            "default there is no authentication."
        ),
    ] = None
    api_keys_file: Annotated[
        Path | None,
        Field(
            description="File with such a key on each line, in place of `QKV_API_KEYS`. SIGHUP "
            "makes the service read it again."
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        Field(
            ge=1,
            le=65535,
            description="Port that serves `/metrics` alone, without an API key, at the same "
            "address. By default there is none, and `/metrics` needs a key as other paths do.",
        ),
    ] = None
    cors_origins: Annotated[
        str | None,
        Field(
            description="Comma-separated origins whose pages may send requests from a browser, or "
            "`*`. By default no origin may but the service's own."
        ),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        Field(
            description="Comma-separated names that the `Host` of a request may have, besides the "
            "names and addresses of the machine, or `*`. By default any, except if "
            "the service listens on a loopback address only."
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Field(
            description="Device for attention: `cpu`, `cuda`, or `auto`, which takes CUDA if it "
            "is available."
        ),
    ] = "auto"
    workers: Annotated[
        int,
        Field(
            ge=0,
            le=1024,
            description="Number of worker processes. 0 means one per CPU that affinity and cgroup "
            "quota allow. On GPUs it means one per device, but at most one per CPU.",
        ),
    ] = 0
    device_process: Annotated[
        Literal["auto", "each", "one"],
        Field(
            description="`each`: every worker uses the device itself. `one`: one additional "
            "process uses it for all workers. `auto` means `one` for several workers "
            "on a GPU, otherwise `each`."
        ),
    ] = "auto"
    devices: Annotated[
        str | None,
        Field(
            description="Comma-separated devices, all `cpu` or all `cuda:N`, such as "
            "`cuda:0,cuda:1`. Each has a device process, and a request runs on the "
            "one with the least queued work. By default there is one device, "
            "`QKV_DEVICE`."
        ),
    ] = None
    threads: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            description="CPU threads of one call in each worker. The last bits of some variants "
            "depend on this number. A large request whose bits do not depend on it "
            "uses as many threads as there are workers, if no other request runs.",
        ),
    ] = 1
    variants: Annotated[
        DirectoryPath | None,
        Field(
            description="Folder of your own variants: each file `NAME.py` is served as the "
            "variant `NAME`, beside those of the package. It is read and checked at "
            "the start, which a file that fails stops."
        ),
    ] = None
    max_batch: Annotated[
        int,
        Field(
            ge=0,
            le=4096,
            description="Largest number of requests in a batch. 1 turns batching off. 0 means 1 "
            "on a CPU and 64 on a GPU.",
        ),
    ] = 0
    verify_batches: Annotated[
        Literal["off", "sample", "always"],
        Field(
            description="Batches on a GPU of which some requests also run alone, to compare the "
            "bits: none (`off`), the first of each kind and size and every 1024th "
            "(`sample`), or all (`always`). A kind with other bits is not batched "
            "again with that size."
        ),
    ] = "sample"
    tf32: Annotated[
        bool,
        Field(
            description="If true, a GPU may round the factors of float32 products to 11 bits: "
            "faster, but less accurate than documented."
        ),
    ] = False
    max_body_bytes: Annotated[
        int,
        Field(
            ge=1,
            description="Largest request body, compressed and uncompressed; a larger one gets 413.",
        ),
    ] = 256 * _MiB
    max_response_bytes: Annotated[
        int, Field(ge=1, description="Largest response in tensor bytes; a larger one gets 413.")
    ] = _GiB
    max_scores: Annotated[
        int,
        Field(
            ge=1,
            description="Largest number of scores (B H L S), or equally expensive steps, of one "
            "request; more get 413.",
        ),
    ] = 1 << 34
    max_queue: Annotated[
        int,
        Field(
            ge=1,
            description="Largest number of requests that are queued or being received, per "
            "process; more get 503, or 429 beyond an API key's share.",
        ),
    ] = 1024
    max_queue_bytes: Annotated[
        int,
        Field(
            ge=1,
            description="Largest number of bytes of queued tensors, and of bodies that are being "
            "received or decompressed; more get 503 or 429. With a device "
            "process, also each worker's share of the shared memory for requests and "
            "responses.",
        ),
    ] = 4 * _GiB
    read_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Seconds to receive the head of a request, and each 64 KiB of its body; "
            "then it gets 408.",
        ),
    ] = 30.0
    write_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Seconds in which a client may read nothing of its response; then the "
            "service closes the connection.",
        ),
    ] = 30.0
    request_log: Annotated[
        Literal["off", "json"],
        Field(description="`json` writes one line of JSON per request to standard output."),
    ] = "off"
    max_queue_flops: Annotated[
        int,
        Field(
            ge=1,
            description="Largest number of queued floating-point operations; more get 503 or 429.",
        ),
    ] = 1 << 50
    request_timeout_s: Annotated[
        float,
        Field(
            ge=0,
            description="Seconds that a request may wait in the queue; then it gets 504 and is "
            "not run. 0 means no limit.",
        ),
    ] = 0.0
    drain_s: Annotated[
        int,
        Field(ge=0, description="Seconds for accepted requests to finish after SIGTERM."),
    ] = 30
    stuck_s: Annotated[
        float,
        Field(
            gt=0,
            description="Seconds without a heartbeat after which an event loop counts as stuck.",
        ),
    ] = 30.0
    stuck_device_s: Annotated[
        float,
        Field(gt=0, description="Seconds in one batch after which a device counts as stuck."),
    ] = 600.0
    checkpoints: Annotated[
        str | None,
        Field(
            description="Comma-separated `NAME=PATH`: checkpoints whose attention layers requests "
            "may name. A path is that of a `.safetensors` file, an index of several, "
            "or a folder with one of them. A name has lower-case letters, digits and "
            "`-`. By default there are none."
        ),
    ] = None
    preload: Annotated[
        bool,
        Field(
            description="If true, a GPU gets the layers of the checkpoints before the first "
            "request, as many as fit. By default it gets each at the first request "
            "that names it."
        ),
    ] = False
    max_device_layer_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="Largest number of bytes of loaded layers on each GPU. A layer that was "
            "not used for longest makes room for another one.",
        ),
    ] = 8 * _GiB
    strict_checkpoints: Annotated[
        bool,
        Field(
            description="If true, a checkpoint that cannot be loaded stops the start. By default "
            "the others are served."
        ),
    ] = False
    max_checkpoint_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="Largest number of bytes of all loaded layers, in memory that the "
            "processes share. Checked before a checkpoint is read.",
        ),
    ] = 16 * _GiB

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Reads the environment without service links: `QKV_PORT=tcp://...` is not a setting."""
        assert isinstance(env_settings, EnvSettingsSource)
        env_settings.env_vars = {
            name.lower(): value
            for name, value in os.environ.items()
            if not _is_service_link(name, value)
        }
        return init_settings, env_settings

    @field_validator("api_keys")
    @classmethod
    def _are_keys(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            parse_api_keys(value.get_secret_value())
        return value

    @field_validator("api_keys_file")
    @classmethod
    def _is_file_of_keys(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None:
            read_api_keys(value)
            if info.data.get("api_keys") is not None:
                raise ValueError("QKV_API_KEYS is set: leave one of both out")
        return value

    @field_validator("devices")
    @classmethod
    def _are_devices(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        names = _split(value)
        kinds = {name.partition(":")[0] for name in names}
        if not all(map(_DEVICE.fullmatch, names)) or len(kinds) > 1:
            raise ValueError(
                "expected cpu, cuda or cuda:N, with commas between several of one kind: requests "
                "have other bits on another kind"
            )
        if info.data.get("device") not in ("auto", *kinds):
            raise ValueError(f"QKV_DEVICE is {info.data.get('device')}: leave one of both out")
        if info.data.get("device_process") == "each":
            raise ValueError("QKV_DEVICE_PROCESS is each: leave one of both out")
        return value

    @field_validator("variants", mode="before")
    @classmethod
    def _is_folder(cls, value: object) -> object:
        if value == "":  # pathlib takes it as the current folder
            raise ValueError("expected a folder")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str | None) -> str | None:
        if value is not None and not all(map(_ORIGIN.fullmatch, _split(value))):
            raise ValueError("an origin is https://host or https://host:port in lower case, or *")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, value: str | None) -> str | None:
        if value is not None and not all(map(_HOST.fullmatch, _split(value))):
            raise ValueError("a host is a name or an address in lower case, without a port, or *")
        return value

    @field_validator("checkpoints")
    @classmethod
    def _are_checkpoints(cls, value: str | None) -> str | None:
        entries = [] if value is None else [e.partition("=") for e in _split(value)]
        if not all(_CHECKPOINT.fullmatch(name) and path for name, _, path in entries):
            raise ValueError(
                "expected NAME=PATH, with commas between several; a name has lower-case letters, "
                "digits and -"
            )
        if len({name for name, _, _ in entries}) < len(entries):
            raise ValueError("two checkpoints have the same name")
        return value

    @property
    def checkpoint_paths(self) -> dict[str, Path]:
        """The paths of the checkpoints, by name."""
        entries = [] if self.checkpoints is None else _split(self.checkpoints)
        return {name: Path(path) for name, _, path in (e.partition("=") for e in entries)}

    @property
    def has_keys(self) -> bool:
        """True if requests need a key."""
        return self.api_keys is not None or self.api_keys_file is not None

    def read_keys(self) -> list[ApiKey]:
        """Returns the API keys, those of a file as it is now; empty: no authentication.

        Raises:
            ValueError: the file is invalid.
        """
        if self.api_keys_file is not None:
            return read_api_keys(self.api_keys_file)
        return [] if self.api_keys is None else parse_api_keys(self.api_keys.get_secret_value())

    @property
    def device_names(self) -> list[str]:
        """The device of each device process, cuda:0 for cuda; empty: `devices` is not set."""
        names = [] if self.devices is None else _split(self.devices)
        return ["cuda:0" if name == "cuda" else name for name in names]

    @property
    def origins(self) -> list[str]:
        """The origins whose pages may send requests."""
        return [] if self.cors_origins is None else _split(self.cors_origins)

    @property
    def hosts(self) -> list[str]:
        """The names that requests may have as `Host`, besides those of the machine."""
        return [] if self.allowed_hosts is None else _split(self.allowed_hosts)

    @property
    def traces(self) -> bool:
        """True if OpenTelemetry's environment variables enable traces.

        Raises:
            ValueError: they require an unsupported exporter or protocol.
        """
        return is_tracing_enabled(os.environ)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _is_service_link(name: str, value: str) -> bool:
    """Returns True if Kubernetes adds such a variable for a Service; no setting has such a name."""
    return bool(_SERVICE_LINK.fullmatch(name) or _SERVICE_URL.match(value))


def find_unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns the variables with the prefix QKV_ that are neither settings nor service links.

    Raises:
        ValueError: a name is close to that of a setting, which the message names.
    """
    known = [_PREFIX + name.upper() for name in Settings.model_fields]
    unknown = sorted(
        name
        for name, value in environment.items()
        # pydantic ignores their case
        if name.upper().startswith(_PREFIX)
        and name.upper() not in {*known, *_CLI_VARIABLES}
        and not _is_service_link(name, value)
    )
    for name in unknown:
        if close := get_close_matches(name.upper(), known, n=1, cutoff=0.8):
            raise ValueError(f"{name} is not a setting; did you mean {close[0]}?")
    return unknown
