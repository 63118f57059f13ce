"""OpenTelemetry's environment variables: they enable traces.

The module needs no package, so that a service without traces starts fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_OTLP: Final = "EXPORTER_OTLP"
_OTEL: Final = (
    *("SDK_DISABLED", "TRACES_EXPORTER", f"{_OTLP}_ENDPOINT", f"{_OTLP}_TRACES_ENDPOINT"),
    *(f"{_OTLP}_PROTOCOL", f"{_OTLP}_TRACES_PROTOCOL"),
)


def is_tracing_enabled(environment: Mapping[str, str]) -> bool:
    """Returns True if OpenTelemetry's environment variables enable traces.

    Raises:
        ValueError: they require an unsupported exporter or protocol.
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
            "OTEL_TRACES_EXPORTER is not supported: "
            f"got {variables['TRACES_EXPORTER']}, expected otlp or none"
        )
    if protocol != "http/protobuf":
        raise ValueError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is not supported: got {protocol}, expected http/protobuf"
        )
    return True
