"""Tests the playground in Chromium: every variant, control and kind of error."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Request, expect

from support.browser import Open, expect_shown, open_narrow, read_weights, typeset, wait_until_drawn
from support.service import Server


@pytest.mark.representative
def test_page_opens_with_the_six_words_example(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url))
    expect(page).to_have_title(re.compile("qkv"))
    expect(page.locator("#purpose")).to_contain_text("qkv runs variants of attention")
    bar = page.locator(".go").bounding_box()
    assert bar is not None
    for label in ("Example", "Variant", "Token labels", "causal"):  # seen without scrolling
        box = page.get_by_label(label, exact=True).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < bar["y"], label
    upload = page.locator("label[for=upload]").bounding_box()
    assert upload is not None
    assert upload["y"] + upload["height"] < bar["y"]
    expect(page.locator("#loaded-layer-field")).to_be_hidden()
    expect(page.locator("#upload-about")).to_be_hidden()
    page.get_by_text("Which files?").click()
    page.locator("#upload-about").wait_for()
    expect(page.get_by_label("Example")).to_have_value("words")
    expect(page.locator("#kind")).to_have_text("stochastic")
    row = page.locator("#row")
    expect(row.get_by_role("heading")).to_have_text("journey")
    # the figures of docs/python.md
    expect(row.locator("tbody tr").first).to_have_text(re.compile("journey.*0.2379"))
    assert read_weights(page)["journey"] == [0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581]


def test_timing_begins_with_the_run_of_the_user(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url))
    page.locator("#timing li", has_text="for the difference").wait_for()
    page.get_by_label("Variant", exact=True).select_option("taylor")
    expect(page.locator("#timing ol > li").first).to_contain_text("taylor full weights")
    page.locator("#timing li", has_text="taylor statistics").wait_for()
    expect(page.locator("#timing ol > li").first).to_contain_text("taylor full weights")


def select_variant(page: Page, variant: str) -> None:
    """Selects a variant with default parameters."""
    page.get_by_label("Example").select_option("words")
    page.get_by_label("Variant", exact=True).select_option(variant)
    expect(page.locator("#status")).to_have_text(re.compile(f"^{variant}: .* in the service"))


@pytest.mark.slow
def test_each_variant_is_drawn(open_page: Open, server: Server) -> None:
    page = wait_until_drawn(open_page(server.url))
    for variant in server.http.get("/v1/variants").json()["variants"]:
        select_variant(page, variant["variant"])
        expect(page.locator("#alert")).to_be_hidden()
        expect(page.locator("#formula")).to_have_text(typeset(variant["formula"]))
        if "weights" in variant["outputs"]:
            expect(page.locator("#kind")).to_have_text(re.compile("stochastic|signed|unnormal"))
        for parameter in variant["parameters"]["properties"]:
            page.get_by_label(parameter, exact=True).wait_for()


def non_default(schema: dict[str, Any]) -> Any:
    """Returns a valid value of a parameter that is not its default."""
    default = schema.get("default")
    for kind in schema.get("anyOf", [schema]):
        least = kind.get("minimum", kind.get("exclusiveMinimum", 0))
        candidates = {
            "boolean": [not default],
            "integer": [max(least, 1), max(least, 1) + 1],
            "number": [0.5, 0.25],
            "array": [[1, 1]],
        }.get(kind.get("type"), [])
        for value in kind.get("enum", candidates):
            if value != default:
                return value
    raise AssertionError(schema)


@pytest.mark.rare("service/qkv/playground", "service/qkv/attention/variants")
def test_each_parameter_control_changes_the_request(open_page: Open, server: Server) -> None:
    opened = open_narrow(open_page, server.url)
    opened.expect_status(422)  # some values are valid only together with others
    page = opened.page
    for variant in server.http.get("/v1/variants").json()["variants"]:
        path = f"/v1/attention/{variant['variant']}"
        select_variant(page, variant["variant"])
        for name, schema in variant["parameters"]["properties"].items():
            value = non_default(schema)
            with page.expect_request(partial(has_parameter, path=path, name=name, value=value)):
                set_control(page.get_by_label(name, exact=True), value)


def has_parameter(request: Request, path: str, name: str, value: Any) -> bool:
    """True if a request has this path and this parameter."""
    if not request.url.endswith(path):
        return False
    parameters: dict[str, Any] = (request.post_data_json or {}).get("parameters", {})
    return bool(parameters.get(name) == value)


def set_control(control: Locator, value: Any) -> None:
    """Sets a control of any kind to a value."""
    if isinstance(value, bool):
        control.set_checked(value)
    elif control.evaluate("element => element.tagName") == "SELECT":
        control.select_option(str(value))
    else:
        control.fill(json.dumps(value))


def test_wrong_parameter_unreachable_service_and_injected_script_are_reported(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    opened.expect_status(422)
    page = opened.page
    scale = page.get_by_label("softcap", exact=True)
    scale.fill("-1")
    expect(scale).to_have_attribute("aria-invalid", "true")
    expect(scale).to_have_accessible_description(re.compile("softcap|greater|at least", re.I))
    expect_shown(page.locator("#parameter-softcap-error"), "-1")
    expect_shown(page.locator("#alert"), "softcap")
    scale.fill("1")
    expect(page.locator("#alert")).to_be_hidden()
    expect(page.locator("#parameter-softcap-error")).to_be_hidden()
    expect(scale).not_to_have_attribute("aria-invalid", "true")
    wait_until_drawn(opened)
    before = len(opened.requests)
    page.get_by_label("window", exact=True).fill("[1, ")  # it cannot be parsed, and is not sent
    expect(page.get_by_label("window", exact=True)).to_have_accessible_description(
        re.compile("Expected a list such as")
    )
    page.wait_for_timeout(300)  # longer than the page waits after a keystroke
    assert len(opened.requests) == before

    # a service that does not respond is reported
    page.get_by_label("window", exact=True).fill("")
    wait_until_drawn(opened)
    opened.expected.append("ERR_FAILED|net::")
    page.route("**/{v1/**,readyz}", lambda route: route.abort())
    page.get_by_role("button", name="Run").click()
    expect_shown(page.locator("#alert"), "The service does not respond")
    page.unroute_all()  # it is back: the page asks again by itself
    expect(page.locator("#alert")).to_be_hidden()
    wait_until_drawn(opened)

    # injected scripts and other hosts are blocked
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
    opened.expected.append("request to another host")
    page.evaluate("() => fetch('https://example.com').catch(() => {})")
    assert len(opened.complaints) > before


def test_weights_follow_the_slider_of_scale_and_an_example_keeps_the_variant(
    open_page: Open, server: Server
) -> None:
    page = open_narrow(open_page, server.url).page
    slider, field = page.locator(".slider input"), page.get_by_label("scale", exact=True)
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, y)
    page.mouse.down()
    first = page.locator("#row tbody td").first
    for part in (0.6, 0.7, 0.8):
        before, text = field.input_value(), first.inner_text()
        page.mouse.move(box["x"] + part * box["width"], y)
        expect(field).not_to_have_value(before)
        expect(first).not_to_have_text(text)
    page.mouse.up()
    page.wait_for_url(re.compile(f"scale={field.input_value()}&"))
    field.fill("0,5")  # a comma is a point too
    page.wait_for_url(re.compile("scale=0.5&"))
    expect(slider).to_have_value("-1")

    # an example keeps the variant, or says that it does not
    variant, example = (page.get_by_label(name, exact=True) for name in ("Variant", "Example"))
    variant.select_option("linear")
    example.select_option("induction")
    expect(variant).to_have_value("linear")
    variant.select_option("linear_layer")
    expect(example).to_have_value("linear-layer")
    example.select_option("words")
    expect(variant).to_have_value("softmax")
    expect(page.locator("#example-about")).to_contain_text("The variant is softmax now")
