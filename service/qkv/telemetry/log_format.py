"""The form of a message on standard error: time, level and text, as a line or as JSON."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import orjson


class LogFormatter(logging.Formatter):
    """A format of log records with time and level.

    Args:
        as_json: one object of JSON, as the request log has; else text.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Returns the text of a record; a traceback follows the message."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        message = super().format(record)
        if not self._as_json:
            return f"{time} {record.levelname} {message}"
        line = {"time": time, "level": record.levelname, "message": message}
        return orjson.dumps(line).decode()
