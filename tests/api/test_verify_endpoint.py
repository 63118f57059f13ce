"""POST /v1/verify draws cases and judges outputs: verdicts, formats, deadlines."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch

from qkv.api import case_messages
from qkv.attention import catalogue
from qkv.client.arrays import to_raw
from qkv.testing import families
from qkv.wire import safetensors
from support.drawn_cases import PATH, arrays, draw, in_safetensors, judge, post_outputs, softmax
from support.known_requests import FLOATING, Array, as_array, assert_problem
from support.processes import TIMEOUT_S, wait_until
from support.service import Server, running_server

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")

FILE: Final = {"Content-Type": safetensors.MEDIA_TYPE}
FIGURES: Final = {"passed", "error", "budget", "worst_index", "diagnosis"}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("normal", "float64"), ("mask", "float32"), ("grouped heads", "float16"),
     ("long sum", "bfloat16")],
)  # fmt: skip
def test_right_output_passes(server: Server, family: str, dtype: str) -> None:
    parameters = {"causal": True} if family == "normal" else {}
    case = draw(server.http, family=family, dtype=dtype, parameters=parameters, encoding="base64")
    verdict = judge(server.http, case, output=softmax(arrays(case), **parameters))
    assert verdict.keys() >= FIGURES
    assert verdict["passed"] is True
    assert verdict["diagnosis"] == []
    assert verdict["result"] == "output"
    assert 0 <= verdict["units"] <= 1
    assert len(verdict["worst_index"]) == 4
    assert verdict["cosine"] > 0.999
    assert verdict["torch_units"] <= 1
    assert verdict["results"]["output"] == {
        n: x for n, x in verdict.items() if n not in ("diagnosis", "result", "results")
    }


def test_wrong_output_fails_and_its_bug_is_named(server: Server) -> None:
    case = draw(server.http, parameters={"causal": True}, encoding="base64")
    verdict = judge(server.http, case, output=softmax(arrays(case)))
    assert verdict["passed"] is False
    assert verdict["diagnosis"] == ["causal-missing"]
    assert verdict["error"] > verdict["budget"] > 0
    assert verdict["units"] == pytest.approx(verdict["error"] / verdict["budget"])
    assert abs(verdict["got"] - verdict["expected"]) == pytest.approx(verdict["error"])


def test_numbers_that_are_not_finite_are_judged(server: Server) -> None:
    case = draw(server.http, encoding="base64")
    output = softmax(arrays(case))
    for number, got in ((np.nan, "NaN"), (np.inf, "Infinity"), (-np.inf, "-Infinity")):
        output[1, 2, 3, 4] = number
        verdict = judge(server.http, case, output=output)
        assert (verdict["passed"], verdict["worst_index"]) == (False, [1, 2, 3, 4])
        assert (verdict["error"], verdict["units"], verdict["got"]) == (
            "Infinity",
            "Infinity",
            got,
        )
        assert verdict["cosine"] is None


def test_wrong_gradient_fails_and_is_the_one_described(server: Server) -> None:
    case = draw(server.http, gradients=True, encoding="base64")
    inputs = arrays(case)
    names = ("query", "key", "value")
    query, key, value = leaves = [torch.tensor(inputs[n], requires_grad=True) for n in names]
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    output.backward(torch.tensor(inputs["grad_output"]))
    results: dict[str, Array] = {"output": output.detach().numpy()}
    for name, leaf in zip(names, leaves, strict=True):
        assert leaf.grad is not None
        results[f"grad_{name}"] = leaf.grad.numpy()
    verdict = judge(server.http, case, **results)
    assert verdict["passed"] is True
    assert verdict["results"].keys() == results.keys()
    results["grad_key"] = results["grad_key"] * 2
    verdict = judge(server.http, case, **results)
    assert (verdict["passed"], verdict["result"]) == (False, "grad_key")
    assert verdict["results"]["output"]["passed"] is True
    del results["grad_value"]
    problem = assert_problem(post_outputs(server.http, case["case"], results), 422)
    assert problem["pointer"] == "/outputs/grad_value"


def test_seeds_that_the_service_draws_differ(server: Server) -> None:
    cases = [draw(server.http), draw(server.http), draw(server.http, seed=None)]
    assert len({str(case["inputs"]) for case in cases}) == 3
    again = draw(server.http, seed=cases[0]["case"]["seed"])
    assert again == cases[0]


def test_given_seed_draws_the_inputs_of_the_python_library(server: Server) -> None:
    fields: dict[str, Any] = {
        "seed": 7,
        "family": "mask",
        "dtype": "bfloat16",
        "sizes": {"B": 1, "S": 20},
    }
    case = draw(server.http, **fields, parameters={"causal": True}, encoding="base64")
    call = families.draw(
        catalogue.find("softmax"), "mask", torch.bfloat16,
        parameters={"causal": True}, sizes={"B": 1, "S": 20}, seed=7,
    )  # fmt: skip
    assert {n: case["case"][n] for n in fields} == fields
    assert case["inputs"].keys() == call.inputs.keys()
    for name, x in call.inputs.items():
        sent = as_array(case["inputs"][name])
        assert str(sent.dtype) == str(x.dtype)[6:]
        assert sent.tobytes() == to_raw(x).data.tobytes()


def test_lists_get_the_dtype_of_the_case(server: Server) -> None:
    case = draw(server.http, dtype="bfloat16", sizes={"L": 4})
    assert isinstance(case["inputs"]["query"], list)
    inputs = {n: np.array(x) for n, x in case["inputs"].items()}
    lists = {"output": softmax(inputs).tolist()}
    response = server.http.post(PATH, json={"case": case["case"], "outputs": lists})
    assert response.json()["passed"] is True, response.text


@pytest.mark.parametrize("dtype", FLOATING)
def test_files_have_the_same_numbers_as_json(server: Server, dtype: str) -> None:
    fields: dict[str, Any] = {"seed": 3, "dtype": dtype, "family": "mask"}
    in_json = draw(server.http, **fields, encoding="base64")
    response = server.http.post(PATH, content=in_safetensors(fields, {}), headers=FILE)
    assert response.headers["content-type"] == safetensors.MEDIA_TYPE
    file = safetensors.decode(response.content, "inputs")
    assert file.fields["case"] == in_json["case"]
    inputs = {name: raw.numpy() for name, raw in file.tensors.items()}
    for name, x in arrays(in_json).items():
        assert x.tobytes() == inputs[name].tobytes()
    outputs = {"output": to_raw(softmax(inputs))}
    body = in_safetensors({"case": file.fields["case"]}, outputs)
    verdict = server.http.post(PATH, content=body, headers=FILE)
    assert verdict.headers["content-type"] == "application/json"
    assert verdict.json()["passed"] is True
    refused = server.http.post(
        PATH, content=body, headers=FILE | {"Accept": safetensors.MEDIA_TYPE}
    )
    assert_problem(refused, 406)


class BlockedThread:
    """Keeps the thread of a service in the first case until `release`; counts the cases."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.release, self.count = threading.Event(), threading.Event(), 0
        real = case_messages.draw_case

        def draw_case(*arguments: Any) -> Any:
            self.count += 1
            self.started.set()
            assert self.release.wait(TIMEOUT_S)
            return real(*arguments)

        monkeypatch.setattr("qkv.api.endpoints.verify.draw_case", draw_case)


def test_waiting_case_ends_with_its_deadline_or_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = BlockedThread(monkeypatch)
    with running_server() as server, httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as other:
        first = threading.Thread(target=lambda: other.post(PATH, json={}))
        first.start()
        assert blocked.started.wait(TIMEOUT_S)
        late = server.http.post(PATH, json={}, headers={"X-Request-Timeout": "0.01"})
        assert_problem(late, 504)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + PATH, json={}, timeout=0.2)
        assert server.http.get("/livez").status_code == 200  # the event loop is free
        blocked.release.set()
        first.join(TIMEOUT_S)
        assert draw(server.http)["case"]
        assert blocked.count == 2  # neither the late request nor that of the gone client


def test_case_whose_deadline_has_passed_does_not_begin(server: Server) -> None:
    response = server.http.post(PATH, json={}, headers={"X-Request-Timeout": "1e-9"})
    assert_problem(response, 504)


def test_too_many_waiting_cases_get_503(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = BlockedThread(monkeypatch)
    # private: the limit is no setting, and to reach it takes too many clients
    monkeypatch.setattr("qkv.api.work_threads._MAX_ACCEPTED", 2)

    with running_server() as server, ThreadPoolExecutor(5) as threads:
        posts = [
            threads.submit(httpx.post, server.url + PATH, json={}, timeout=TIMEOUT_S)
            for _ in range(5)
        ]
        wait_until(lambda: sum(post.done() for post in posts) == 3)
        for post in posts:
            if post.done():
                assert_problem(post.result(), 503)
                assert int(post.result().headers["retry-after"]) > 0
        blocked.release.set()
        assert sorted(p.result().status_code for p in posts) == [200, 200, 503, 503, 503]


def test_request_is_counted_and_has_an_id(server: Server) -> None:
    def counted() -> float:
        text = server.http.get("/metrics").text
        return float(re.findall(r'^qkv_other_requests_total{outcome="ok"} (.*)$', text, re.M)[0])

    before = counted()
    response = server.http.post(PATH, json={}, headers={"X-Request-ID": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert counted() >= before + 2  # with that of /metrics


def test_another_service_judges_a_case(server: Server, serve: Callable[..., Server]) -> None:
    """A case holds all that a judge needs: no secret, and no memory of its first request."""
    case = draw(server.http, sizes={"L": 4}, encoding="base64")
    output = softmax(arrays(case))
    assert judge(serve().http, case, output=output)["passed"] is True


def test_case_may_be_written_by_hand(server: Server) -> None:
    """Fields that a case lacks have the defaults of a request that draws one."""
    case = draw(server.http, seed=1, encoding="base64")
    short = {name: case["case"][name] for name in ("variant", "seed", "digest")}
    response = post_outputs(server.http, short, {"output": softmax(arrays(case))})
    assert response.json()["passed"] is True, response.text
