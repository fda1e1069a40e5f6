"""Log lines on standard error. What came from outside cannot forge lines or colours: control characters are escaped."""

from __future__ import annotations

import logging
import re
import sys

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]|\n(?=\S)")


class _SafeFormatter(logging.Formatter):
    """Escapes the message; a traceback is our own text and keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _CONTROL.sub(lambda found: repr(found.group())[1:-1], record.message)
        return super().formatMessage(record)


def set_up_logging(level: str) -> None:
    """`level` is "debug", "info", "warning" or "error"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_SafeFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
