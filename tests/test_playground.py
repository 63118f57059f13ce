"""The playground in Chromium: every variant, every control, every kind of error."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pytest
from browser import Open, drawn, weights_shown
from conftest import Server
from playwright.sync_api import Request, expect

from qkv import catalogue

PARAMETERS: Final = [
    (name, parameter)
    for name, variant in catalogue.variants().items()
    for parameter in variant.parameters.model_fields
]


def test_it_opens_with_six_words_drawn(open_page: Open, server: Server) -> None:
    page = drawn(open_page(server.url))
    expect(page).to_have_title(re.compile("qkv"))
    expect(page.get_by_label("Example")).to_have_value("words")
    expect(page.locator("#kind")).to_have_text("stochastic")
    row = page.locator("#row")
    expect(row.get_by_role("heading")).to_have_text("journey")
    # the README's figures
    expect(row.locator("tbody tr").first).to_have_text(re.compile("journey.*0.2379"))
    assert weights_shown(page)["journey"] == [0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581]


@pytest.mark.parametrize("variant", catalogue.variants())
def test_every_variant_runs_and_is_drawn(open_page: Open, server: Server, variant: str) -> None:
    page = drawn(open_page(server.url))
    page.get_by_label("Variant", exact=True).select_option(variant)
    expect(page.locator("#status")).to_have_text(re.compile(f"^{variant}: .* at the serv"))
    expect(page.locator("#alert")).to_be_hidden()
    expect(page.locator("#formula")).not_to_be_empty()
    kind = catalogue.find(variant).describe()["weights"].partition(",")[0].partition(" ")[0]
    if page.locator("#kind").is_visible():
        expect(page.locator("#kind")).to_have_text(re.compile("stochastic|signed|unnormalised"))
    assert kind
    for parameter in catalogue.find(variant).parameters.model_fields:
        expect(page.get_by_label(parameter, exact=True)).to_be_visible()


def other(schema: dict[str, Any]) -> Any:
    """A value that a parameter may have, and does not have by default."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    for kind in kinds:
        if kind.get("type") == "boolean":
            return not schema.get("default")
        if "enum" in kind:
            return next(word for word in kind["enum"] if word != schema.get("default"))
        if kind.get("type") in ("integer", "number"):
            least = kind.get("minimum", kind.get("exclusiveMinimum", 0))
            most = kind.get("maximum", kind.get("exclusiveMaximum", 10))
            if kind["type"] == "integer":
                return next(n for n in range(max(least, 1), most + 1) if n != schema.get("default"))
            return next(x for x in (0.5, 0.25) if least < x < most)
        if kind.get("type") == "array":
            return [1, 1]
    raise AssertionError(schema)


@pytest.mark.parametrize(
    "variant", [n for n, v in catalogue.variants().items() if v.parameters.model_fields]
)
def test_every_parameter_s_control_changes_the_request(
    open_page: Open, server: Server, variant: str
) -> None:
    opened = open_page(server.url)
    opened.expect_status(422)  # some of these go with others only
    page = drawn(opened)
    page.get_by_label("Variant", exact=True).select_option(variant)
    expect(page.locator("#status")).to_have_text(re.compile(f"^{variant}:"))
    properties = server.http.get(f"/v1/variants/{variant}").json()["parameters"]["properties"]
    for name, schema in properties.items():
        value = other(schema)
        control = page.get_by_label(name, exact=True)

        def asks(request: Request, name: str = name, value: Any = value) -> bool:
            if not request.url.endswith(f"/v1/attention/{variant}"):
                return False
            body = request.post_data_json or {}
            return bool(body.get("parameters", {}).get(name) == value)

        with page.expect_request(asks):
            if isinstance(value, bool):
                control.set_checked(value)
            elif control.evaluate("element => element.tagName") == "SELECT":
                control.select_option(str(value))
            else:
                control.fill(json.dumps(value))


def test_what_is_wrong_with_a_parameter_is_said_beside_it_until_it_is_right(
    open_page: Open, server: Server
) -> None:
    opened = open_page(server.url)
    opened.expect_status(422)
    page = drawn(opened)
    scale = page.get_by_label("softcap", exact=True)
    scale.fill("-1")
    expect(scale).to_have_attribute("aria-invalid", "true")
    expect(scale).to_have_accessible_description(re.compile("softcap|greater|at least", re.I))
    expect(page.locator("#parameter-softcap-error")).to_contain_text("-1")
    expect(page.locator("#alert")).to_contain_text("softcap")
    scale.fill("1")
    expect(page.locator("#alert")).to_be_hidden()
    expect(page.locator("#parameter-softcap-error")).to_be_hidden()
    expect(scale).not_to_have_attribute("aria-invalid", "true")


def test_what_cannot_be_read_in_a_field_is_said_before_it_is_sent(
    open_page: Open, server: Server
) -> None:
    opened = open_page(server.url)
    page = drawn(opened)
    before = len(opened.requests)
    page.get_by_label("window", exact=True).fill("[1, ")
    expect(page.get_by_label("window", exact=True)).to_have_accessible_description(
        re.compile("This is not a list such as")
    )
    page.wait_for_timeout(300)  # past the moment that the page waits for more to be typed
    assert len(opened.requests) == before


def test_labels_name_rows_and_keys(open_page: Open, server: Server) -> None:
    page = drawn(open_page(server.url))
    page.get_by_label("Token labels").fill("a b c d e f")
    expect(page.locator("#row").get_by_role("heading")).to_have_text("b")
    assert list(weights_shown(page)) == list("abcdef")


def test_a_service_that_went_away_is_said_so(open_page: Open, server: Server) -> None:
    opened = open_page(server.url)
    page = drawn(opened)
    opened.expected.append("ERR_FAILED|net::")
    page.route("**/v1/**", lambda route: route.abort())
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#alert")).to_contain_text("cannot be reached")


def test_nothing_runs_that_is_not_the_service_s_own(open_page: Open, server: Server) -> None:
    opened = open_page(server.url)
    page = drawn(opened)
    opened.expected.append("Content Security Policy")
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.body.append(script);
        }"""
    )
    assert page.evaluate("() => window.ran") is None
    assert any("Content Security Policy" in c for c in opened.complaints)
    before = len(opened.complaints)
    opened.expected.append("asked another host")
    page.evaluate("() => fetch('https://example.com').catch(() => {})")
    assert len(opened.complaints) > before
