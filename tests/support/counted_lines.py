"""Work in executed lines of Python: the same on every machine, however busy it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_lines(call: Callable[[], Any]) -> int:
    """Lines of Python that run inside `call`."""
    number = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal number
        number += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return number
