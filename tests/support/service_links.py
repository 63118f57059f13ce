"""Variables that the kubelet adds to a container for each Service of its namespace."""

from __future__ import annotations


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
