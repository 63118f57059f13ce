"""Start of the service: finds the devices, binds the socket, and runs the supervisor.

`serve` is the entry point of `qkv serve`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

import click

from qkv.api.app import build_models, load_layers, new_shared_state
from qkv.api_keys import ValidApiKeys
from qkv.engine import own_variants
from qkv.engine.admission import EXCESS
from qkv.engine.device.selection import find_device
from qkv.engine.remote.shared_memory import SharedMemory
from qkv.errors import QkvError
from qkv.jobs.loaded.loaded_layers import LoadedLayers
from qkv.server import listener
from qkv.server.process import limit_malloc_arenas, usable_cpus
from qkv.server.supervisor import Supervisor
from qkv.settings import Settings


def serve(settings: Settings) -> int:
    """Serves until SIGINT, SIGTERM, or SIGHUP without a file of keys; then completes the accepted
    requests.

    Returns:
        The exit status: 0 after a clean stop.
    """
    _load_tracing(settings)
    limit_malloc_arenas()
    ports = [settings.port, *filter(None, [settings.metrics_port])]
    sockets = [listener.listen(settings.host, port, settings.write_timeout_s) for port in ports]
    devices = _find_devices(settings)
    if settings.variants is not None:
        _add_variants(settings.variants)
    is_cpu = devices[0] == "cpu"
    # on GPUs, a worker reads requests as fast as one device runs them
    workers = settings.workers or (usable_cpus() if is_cpu else min(len(devices), usable_cpus()))
    has_device_processes = bool(settings.device_names) or (
        settings.device_process == "one"
        or (settings.device_process == "auto" and not is_cpu and workers > 1)
    )
    layers = _load_layers(settings)
    device_names = devices if has_device_processes else ()
    state = new_shared_state(settings, workers, device_names, layers.names)
    shared_memory = (
        _new_shared_memory(workers, _region_bytes(settings)) if has_device_processes else None
    )
    api_keys = ValidApiKeys(settings.read_keys) if settings.has_keys else None
    build_models()
    return Supervisor(settings, sockets, state, devices, layers, api_keys, shared_memory).run()


def _load_tracing(settings: Settings) -> None:
    """Imports OpenTelemetry before the fork, if the environment enables traces."""
    try:
        if settings.traces:
            import_module("qkv.telemetry.tracing")
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"OTEL_* in the environment enables traces, but {error.name} is not installed: "
            "pip install '.[tracing]', or set OTEL_SDK_DISABLED=true"
        ) from None


def _add_variants(folder: Path) -> None:
    """Adds the variants of a folder, before the workers are forked.

    Raises:
        click.ClickException: one of them fails its checks.
        QkvError: a file cannot be used.
    """
    variants = own_variants.add_folder(folder)
    lines = _forked_lines(lambda: map(own_variants.failure, variants))
    if len(lines) < len(variants):
        lines.append(f"{variants[len(lines)].module.__file__} ends the process that checks it")
    if failures := list(filter(None, lines)):
        raise click.ClickException("; ".join([*failures, "the service does not start"]))


def _load_layers(settings: Settings) -> LoadedLayers:
    """Returns the layers of the checkpoints, in memory that the forked processes share.

    Raises:
        click.ClickException: a checkpoint stops the start.
    """
    try:
        return load_layers(settings)
    except (ValueError, QkvError) as error:
        raise click.ClickException(str(error)) from None


def _region_bytes(settings: Settings) -> int:
    """Returns the bytes of a worker's queue; several keys may fill more than one alone."""
    return settings.max_queue_bytes * (EXCESS if settings.has_keys else 1)


def _new_shared_memory(regions: int, size: int) -> SharedMemory:
    try:
        return SharedMemory(regions, size)
    except OSError as error:
        raise click.ClickException(
            f"cannot allocate shared memory of {regions} times {size} bytes, for the queues of "
            "QKV_MAX_QUEUE_BYTES: "
            f"{error.strerror}"
        ) from None


def _find_devices(settings: Settings) -> list[str]:
    """Returns the names of the devices that the service will use; at least one.

    Raises:
        click.ClickException: torch finds no such device.
    """
    names = settings.device_names or [settings.device]
    devices = _forked_lines(lambda: (str(find_device(name)) for name in names))
    if len(devices) < len(names):
        setting = f"QKV_DEVICES has {names[len(devices)]}"
        if not settings.device_names:
            setting = f"QKV_DEVICE is {settings.device}"
        raise click.ClickException(f"{setting}, but torch finds no such device")
    return devices


def _forked_lines(lines: Callable[[], Iterable[str]]) -> list[str]:
    """Returns the lines that a function yields in a forked process, until that ends or fails.

    If the supervisor itself initialised a driver or started threads, its other forks could not use
    them; and code that ends its process would end the service without a word.
    """
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        with contextlib.suppress(BaseException):
            for line in lines():
                os.write(writer, f"{' '.join(line.split())}\n".encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text.splitlines()
