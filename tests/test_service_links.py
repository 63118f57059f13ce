"""Tests of variables that Kubernetes adds for Services, beside settings and wrong names of them."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from qkv.cli.main import main
from qkv.settings import Settings, find_unknown_variables
from support.examples import examples
from support.processes import Process


def links(name: str, address: str, *ports: tuple[str, int, str]) -> dict[str, str]:
    """Returns the variables of a Service.

    Args:
        name: its name.
        address: its cluster IP.
        ports: name (may be empty), number and protocol of each port.
    """
    prefix = name.upper().replace("-", "_")
    host = f"[{address}]" if ":" in address else address
    variables = {f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": str(ports[0][1])}
    _, first, protocol = ports[0]
    variables[f"{prefix}_PORT"] = f"{protocol.lower()}://{host}:{first}"
    for port_name, number, protocol in ports:
        if port_name:
            key = port_name.upper().replace("-", "_")
            variables[f"{prefix}_SERVICE_PORT_{key}"] = str(number)
        link = f"{prefix}_PORT_{number}_{protocol}"
        variables |= {
            link: f"{protocol.lower()}://{host}:{number}",
            f"{link}_PROTO": protocol.lower(),
            f"{link}_PORT": str(number),
            f"{link}_ADDR": address,
        }
    return variables


# The example of Kubernetes' documentation, with another name of the Service.
DOCUMENTED = {
    "QKV_PRIMARY_SERVICE_HOST": "10.0.0.11",
    "QKV_PRIMARY_SERVICE_PORT": "6379",
    "QKV_PRIMARY_PORT": "tcp://10.0.0.11:6379",
    "QKV_PRIMARY_PORT_6379_TCP": "tcp://10.0.0.11:6379",
    "QKV_PRIMARY_PORT_6379_TCP_PROTO": "tcp",
    "QKV_PRIMARY_PORT_6379_TCP_PORT": "6379",
    "QKV_PRIMARY_PORT_6379_TCP_ADDR": "10.0.0.11",
}
NAMESPACE = (
    links("qkv", "10.96.7.1", ("http", 80, "TCP"))
    | links("qkv-workers", "fd00:10:96::1f", ("http", 80, "TCP"), ("metrics-2", 9090, "UDP"))
    | links("qkv-host", "10.96.7.2", ("", 443, "SCTP"))
    | links("kubernetes", "10.96.0.1", ("https", 443, "TCP"))
)
PORTS = st.tuples(
    st.from_regex(r"(?:[a-z0-9]([a-z0-9-]*[a-z0-9])?)?", fullmatch=True),
    st.integers(1, 65535),
    st.sampled_from(["TCP", "UDP", "SCTP"]),
)
SERVICES = st.builds(
    lambda name, address, ports: links(name, str(address), *ports),
    st.from_regex(r"qkv(-([a-z0-9-]*[a-z0-9]))?", fullmatch=True),
    st.ip_addresses(),
    st.lists(PORTS, min_size=1, max_size=4),
)


def test_documented_variables_are_no_settings() -> None:
    assert links("qkv-primary", "10.0.0.11", ("", 6379, "TCP")) == DOCUMENTED
    assert find_unknown_variables(DOCUMENTED) == []


@pytest.mark.slow
@examples(300)
@given(SERVICES)
def test_variables_of_any_service_are_no_settings(variables: dict[str, str]) -> None:
    assert find_unknown_variables(variables) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("QKV_COLOUR", "http://10.0.0.1:80"),
        ("QKV_COLOUR", "10.0.0.1"),
        ("QKV_SERVICE_HOST_", "10.0.0.1"),
        ("QKV_SERVICE_PORT_", "80"),
        ("QKV_PORT_HTTP_TCP", "80"),
        ("QKV_PORT_80_ICMP", "80"),
        ("QKV_PORT_80_TCP_NAME", "http"),
    ],
)
def test_variable_of_another_form_is_unknown(name: str, value: str) -> None:
    assert find_unknown_variables({name: value}) == [name]


def test_settings_skip_service_links_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NAMESPACE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("QKV_WORKERS", "3")
    assert Settings() == Settings(workers=3)
    assert Settings().port == 8000
    monkeypatch.setenv("qkv_port", "9000")  # a setting in any case
    assert Settings().port == 9000
    assert Settings(port=1).port == 1


@pytest.mark.parametrize("value", ["http://10.0.0.1:80", "10.0.0.1:80", ""])
def test_port_that_is_no_service_link_is_refused_by_name(value: str) -> None:
    failed = CliRunner().invoke(main, ["serve"], env={"QKV_PORT": value})
    assert failed.exit_code == 1
    assert failed.stderr.startswith("Error: setting port (QKV_PORT) is ")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("QKV_WORKER", "QKV_WORKERS"),
        ("QKV_PROT", "QKV_PORT"),
        ("qkv_threads_", "QKV_THREADS"),
        ("QKV_MAX_BATCHES", "QKV_MAX_BATCH"),
    ],
)
def test_name_close_to_a_setting_is_refused_beside_other_variables(name: str, meant: str) -> None:
    environment = NAMESPACE | {"QKV_COLOUR": "red", name: "2"}
    failed = CliRunner().invoke(main, ["serve", "--port", "0"], env=environment)
    assert failed.exit_code == 1
    assert failed.stderr == f"Error: {name} is not a setting; did you mean {meant}?\n"


def test_service_starts_beside_services_of_similar_names(command: Callable[..., Process]) -> None:
    unknown = {"QKV_COLOUR": "red", "QKV_SERVICE_HOST_": "here"}
    served = command("serve", "--port", "0", "--workers", "1", **NAMESPACE, **unknown)
    assert httpx.get(f"{served.url}/readyz").status_code == 200
    assert served.end() == 0
    warnings = [line for line in served.lines if line.startswith("Warning: ")]
    assert warnings == [f"Warning: {name} is not a setting and has no effect" for name in unknown]
    assert served.lines[: len(warnings)] == warnings
