"""Takes the pictures of the playground with Chromium, from a service of this checkout.

`.venv/bin/python docs/screenshots.py` writes the picture of the README, `--all FOLDER` also
those of a narrow window and the other theme. The bytes depend on the fonts of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from playwright.sync_api import Page, sync_playwright


class Picture(NamedTuple):
    """A picture: size of the window, theme, example and selected row."""

    width: int
    height: int
    theme: Literal["light", "dark"]
    example: str
    status: str
    """Text in the page's status after the example is drawn."""
    row: int
    """Number of the row to select."""


README_PICTURES: Final = {
    "playground.png": Picture(1440, 1000, "light", "induction", "19 queries", 17),
}
OTHER_PICTURES: Final = {
    "playground-narrow.png": Picture(390, 844, "dark", "words", "6 queries", 1),
    "playground-dark.png": Picture(1440, 1000, "dark", "document", "4096 queries", 2000),
    "playground-narrow-light.png": Picture(390, 844, "light", "local", "64 queries", 20),
}


@contextlib.contextmanager
def start_service() -> Iterator[str]:
    """Starts a service of this checkout and yields its URL."""
    command = [sys.executable, "-m", "qkv", "serve", "--port", "0", "--workers", "1"]
    environment = os.environ | {"QKV_DEVICE": "cpu"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if line.startswith("curl "))
            yield line.split()[1].removesuffix("/v1/attention/softmax")
        finally:
            process.terminate()
            process.stderr.read()  # a full pipe would block its exit


def prepare(page: Page, picture: Picture) -> None:
    """Brings a page into the state of a picture."""
    page.wait_for_selector("#row tbody tr")
    page.locator("#example").select_option(picture.example)
    page.locator("#status", has_text=picture.status).wait_for()
    page.locator("#row-number").fill(str(picture.row))
    page.keyboard.press("Enter")
    page.wait_for_load_state("networkidle")
    # a narrow page begins with the form: scroll to the map
    page.evaluate(
        """isNarrow => {
            document.activeElement.blur();
            const { top } = document.getElementById("status").getBoundingClientRect();
            scrollTo({ top: isNarrow ? top + scrollY - 92 : 0, behavior: "instant" });
        }""",
        picture.width < 600,
    )
    page.wait_for_timeout(200)  # until the last frame is drawn


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Takes screenshots of the playground.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--all", action="store_true", help="both themes in both widths")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    pictures = README_PICTURES | OTHER_PICTURES if options.all else README_PICTURES
    chromium = shutil.which("chromium") or "chromium"
    with start_service() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        for name, picture in pictures.items():
            page = browser.new_page(
                viewport={"width": picture.width, "height": picture.height},
                color_scheme=picture.theme,
            )
            page.goto(url)
            prepare(page, picture)
            page.screenshot(path=options.folder / name)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
