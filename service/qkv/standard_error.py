"""What a process says of itself, by way of `logging`, on standard error."""

from __future__ import annotations

import logging
from typing import Final

from qkv.lines import Lines

__all__ = ["StandardError"]

# A terminal obeys some of them, and a line ends at others; what is said may be a stranger's.
_CONTROLS: Final = {
    code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
}
_SHOWN: Final = {code: text for code, text in _CONTROLS.items() if chr(code) not in "\t\n"}


class StandardError(logging.Handler):
    """Has what is logged written, from warnings on, by a thread: who reads it slowly, or not at
    all, keeps no event loop waiting. What is dropped meanwhile is counted in what comes next."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines = Lines(2, self._drop)
        self._dropped = 0

    def start(self) -> None:
        """Takes what all loggers of the process say."""
        self._lines.start()
        logging.getLogger().addHandler(self)

    def stop(self) -> None:
        """Writes what is left, if it is read within a moment."""
        self._lines.stop()

    def emit(self, record: logging.LogRecord) -> None:
        """Called by a logger."""
        try:
            text = self.format(record).translate(_SHOWN)
        except Exception:
            self.handleError(record)
            return
        if dropped := self._dropped:
            self._dropped = 0
            text = f"({dropped} before this were dropped)\n{text}"
        self._lines.add(f"{text}\n".encode(errors="backslashreplace"))

    def _drop(self) -> None:
        self._dropped += 1
