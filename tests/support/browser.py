"""Chromium for tests: pages without console errors and without requests to other hosts."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Request

CHROMIUM_FLAGS: Final = (
    "--no-sandbox",  # CI runs as root in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",  # a container has 64 MiB of shared memory
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

TIMEOUT_MS: Final = 30_000.0

GLYPHS: Final = {
    "phi": "φ", "beta": "β", "sum_": "Σ_", " . ": " · ", " - ": " − ", "-1": "−1", "<=": "≤",
    "'": "\N{PRIME}",
}  # fmt: skip
"""What the page writes in formulas for plain text."""


def typeset(formula: str) -> str:
    """Returns the text of a formula on the page."""
    for plain, glyph in GLYPHS.items():
        formula = formula.replace(plain, glyph)
    return formula


@dataclass
class WatchedPage:
    """A page with its errors and requests.

    Attributes:
        page: the page.
        complaints: console errors, CSP violations among them, uncaught exceptions, and requests
            to other hosts.
        expected: patterns of complaints that the test expects.
        requests: the paths of all requests, in order.
        bodies: the JSON of each POST, with its path; {} for a body in safetensors.
        finished: the requests that have ended.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)

    def expect_status(self, status: int) -> None:
        """Allows responses with this error status, which Chromium writes to the console."""
        self.expected.append(f"the server responded with a status of {status} ")

    def posted(self, path: str) -> list[dict[str, Any]]:
        """Returns the bodies of the POST requests to a path, in order."""
        return [body for posted, body in self.bodies if posted == path]

    @property
    def received_bytes(self) -> int:
        """Bytes of the response bodies of the requests that have ended; the browser knows them."""
        return sum(request.sizes()["responseBodySize"] for request in self.finished)

    def unexpected(self) -> list[str]:
        """Returns the complaints that the test does not expect."""
        return [c for c in self.complaints if not any(re.search(p, c) for p in self.expected)]


Open = Callable[..., WatchedPage]
"""Opens a page: `open_page(url, width=390, theme="dark")`."""


_running = contextlib.ExitStack()
_browsers: list[Browser] = []


@pytest.fixture(scope="module")
def browser() -> Browser:
    """Returns Debian's Chromium; it runs until a test of this process does not use it.

    Without a window (`chromium-headless-shell`) a page takes half of the time. Skips the tests if
    neither is installed.
    """
    from playwright.sync_api import expect, sync_playwright  # slow to import

    executable = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if not executable:
        pytest.skip("needs Debian's chromium-headless-shell or chromium")
    if not _browsers:
        expect.set_options(timeout=TIMEOUT_MS)
        chromium = _running.enter_context(sync_playwright()).chromium
        _browsers.append(chromium.launch(executable_path=executable, args=list(CHROMIUM_FLAGS)))
        _running.callback(_browsers[0].close)
    return _browsers[0]


def end_browser(next_test: pytest.Item | None) -> None:
    """Ends Chromium unless the next test uses it, or is among those that do.

    While Playwright runs, its event loop occupies the thread: `asyncio.run` of another test fails.
    """
    if not next_test or not _is_near_browser(next_test):
        _browsers.clear()
        _running.close()


def _is_near_browser(test: pytest.Item) -> bool:
    return test.nodeid.startswith("tests/playground/") or "browser" in test.fixturenames  # type: ignore[attr-defined]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens pages, each with an empty profile; fails at the end if a page has complaints."""
    opened: list[tuple[BrowserContext, WatchedPage]] = []

    def open_one(
        url: str,
        width: int = 1440,
        height: int = 900,
        theme: Any = "light",
        path: str = "/",
        touch: bool = False,
    ) -> WatchedPage:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=theme,
            has_touch=touch,
            is_mobile=touch,
            reduced_motion="reduce",
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.set_default_timeout(TIMEOUT_MS)
        watched = WatchedPage(context.new_page())
        watch(watched, httpx.URL(url).host)
        opened.append((context, watched))
        watched.page.goto(url + path)
        return watched

    yield open_one
    complaints = [(watched.page.url, watched.unexpected()) for _, watched in opened]
    for context, _ in opened:
        context.close()
    assert not [pair for pair in complaints if pair[1]], complaints


def watch(watched: WatchedPage, host: str) -> None:
    """Records the complaints and the requests of a page."""

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            watched.complaints.append(f"{message.text} ({message.location['url']})")

    def on_request(request: Any) -> None:
        url = httpx.URL(request.url) if request.url.startswith("http") else None
        if url is None:
            return
        watched.requests.append(url.path)
        if request.method == "POST" and url.host == host:
            is_json = request.headers.get("content-type") == "application/json"
            watched.bodies.append((url.path, request.post_data_json if is_json else {}))
        if url.host != host:
            watched.complaints.append(f"request to another host: {request.url[:200]}")

    def on_finished(request: Request) -> None:  # Playwright takes no method of a list
        watched.finished.append(request)

    watched.page.on("console", on_console)
    watched.page.on("requestfinished", on_finished)
    watched.page.on("pageerror", lambda error: watched.complaints.append(f"uncaught: {error}"))
    watched.page.on("request", on_request)


_UNTIL_DRAWN: Final = """timeout => new Promise((resolve, reject) => {
    const [main, status] = [document.querySelector("main"), document.getElementById("status")];
    const late = setTimeout(() => reject(new Error(`not drawn: ${main.innerText}`)), timeout);
    const observer = new MutationObserver(() => check());
    const check = () => {
        if (!status.textContent || main.hasAttribute("aria-busy")) return;
        observer.disconnect();
        clearTimeout(late);
        requestAnimationFrame(() => resolve());  // the maps are drawn in the same frame, before
    };
    observer.observe(main, { attributeFilter: ["aria-busy"] });
    observer.observe(status, { childList: true, characterData: true, subtree: true });
    check();
})"""
"""To look in every frame, as `wait_for_function` does, takes an eighth of a processor."""


def wait_until_drawn(opened: WatchedPage) -> Page:
    """Waits until the page has drawn its last request; returns the page.

    The page is busy from the event that changes the request. After an upload it is busy only when
    the file is read: then wait for an effect of the upload first.
    """
    opened.page.evaluate(_UNTIL_DRAWN, TIMEOUT_MS)
    return opened.page


def expect_shown(hidden: Locator, text: str) -> None:
    """Waits until an element that is hidden before is shown with a text.

    Each time that `expect` finds an element hidden, or another address, it describes the whole
    page for its message: 50 ms of CPU time, and a second of the page of the API.
    """
    from playwright.sync_api import expect

    hidden.wait_for()
    expect(hidden).to_contain_text(text)


def open_narrow(open_page: Open, url: str, path: str = "/") -> WatchedPage:
    """Opens a page in a narrow window, with the whole form, and waits until it is drawn.

    Of the results only the weights are unfolded there: for a test of the form. A change sends one
    request instead of three or four, and takes a third of the CPU time.
    """
    opened = open_page(url, width=390, height=844, path=path)
    unfold_form(wait_until_drawn(opened))
    return opened


def unfold_form(page: Page) -> None:
    """Opens the parts of the form, which are folded when a narrow window is opened."""
    page.evaluate(
        "() => document.querySelectorAll('form > details').forEach((part) => (part.open = true))"
    )


def read_weights(page: Page) -> dict[str, list[float]]:
    """Returns the weights of the page's table, by the names of the rows; 0 where masked."""
    table = page.locator("#table")
    # a drawing that moves the table between the press and the release of the mouse leaves it closed
    wait_until_drawn(WatchedPage(page))
    if not table.evaluate("details => details.open"):
        table.locator("summary").click()
    rows: list[list[str]] = table.locator("tbody").evaluate(
        "body => [...body.rows].map((row) => [...row.cells].map((cell) => cell.innerText))"
    )

    def read(text: str) -> float:
        return 0.0 if text == "masked" else float(text.replace("\u2212", "-"))

    return {name: [read(text) for text in cells[:-1]] for name, *cells in rows}


def read_gradients(page: Page) -> dict[str, list[float]]:
    """Returns gradient, finite difference and their difference by the name of the entry."""
    from playwright.sync_api import expect

    section = page.locator("#gradients")
    expect(section).not_to_have_attribute("aria-busy", "true")
    if not section.locator("details[open]").count():
        section.get_by_text("Gradients as a table").click()
    rows: list[list[str]] = section.locator("tbody").evaluate(
        "body => [...body.rows].map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    return {name: [float(n.replace("\u2212", "-")) for n in cells] for name, *cells in rows}


def record_slices(page: Page) -> None:
    """Keeps the bytes of each part that the page reads of a file in `window.slices`.

    To read a whole file is an error.
    """
    page.evaluate(
        """() => {
            window.slices = [];
            const { slice } = Blob.prototype;
            Blob.prototype.slice = function (start, end) {
                if (this instanceof File) window.slices.push(end - start);
                return slice.call(this, start, end);
            };
            File.prototype.arrayBuffer = () => { throw new Error("a file was read whole") };
        }"""
    )


def unfold_sections(page: Page) -> None:
    """Opens the sections of the results that are folded behind their headings."""
    folded = page.locator("main .fold[aria-expanded=false]:visible")
    while folded.count():
        folded.first.click()


def choose_example(opened: WatchedPage, example: str) -> Page:
    """Selects an example and waits until the page has drawn it."""
    page = wait_until_drawn(opened)
    page.get_by_label("Example").select_option(example)
    return wait_until_drawn(opened)


def paste(page: Page, text: str) -> None:
    """Pastes a text into the page, and waits until the dialog is closed."""
    page.get_by_role("button", name="Paste").click()
    page.get_by_label("Tensors or request").fill(text)
    page.evaluate("() => { document.getElementById('status').textContent = ''; }")
    page.get_by_role("button", name="Use these").click()
    page.get_by_role("dialog").wait_for(state="hidden")


def answer(page: Page, button: str) -> None:
    """Answers the question whether new tensors replace those that the user brought."""
    question = page.get_by_role("group", name=re.compile("you brought"))
    question.get_by_role("button", name=button).click()
    question.wait_for(state="hidden")


def save(page: Page, what: str, kind: str) -> Path:
    """Saves a figure by its menu; returns the file, with the name that the page gives it."""
    page.get_by_role("button", name=f"Save {what}", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("group", name=f"Save {what}").get_by_role("button", name=kind).click()
    path = Path(download.value.path())
    return path.rename(path.with_name(download.value.suggested_filename))


def match_groups(pattern: str, text: str) -> tuple[str, ...]:
    """Returns the groups of a pattern in a text."""
    found = re.search(pattern, text)
    assert found is not None, text
    return found.groups()
