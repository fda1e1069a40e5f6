"""Tables of what was learnt, bounded: the entry that was put longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec


def table_key(*parts: Any) -> bytes:
    """A key for plain data."""
    try:
        return msgspec.json.encode(parts)
    except (OverflowError, TypeError, UnicodeEncodeError, msgspec.MsgspecError):  # numbers or text JSON cannot carry
        return repr(parts).encode("utf-8", "surrogatepass")


def put_newest(table: OrderedDict[bytes, Any], key: bytes, value: Any, limit: int) -> None:
    """Put an entry, as the newest, and keep at most `limit` of them."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)
