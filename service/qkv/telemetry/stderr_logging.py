"""What a process says of itself, by way of `logging`, on standard error."""

from __future__ import annotations

import logging
from typing import Final

from qkv.telemetry.background_writer import Lines

__all__ = ["StandardError"]

# A terminal obeys some of them, and a line ends at others; what is said may be a stranger's.
_CONTROLS: Final = {
    code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
}
_SHOWN: Final = {code: text for code, text in _CONTROLS.items() if chr(code) not in "\t\n"}


class StandardError(logging.Handler):
    """Has what is logged written, from warnings on, by a thread: who reads it slowly, or not at
    all, keeps no event loop waiting. How much was dropped meanwhile is said before what comes
    next."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines = Lines(2)
        self._told = 0  # of what was dropped

    def start(self) -> None:
        """Takes what all loggers of the process say, and what `warnings` warns of."""
        self._lines.start()
        logging.captureWarnings(True)
        logging.getLogger().addHandler(self)

    def stop(self) -> None:
        """Writes what is left, if it is read within a moment."""
        logging.getLogger().removeHandler(self)
        logging.captureWarnings(False)
        self._lines.stop()

    def emit(self, record: logging.LogRecord) -> None:
        """Called by a logger."""
        try:
            text = self.format(record).translate(_SHOWN)
        except Exception:
            self.handleError(record)
            return
        dropped = self._lines.dropped
        if dropped > self._told:
            text = f"({dropped - self._told} messages before this were dropped)\n{text}"
        if self._lines.add(f"{text}\n".encode(errors="backslashreplace")):
            self._told = dropped
