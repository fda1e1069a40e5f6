"""From generated text to what the API returns: content, reasoning and tool calls, streamed or whole.

Pure text; knows no token and no request. What comes out never depends on how the text was split into pieces.
"""

from __future__ import annotations

from turnkeep.server.parsers.answer_parser import AnswerParser
from turnkeep.server.parsers.deltas import Answer, Delta, collect
from turnkeep.server.parsers.output_format import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    OutputFormat,
    select_format,
)
from turnkeep.server.parsers.output_parser import OutputParser
from turnkeep.server.parsers.plain_parser import PlainParser
from turnkeep.server.parsers.stop_strings import StopStrings

__all__ = [
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "Answer",
    "AnswerParser",
    "Delta",
    "OutputFormat",
    "OutputParser",
    "PlainParser",
    "StopStrings",
    "collect",
    "select_format",
]
