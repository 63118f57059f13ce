"""Runs `python -m venv` or `pip install`, and prints a line at least every few seconds.

pip itself prints nothing while it unpacks a package, and torch takes half a minute. Warnings of pip
are left out, because they are about the machine.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Final

_PATIENCE_S: Final = 3
_ENVIRONMENT: Final = Path(".venv")
_COLLECTING: Final = re.compile(r"Collecting ([\w.-]+)")
_FILE: Final = re.compile(
    r"(Downloading|Using cached|Processing) (?:\S*/)?([\w.]+)-\S+( \(\d.*\))?"
)
_INSTALLING: Final = re.compile(r"Installing collected packages: (.*)")


class Progress:
    """The lines that tell what a command does."""

    def __init__(self) -> None:
        self._step = "working"
        self._started_at = time.monotonic()
        self._known = _installed_packages()
        self._done_count = self._total_count = 0  # of packages that pip installs

    def read(self, line: str) -> None:
        """Follows a line of pip's output."""
        if found := _COLLECTING.match(line):
            self._step = f"collecting {found[1]}"
            self._print(self._step)
        elif found := _FILE.match(line.strip()):
            self._step = f"{found[1].lower()} {found[2]}{found[3] or ''}"
        elif found := _INSTALLING.match(line):
            self._total_count = len(found[1].split(", "))
            self._step = f"installing {self._total_count} packages"
            self._print(self._step)

    def tick(self) -> None:
        """Prints the packages that are installed since the last time, or what is still done."""
        new = _installed_packages() - self._known if self._total_count else set()
        if not new:
            self._print(self._step)
            return
        self._known |= new
        self._done_count += len(new)
        self._step = f"installing, {self._done_count} of {self._total_count} packages done"
        self._print(f"installed {', '.join(sorted(new))}")

    def _print(self, text: str) -> None:
        print(f"  {time.monotonic() - self._started_at:4.0f} s  {text}", flush=True)


def _installed_packages() -> set[str]:
    folders = _ENVIRONMENT.glob("lib/python*/site-packages/[!~]*.dist-info")  # ~: being removed
    return {folder.name.partition("-")[0] for folder in folders}


def _put_lines(output: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in output:
        lines.put(line)
    lines.put(None)


def _pass_errors(errors: IO[str]) -> None:
    for line in errors:
        if not line.startswith("WARNING: "):
            sys.stderr.write(line)


def main() -> int:
    """Runs the command; returns its exit status."""
    command = subprocess.Popen(
        sys.argv[1:],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PIP_PROGRESS_BAR": "off"},
    )
    assert command.stdout is not None
    assert command.stderr is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_put_lines, args=(command.stdout, lines), daemon=True).start()
    errors = threading.Thread(target=_pass_errors, args=(command.stderr,), daemon=True)
    errors.start()
    progress, told_at = Progress(), time.monotonic()
    while True:
        try:
            line = lines.get(timeout=max(0.0, told_at + _PATIENCE_S - time.monotonic()))
        except queue.Empty:
            progress.tick()
            told_at = time.monotonic()
            continue
        if line is None:
            errors.join()
            return command.wait()
        progress.read(line)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
