"""How a model marks reasoning and tool calls in its output, read off its chat template.

What the template prints around a message's parts is what the model learnt to write and what the next prompt will
repeat; the parser takes exactly that away, so an echoed answer renders to the tokens that were generated.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from turnkeep.server.chat_template import ChatTemplate, TemplateError
from turnkeep.server.parsers.output_parser import OutputParser

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
REASON_MARK, CONTENT_MARK, NAME_MARK = "REASONMARK", "CONTENTMARK", "namemark"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Tags and the separators that belong to them. has_reasoning: the model writes <think> blocks.

    call_separator None: all blanks between content and a call belong to the call.
    """

    has_reasoning: bool = False
    reasoning_prefix: str = "\n"
    reasoning_suffix: str = "\n"
    content_prefix: str = "\n\n"
    call_separator: str | None = None

    @property
    def markup(self) -> tuple[str, ...]:
        """Strings that the parser must see, even where they are control tokens."""
        return (THINK, THINK_END, CALL, CALL_END) if self.has_reasoning else (CALL, CALL_END)

    def new_parser(self, prompt_text: str, *, tool_names: Collection[str] | None) -> OutputParser:
        """A parser for one answer. The end of the prompt tells whether a reasoning block is already open.

        tool_names: the declared tools; None when no call is allowed (markup is then dropped, its text is content).
        """
        is_open, prefix = False, self.reasoning_prefix
        if self.has_reasoning:
            stripped = prompt_text.rstrip()
            is_open = stripped.endswith(THINK)
            blank = prompt_text[len(stripped) :]
            if is_open and blank:
                prefix = prefix[len(blank) :] if prefix.startswith(blank) else ""
        return OutputParser(
            think_tags=(THINK, THINK_END) if self.has_reasoning else None,
            call_tags=(CALL, CALL_END),
            tool_names=None if tool_names is None else frozenset(tool_names),
            is_reasoning=is_open,
            first_prefix=prefix,
            reasoning_prefix=self.reasoning_prefix,
            reasoning_suffix=self.reasoning_suffix,
            content_prefix=self.content_prefix,
            call_separator=self.call_separator,
        )


def select_format(template: ChatTemplate | None) -> OutputFormat:
    """The format of a template: hermes-like <tool_call> JSON always, <think> blocks where the template knows them."""
    if template is None:
        return OutputFormat()
    reasoned = _render(template, reasoning=REASON_MARK, content=CONTENT_MARK)
    called = _render(template, content=CONTENT_MARK, call=True)
    before = _between(reasoned, THINK, REASON_MARK)
    after = _between(reasoned, REASON_MARK, THINK_END)
    between = _between(reasoned, THINK_END, CONTENT_MARK)
    has_reasoning = before is not None or THINK in template.source
    default = OutputFormat()
    return OutputFormat(
        has_reasoning=has_reasoning,
        reasoning_prefix=default.reasoning_prefix if before is None else before,
        reasoning_suffix=default.reasoning_suffix if after is None else after,
        content_prefix=default.content_prefix if between is None else between,
        call_separator=_between(called, CONTENT_MARK, CALL),
    )


def _render(template: ChatTemplate, *, content: str, reasoning: str | None = None, call: bool = False) -> str:
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        answer["reasoning_content"] = reasoning
    tools = None
    if call:
        function = {"name": NAME_MARK, "arguments": {"x": 1}}
        answer["tool_calls"] = [{"id": "call_0", "type": "function", "function": function}]
        schema = {"name": NAME_MARK, "description": "", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": schema}]
    try:
        return template.render([{"role": "user", "content": "A"}, answer], tools=tools, add_generation_prompt=False)
    except TemplateError:
        return ""


def _between(text: str, first: str, second: str) -> str | None:
    """Blank text between two marks, None when they do not follow each other with only blanks between."""
    end = text.rfind(second)
    start = text.rfind(first, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    found = text[start + len(first) : end]
    return found if not found.strip() else None
