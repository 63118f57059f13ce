"""What an operator may set: one frozen class, read from the environment with the prefix QKV_."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Final, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["Settings", "refuse_unknown"]

_PREFIX: Final = "QKV_"
_OTHERS: Final = {"QKV_URL"}  # the asking commands' own

_MiB = 1 << 20
_GiB = 1 << 30


class Settings(BaseSettings):
    """Settings of the service. Each is `QKV_` and its name in capitals in the environment."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="forbid")

    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Field(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    ] = 8000
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
        Field(ge=1, description="Most scores (B H L S) that one request may compute; more is 413."),
    ] = 1 << 36
    max_queue_bytes: Annotated[
        int, Field(ge=1, description="Tensor bytes that may wait; more is 503.")
    ] = 4 * _GiB
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


def refuse_unknown(environment: Iterable[str]) -> None:
    """Refuses a variable that looks like a setting and is none, which would change nothing.

    Raises:
        ValueError: it says which, and the setting that was meant, or all there are.
    """
    known = [_PREFIX + name.upper() for name in Settings.model_fields]
    for name in sorted(environment):
        # pydantic reads them whatever their case
        if name.upper().startswith(_PREFIX) and name.upper() not in {*known, *_OTHERS}:
            close = get_close_matches(name.upper(), known, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ValueError(f"{name} is no setting; {hint}")
