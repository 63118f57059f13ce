"""Measures the cost of one request in each process, and computes the needs of a million a second.

Every response is compared with the expected bytes.

    python bench/capacity.py [--seconds 2] [--quick] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import httpx
import torch
from bodies import SHAPES, tensors_of
from capacity_model import FIRST_FORM, Cost, Prediction, predict_rate
from capacity_tables import build_tables
from load import BenchRequest, load
from service import Service, running_service
from tables import RESULTS, Results, add_options, describe_machine, finish
from torch import Tensor

from qkv.attention.catalogue import find
from qkv.client.request_builders import build_attend
from qkv.server.process import usable_cpus

PAGE: Final = RESULTS / "capacity.md"
FORMS: Final = {
    FIRST_FORM: ("float32", False),
    "q, k, v in bfloat16": ("bfloat16", False),
    "x and a layer in float32": ("float32", True),
    "x and a layer in bfloat16": ("bfloat16", True),
}
"""dtype, and whether a layer projects x, by the name in tables."""

_SHAPES: Final = SHAPES | {"32 × M": (32, 8, 128, 64)}
_TIMEOUT_S: Final = 60.0
_ROUNDINGS: Final = {torch.float32: 64, torch.bfloat16: 8}
_REQUESTS: Final = re.compile(r"^qkv_requests_total\{.*\} (\S+)", re.MULTILINE)


class Plan(NamedTuple):
    """Cells to measure; `seconds` is the time of a round."""

    seconds: float = 2.0
    rounds: int = 3
    shapes: tuple[str, ...] = tuple(_SHAPES)
    workers: tuple[int, ...] = (1, 2)
    clients: int = 16


QUICK: Final = Plan(0.2, 1, ("S",), (1,), 2)


class Form(NamedTuple):
    """A request, the bytes of its response's body, and the operations of its run."""

    request: BenchRequest
    bytes_out: int
    flops: int


def build_form(address: tuple[str, int], shape: str, name: str) -> Form:
    """Returns a request of a form, after one request that checks it.

    Raises:
        AssertionError: the error of the response exceeds the roundings of its dtype.
    """
    B, H, L, D = _SHAPES[shape]
    dtype_name, has_layer = FORMS[name]
    inputs, layer, heads_BHLD = (_build_layer if has_layer else _build_heads)(
        _SHAPES[shape], getattr(torch, dtype_name)
    )
    spec = build_attend("softmax", layer, ["output"], "none", inputs)
    response = httpx.post(
        f"http://{address[0]}:{address[1]}{spec.path}",
        content=spec.content,
        headers=spec.headers,
        timeout=_TIMEOUT_S,
    )
    output = spec.parse(response).output
    query, key, value = heads_BHLD
    arguments = {"query_BHLD": query, "key_BGSD": key, "value_BGSE": value}
    expected = find("softmax").reference(**arguments).output
    assert expected is not None
    _check(output, expected.transpose(1, 2).flatten(-2) if layer else expected, heads_BHLD[2])
    request = BenchRequest(
        spec.path,
        spec.headers,
        spec.content,
        expected_bytes=response.content[-output.nbytes :],
        is_at_end=True,
    )
    projections = 6 * B * L * (H * D) ** 2 if layer else 0
    return Form(request, len(response.content), 4 * B * H * L * L * D + projections)


_Inputs = tuple[dict[str, Tensor], dict[str, Any] | None, list[Tensor]]
"""Inputs and layer of a request, and query, key and value of its attention in float64."""


def _build_heads(shape: tuple[int, ...], dtype: torch.dtype) -> _Inputs:
    inputs = {name: each.to(dtype) for name, each in tensors_of(shape).items()}
    return inputs, None, [each.double() for each in inputs.values()]


def _build_layer(shape: tuple[int, ...], dtype: torch.dtype) -> _Inputs:
    B, H, L, D = shape
    M, draw = H * D, torch.Generator().manual_seed(0)
    x_BLM = torch.randn((B, L, M), generator=draw).to(dtype)
    weights_MM = {
        f"W_{role}.weight": (torch.randn((M, M), generator=draw) / M**0.5).to(dtype)
        for role in ("query", "key", "value")
    }
    projected = [x_BLM.double() @ each.double().T for each in weights_MM.values()]
    heads_BHLD = [each.unflatten(-1, (H, D)).transpose(1, 2) for each in projected]
    return {"x": x_BLM}, {"layout": "v2", "heads": H, "tensors": weights_MM}, heads_BHLD


def _check(output: Tensor, expected: Tensor, value_BHLD: Tensor) -> None:
    """Asserts that an output equals the reference, up to the roundings of its dtype."""
    bound = _ROUNDINGS[output.dtype] * torch.finfo(output.dtype).eps * float(value_BHLD.abs().max())
    error = float((output.double() - expected).abs().max())
    assert error <= bound, f"output is wrong: got error {error:.3g}, expected <= {bound:.3g}"


def measure_costs(plan: Plan) -> Iterator[Cost]:
    """Measures every form of request on one worker with a device process."""
    with running_service(QKV_WORKERS="1", QKV_DEVICE_PROCESS="one", QKV_THREADS="1") as service:
        for shape in plan.shapes:
            for name, (dtype, _) in FORMS.items():
                form = build_form(service.address, shape, name)
                rounds = [_measure(service, form.request, plan) for _ in range(plan.rounds)]
                yield Cost(
                    shape, name, dtype, len(form.request.body), form.bytes_out, form.flops,
                    [each.http for each in rounds], [each.device for each in rounds],
                )  # fmt: skip


def measure_predictions(plan: Plan) -> Iterator[Prediction]:
    """Predicts the rates of workers from costs of one request with one worker; measures them."""
    for shape in (each for each in plan.shapes if each in SHAPES):
        costs: RequestTimes | None = None
        for workers in plan.workers:
            with running_service(QKV_WORKERS=str(workers), QKV_THREADS="1") as service:
                request = build_form(service.address, shape, FIRST_FORM).request
                costs = costs or _measure(service, request, plan)
                rates = [
                    load(service.address, request, plan.seconds, plan.clients).rate
                    for _ in range(plan.rounds)
                ]
            predicted = predict_rate(workers, usable_cpus(), costs.http, costs.client)
            yield Prediction(shape, workers, predicted, rates)


class RequestTimes(NamedTuple):
    """CPU seconds of one request: in the HTTP workers, device processes and clients."""

    http: float
    device: float
    client: float


def _measure(service: Service, request: BenchRequest, plan: Plan) -> RequestTimes:
    """Measures the CPU time of a request; that of the warm-up is divided by all requests."""
    before, count = service.cpu_s, _count_requests(service.address)
    result = load(service.address, request, plan.seconds, plan.clients)
    after, count = service.cpu_s, _count_requests(service.address) - count
    return RequestTimes(
        (after.http - before.http) / count,
        (after.device - before.device) / count,
        result.cpu_s / len(result.timings),
    )


def _count_requests(address: tuple[str, int]) -> int:
    """Returns the number of requests that the service has run."""
    text = httpx.get(f"http://{address[0]}:{address[1]}/metrics", timeout=_TIMEOUT_S).text
    return round(sum(map(float, _REQUESTS.findall(text))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the tables, and writes them on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--seconds", type=float, help="seconds of each round")
    parser.add_argument("--quick", action="store_true", help="measure few cells for a moment")
    add_options(parser)
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    plan = plan._replace(seconds=options.seconds or plan.seconds)
    header = describe_machine(
        CPUs=f"{usable_cpus()} for service and clients",
        variant="softmax, cpu, safetensors",
        clients=f"{plan.clients} on the same host",
        shapes=", ".join(f"{name} {shape}" for name, shape in _SHAPES.items()),
        rounds=f"{plan.rounds} of {plan.seconds:g} s: median (least–largest)",
        warm_up="every connection in each round; predictions are from one round",
    )
    tables = build_tables(list(measure_costs(plan)), list(measure_predictions(plan)))
    finish(Results("make capacity", header, tables), PAGE, options)


if __name__ == "__main__":
    main()
