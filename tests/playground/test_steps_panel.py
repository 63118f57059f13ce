"""Tests the playground's steps: their numbers, the followed row, and the symbols of the formula."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from qkv import Client
from support.accessibility import overflow, problems
from support.browser import Open, choose_example, paste, typeset, unfold_form, wait_until_drawn
from support.service import Server

WORDS: Final = np.array(
    [
        [0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33], [0.77, 0.25, 0.10], [0.05, 0.80, 0.55],
    ],
    np.float32,
)  # fmt: skip

CAUSAL: Final = "/#example=words&parameters.scale=1&parameters.causal=true&row=1&open=steps"


def read_steps(page: Page) -> dict[str, list[list[str]]]:
    """Returns the cells of each step's table, row by row."""
    expect(page.locator("#steps")).not_to_have_attribute("aria-busy", "true")
    page.locator("#steps li table").first.wait_for()
    steps: dict[str, list[list[str]]] = page.locator("#steps").evaluate(
        """section => Object.fromEntries([...section.querySelectorAll("li")].map((item) => {
            const rows = [...item.querySelectorAll("tbody tr")];
            const cells = (row) => [...row.querySelectorAll("td")].map((cell) => cell.innerText);
            return [item.dataset.step, rows.map(cells)];
        }))"""
    )
    return steps


def shown_like(numbers: Any) -> list[list[str]]:
    """Returns numbers as the page shows them: three digits; masked ones as a word."""

    def text(number: float) -> str:
        if number == -np.inf:
            return "masked"
        if number == 0:
            return "0"
        return f"{number:#.3g}".rstrip(".").replace("-", "\u2212")

    return [[text(n) for n in row] for row in np.atleast_2d(numbers)]


@pytest.mark.representative
def test_steps_have_the_numbers_of_the_client(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, width=390, path=CAUSAL)
    page = wait_until_drawn(opened)
    page.locator("#steps").scroll_into_view_if_needed()
    arguments: dict[str, Any] = dict.fromkeys(("query", "key", "value"), WORDS)
    with Client(server.url) as client:
        run = client.attend("softmax", **arguments, scale=1.0, causal=True, outputs=["steps"])
    steps = {name.removeprefix("steps."): array for name, array in run.outputs.items()}
    for row in (1, 3):
        page.get_by_label("Followed row").fill(str(row))
        page.keyboard.press("Enter")
        expect(page.locator("#row-number")).to_have_value(str(row))
        expect(page.locator(".steps-bar strong")).to_have_text("with" if row == 3 else "journey")
        hidden = np.arange(6) > row  # keys that the query does not see
        expected = {"key": steps["key"], "value": steps["value"]}
        for name in ("query", "scores", "scaled", "masked", "output"):
            expected[name] = steps[name][row]
        for name in ("exponentials", "weights"):
            expected[name] = np.where(hidden, -np.inf, steps[name][row])
        expected["row_sums"] = steps["row_sums"][row]
        expected["terms"] = np.where(hidden[:, None], -np.inf, steps["terms"][row])
        assert read_steps(page) == {name: shown_like(x) for name, x in expected.items()}
        assert list(read_steps(page)) == [name for name in steps if name in expected]
    assert (
        len([b for b in opened.posted("/v1/attention/softmax") if b.get("outputs") == ["steps"]])
        == 1
    )
    assert problems(page, "#steps") == []


def test_formula_and_steps_point_to_each_other(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, path=CAUSAL.removesuffix("&open=steps"))
    page = wait_until_drawn(opened)
    formula = page.locator("#formula")
    expect(formula).to_have_text("A = softmax(scale Q K^T + mask); output = A V")
    formula.get_by_role("button", name="step scaled").focus()
    page.keyboard.press("Enter")  # opens the section
    steps = page.locator("#steps")
    page.wait_for_url(re.compile("open=steps"))
    expect(steps.locator("li")).to_have_count(11)
    lit = steps.locator("li.lit")
    steps.get_by_role("button", name="step masked").focus()
    expect(lit).to_have_attribute("data-step", "masked")
    page.keyboard.press("Enter")
    expect(steps.locator("[data-step=masked] .scroll")).to_be_focused()
    marked = steps.locator(".formula .lit")
    assert "".join(marked.all_text_contents()) == "scaleQK^T+mask"
    steps.locator("[data-step=weights] .picture").hover()
    expect(marked.first).to_have_text("softmax(")
    expect(formula.locator(".lit").first).to_have_text("softmax(")
    # a row that is selected in the map, or clicked in a picture, is followed
    page.locator("#map [role=application]").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Followed row")).to_have_value("2")
    page.wait_for_url(re.compile("row=2"))
    picture = steps.locator("[data-step=scores] canvas")
    picture.click(position={"x": 5, "y": 4})
    expect(page.locator("#row-number")).to_have_value("0")
    expect(page.get_by_label("Followed row")).to_have_value("0")
    page.wait_for_url(re.compile("row=0"))
    page.go_back()  # to the row before, with the symbols of its formula
    expect(page.get_by_label("Followed row")).to_have_value("2")
    formula.get_by_role("button", name="step scaled").wait_for()


def test_layer_begins_with_x_and_the_head_is_that_of_the_map(
    open_page: Open, server: Server
) -> None:
    opened = open_page(server.url, width=390, height=3000, path="/#example=layer&open=steps")
    page = wait_until_drawn(opened)
    shown = read_steps(page)
    assert list(shown)[:4] == ["x", "query", "key", "value"]
    assert shown["x"] == shown_like(WORDS[1])
    choose_example(opened, "induction")
    expect(page.get_by_label("Followed row")).to_have_value("10")
    expect(page.locator("#steps [data-step=x]")).to_have_count(0)
    page.get_by_role("button", name="head 3").click()
    body = opened.posted("/v1/attention/softmax")[-1]
    run = server.http.post("/v1/attention/softmax", json={**body, "encoding": "lists"})
    scores = np.array(run.json()["outputs"]["steps.scores"])[0, 3, 10]
    expect(page.locator("#steps [data-step=scores] td").first).to_have_text(
        shown_like(scores)[0][0]
    )
    assert read_steps(page)["scores"] == shown_like(scores)


def test_steps_of_large_inputs_are_not_requested(open_page: Open, server: Server) -> None:
    path = "/#example=local&open=steps"
    opened = open_page(server.url, width=390, height=3000, path=path)
    page = wait_until_drawn(opened)
    unfold_form(page)
    status = page.locator("#steps [role=status]")
    expect(status).to_have_text(
        re.compile(r"Steps are shown for up to 262,144 numbers\. This run has [\d,]+\.")
    )
    paste(page, json.dumps({"query": [[1]] * 65, "key": [[1]] * 65, "value": [[1]] * 65}))
    wait_until_drawn(opened)
    expect(status).to_have_text("Steps are shown for up to 64 tokens. This run has 65.")
    assert not [body for _, body in opened.bodies if "steps" in body.get("outputs", ())]
    expect(page.locator("#formula button")).to_have_count(0)
    assert overflow(page) == 0


@pytest.mark.slow
def test_each_variant_has_its_own_steps(open_page: Open, server: Server) -> None:
    opened = open_page(server.url, width=390, height=3000, path="/#example=words&open=steps")
    page = wait_until_drawn(opened)
    for variant in server.http.get("/v1/variants").json()["variants"]:
        page.get_by_label("Example").select_option("words")
        page.get_by_label("Variant", exact=True).select_option(variant["variant"])
        expect(page.locator("#status")).to_have_text(
            re.compile(f"^{variant['variant']}: .* in the service")
        )
        page.locator("#steps").scroll_into_view_if_needed()
        names = [step["name"] for step in variant["steps"]["names"]]
        expect(page.locator("#steps li").last).to_have_attribute("data-step", "output")
        expect(page.locator("#steps li").first).to_have_attribute("data-step", names[0])
        shown = read_steps(page)
        assert [name for name in names if name in shown] == list(shown)
        expect(page.locator("#formula")).to_have_text(typeset(variant["formula"]))
        assert overflow(page) == 0, variant["variant"]
