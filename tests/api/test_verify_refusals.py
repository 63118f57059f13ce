"""POST /v1/verify refuses changed cases, large cases and invalid requests, always with 4xx."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from qkv.api.endpoints.verify import MAX_BODY_BYTES
from qkv.attention import catalogue
from qkv.errors import InvalidContent
from qkv.testing import families
from qkv.testing.case_limits import MAX_HEADS, MAX_NUMBERS, MAX_PRODUCTS
from qkv.testing.case_spec import CaseSpec
from support.drawn_cases import PATH, arrays, draw, judge, post_outputs, softmax
from support.known_requests import Array, assert_problem
from support.service import Server

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")


@pytest.mark.parametrize(
    ("change", "pointer"),
    [({"seed": 2}, "/digest"), ({"digest": "0"}, "/digest"), ({"family": "mask"}, "/digest"),
     ({"sizes": {"L": 5}}, "/digest"), ({"variant": "linear"}, "/variant")],
)  # fmt: skip
def test_changed_case_is_refused(server: Server, change: dict[str, object], pointer: str) -> None:
    case = draw(server.http, seed=1, sizes={"L": 4}, encoding="base64")
    response = post_outputs(server.http, case["case"] | change, {"output": softmax(arrays(case))})
    assert assert_problem(response, 422)["pointer"] == f"/case{pointer}"


def test_case_whose_inputs_are_drawn_differently_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of torch may draw other numbers from the same seed."""
    case = draw(server.http, encoding="base64")
    drawn = families.FAMILIES["normal"]
    monkeypatch.setitem(
        families.FAMILIES,
        "normal",
        drawn._replace(change=lambda tensors, *_: tensors["query"].mul_(2)),
    )
    response = post_outputs(server.http, case["case"], {"output": softmax(arrays(case))})
    problem = assert_problem(response, 422)
    assert problem["pointer"] == "/case/digest"
    assert "which this version draws" in problem["detail"]


@pytest.mark.parametrize(
    ("sizes", "variant"),
    [
        ({"B": 10**12}, "softmax"), ({"S": 2**62, "L": 2**62, "H": 2**62}, "softmax"),
        ({"D": 257}, "softmax"), ({"E": 257}, "softmax"), ({"H": MAX_HEADS + 1, "B": 1}, "softmax"),
        ({"B": 1, "H": 1, "L": 257, "S": 256, "D": 64}, "softmax"),
        ({"B": 1, "H": 1, "L": 1, "S": MAX_NUMBERS // 128, "D": 64}, "softmax"),
        ({"S": 2**11}, "mean"), ({"I": 10**9}, "linear_layer"), ({"O": 10**9}, "linear_layer"),
        ({"L": 1, "S": 1024, "B": 1, "H": 1, "D": 4}, "linformer"),
    ],
)  # fmt: skip
def test_case_that_is_too_large_is_not_drawn(
    server: Server, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], variant: str
) -> None:
    monkeypatch.delattr(families, "_draw_floats")  # private: every family draws by it
    path = f"/v1/verify/{variant}"
    response = server.http.post(path, json={"sizes": sizes})
    assert assert_problem(response, 413)["pointer"] == "/sizes"
    case = {"variant": variant, "sizes": sizes, "seed": 1, "digest": ""}
    response = server.http.post(path, json={"case": case, "outputs": {"output": [1]}})
    assert assert_problem(response, 413)["pointer"] == "/case/sizes"


@pytest.mark.parametrize("variant", catalogue.variants())
def test_usual_sizes_of_every_family_are_within_the_limits(variant: str) -> None:
    for name in families.FAMILIES:
        # the two projections of linformer have S / 4 rows of S numbers
        sizes = {"S": 512} if (variant, name) == ("linformer", "long sum") else {}
        try:
            CaseSpec(variant, name, sizes=sizes, seed=1).draw()
        except InvalidContent as error:  # the variant has no such cases
            assert error.pointer == "/family"  # noqa: PT017 (most families are drawn)


def test_largest_case_is_drawn_and_judged(server: Server) -> None:
    sizes = {"B": 1, "H": 1, "L": 256, "S": 256, "D": 64}
    assert 256 * 256 * 64 == MAX_PRODUCTS
    case = draw(server.http, sizes=sizes, encoding="base64")
    assert judge(server.http, case, output=softmax(arrays(case)))["passed"] is True


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        (lambda x: {}, "/outputs/output"),
        (lambda x: {"output": x, "out": x}, "/outputs/out"),
        (lambda x: {"output": np.concatenate([x, x])}, "/outputs/output"),
        (lambda x: {"output": x > 0}, "/outputs/output"),
        (lambda x: {"output": x, "grad_mask": x}, "/outputs/grad_query"),
    ],
)
def test_outputs_that_do_not_fit_the_case_are_refused_before_they_are_judged(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Array], dict[str, Array]],
    pointer: str,
) -> None:
    case = draw(server.http, seed=1, sizes={"L": 4}, encoding="base64")
    output = softmax(arrays(case))
    monkeypatch.delattr("qkv.testing.verification.find_truth")
    problem = assert_problem(post_outputs(server.http, case["case"], change(output)), 422)
    assert problem["pointer"] == pointer


def test_lists_that_do_not_fit_are_refused(server: Server) -> None:
    case = draw(server.http, dtype="float16", sizes={"B": 1, "H": 1, "L": 1, "E": 2})
    for output in ([[[[1, 1e9]]]], [[[[True, False]]]], [[[["x", 1]]]], [[[[1]]]], 1, None, "x"):
        body = {"case": case["case"], "outputs": {"output": output}}
        problem = assert_problem(server.http.post(PATH, json=body), 422)
        assert problem["pointer"].startswith("/outputs/output")


def test_unknown_variant_is_not_found(server: Server) -> None:
    assert_problem(server.http.post("/v1/verify/sotfmax", json={}), 404)
    assert_problem(server.http.get(PATH), 405)


def test_body_that_is_too_large_is_refused(server: Server) -> None:
    response = server.http.post(PATH, content=bytes(MAX_BODY_BYTES + 1))
    assert assert_problem(response, 413)["limit"] == MAX_BODY_BYTES
