"""How a model marks reasoning and tool calls in its output, read off its chat template.

What the template prints around a message's parts is what the model learnt to write and what the next prompt will
repeat; the parser takes exactly that away, so an echoed answer renders to the tokens that were generated.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnkeep.server.chat_template import ChatTemplate, TemplateError
from turnkeep.server.parsers import harmony_parser
from turnkeep.server.parsers.answer_parser import AnswerParser
from turnkeep.server.parsers.call_syntax import CallSyntax
from turnkeep.server.parsers.gemma_calls import FUNCTION_GEMMA, GEMMA
from turnkeep.server.parsers.headed_calls import DEEPSEEK, KIMI_K2, MISTRAL
from turnkeep.server.parsers.json_calls import BARE_JSON, GRANITE, HERMES, LLAMA3_JSON, NEMOTRON
from turnkeep.server.parsers.output_parser import OutputParser
from turnkeep.server.parsers.pair_calls import PairCalls
from turnkeep.server.parsers.python_calls import PythonCalls
from turnkeep.server.parsers.xml_calls import MINIMAX, QWEN3_CODER, SEED_OSS

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
REASON_MARK, CONTENT_MARK, NAME_MARK = "REASONMARK", "CONTENTMARK", "namemark"
PROBE_CALL_ID = "call00000"  # some templates take only nine letters and digits

HARMONY = "harmony"
CALL_SYNTAXES: dict[str, CallSyntax] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "seed_oss": SEED_OSS,
    "minimax": MINIMAX,
    "glm": PairCalls(),
    "nemotron": NEMOTRON,
    "granite": GRANITE,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "kimi_k2": KIMI_K2,
    "gemma": GEMMA,
    "function_gemma": FUNCTION_GEMMA,
    "pythonic": PythonCalls(),
    "json": BARE_JSON,
}
THINK_TAGS: dict[str, tuple[str, str]] = {
    "think": (THINK, THINK_END),
    "nemotron": (THINK, THINK_END),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "gemma": ("<|channel>thought", "<channel|>"),
}
TOOL_CALL_PARSERS = (*CALL_SYNTAXES, HARMONY)
REASONING_PARSERS = (*THINK_TAGS, HARMONY, "none")
# What tells the syntaxes apart, in a printed call or in the template's own text; the first that is found counts.
MARKERS = (
    ("<TOOLCALL>", "nemotron"),
    ("<|tool_call_start|>", "pythonic"),
    ("[TOOL_CALLS]", "mistral"),
    ("<start_function_call>", "function_gemma"),
    ("<|tool_call>", "gemma"),
    ("<|tool_call|>", "granite"),
    ("<|python_tag|>", "llama3_json"),
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax"),
    ("<arg_key>", "glm"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<|tool_call_begin|>", "kimi_k2"),
)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Tags and the separators that belong to them. has_reasoning: the model writes blocks between think_tags.

    call_separator None: all blanks between content and a call belong to the call. is_harmony: messages in channels,
    to which nothing else here applies.
    """

    has_reasoning: bool = False
    reasoning_prefix: str = "\n"
    reasoning_suffix: str = "\n"
    content_prefix: str = "\n\n"
    call_separator: str | None = None
    syntax: CallSyntax = HERMES
    think_tags: tuple[str, str] = (THINK, THINK_END)
    is_harmony: bool = False

    @property
    def markup(self) -> tuple[str, ...]:
        """Strings that the parser must see, even where they are control tokens."""
        if self.is_harmony:
            return harmony_parser.MARKUP
        return (*self.think_tags, *self.syntax.markup) if self.has_reasoning else self.syntax.markup

    def new_call_id(self) -> str:
        """A new id of a tool call, of the form that the family's templates take."""
        num_chars = self.syntax.call_id_chars
        return uuid.uuid4().hex[:num_chars] if num_chars else f"call_{uuid.uuid4().hex[:24]}"

    def new_parser(
        self,
        prompt_text: str,
        *,
        tool_names: Collection[str] | None,
        tools: Sequence[Mapping[str, Any]] = (),
        hides_calls: bool = False,
    ) -> AnswerParser:
        """A parser for one answer. The end of the prompt tells whether a reasoning block is already open.

        tool_names: the declared tools; None without any (markup is then dropped, its text is content). hides_calls:
        no call is allowed, one that is made all the same is left out.
        tools: as in the request; their schemas give types to values that are written as plain text.
        """
        names = None if tool_names is None else frozenset(tool_names)
        if self.is_harmony:
            return harmony_parser.HarmonyParser(prompt_text, tool_names=names, hides_calls=hides_calls)
        is_open, prefix = False, self.reasoning_prefix
        if self.has_reasoning:
            stripped = prompt_text.rstrip()
            is_open = stripped.endswith(self.think_tags[0])
            blank = prompt_text[len(stripped) :]
            if is_open and blank:
                prefix = prefix[len(blank) :] if prefix.startswith(blank) else ""
        return OutputParser(
            think_tags=self.think_tags if self.has_reasoning else None,
            syntax=self.syntax,
            tool_names=names,
            schemas={tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools},
            is_reasoning=is_open,
            first_prefix=prefix,
            reasoning_prefix=self.reasoning_prefix,
            reasoning_suffix=self.reasoning_suffix,
            content_prefix=self.content_prefix,
            call_separator=self.call_separator,
            hides_calls=hides_calls,
        )


def select_format(
    template: ChatTemplate | None, *, tool_call_parser: str | None = None, reasoning_parser: str | None = None
) -> OutputFormat:
    """The format of a template: its calls by how it prints one, its reasoning by the tags it knows.

    Names of TOOL_CALL_PARSERS and REASONING_PARSERS take the place of what the template tells.
    """
    called = "" if template is None else _render(template, content=CONTENT_MARK, call=True)
    reasoned = "" if template is None else _render(template, reasoning=REASON_MARK, content=CONTENT_MARK)
    source = "" if template is None else template.source
    calls = tool_call_parser or (
        HARMONY if reasoning_parser == HARMONY else _find_syntax(source, _printed_answer(template, called))
    )
    if HARMONY in (calls, reasoning_parser):
        return OutputFormat(has_reasoning=True, is_harmony=True)
    syntax = CALL_SYNTAXES[calls]
    tags = _find_think_tags(source, reasoned) if reasoning_parser is None else THINK_TAGS.get(reasoning_parser)
    separators = [_between(called, CONTENT_MARK, opener) for opener in syntax.openers]
    separator = next((found for found in separators if found is not None), None)
    if tags is None:
        return OutputFormat(call_separator=separator, syntax=syntax)
    before = _between(reasoned, tags[0], REASON_MARK)
    after = _between(reasoned, REASON_MARK, tags[1])
    between = _between(reasoned, tags[1], CONTENT_MARK)
    default = OutputFormat()
    return OutputFormat(
        has_reasoning=True,
        reasoning_prefix=default.reasoning_prefix if before is None else before,
        reasoning_suffix=default.reasoning_suffix if after is None else after,
        content_prefix=default.content_prefix if between is None else between,
        call_separator=separator,
        syntax=syntax,
        think_tags=tags,
    )


def _find_syntax(source: str, printed: str) -> str:
    """The name of the syntax of a printed call, or else of calls that the template knows of; without a sign of any,
    the most usual one."""
    if all(word in source for word in (harmony_parser.CHANNEL, harmony_parser.MESSAGE, harmony_parser.START)):
        return HARMONY
    for text in (printed, source):
        for marker, name in MARKERS:
            if marker in text:
                return name
        tags = QWEN3_CODER.tags
        if tags.function in text and (tags.parameter in text or text is printed):
            return "qwen3_coder"
        if CALL in text:
            return "hermes"
    bare = _call_alone(printed)
    if bare.startswith("{") and NAME_MARK in bare:
        return "llama3_json" if '"parameters"' in bare else "json"
    return "json" if bare.startswith("[{") else "hermes"


def _printed_answer(template: ChatTemplate | None, called: str) -> str:
    """What the template adds for an answer that makes a call."""
    asked = "" if template is None else _render(template, tools=True)
    differ = (position for position, pair in enumerate(zip(asked, called, strict=False)) if pair[0] != pair[1])
    return called[next(differ, min(len(asked), len(called))) :]


def _call_alone(printed: str) -> str:
    """The line that names the probe's call from its first bracket on; empty if words stand before."""
    line = next((line for line in reversed(printed.splitlines()) if NAME_MARK in line), "")
    head, bracket, rest = line.partition("{")
    words = "".join(character for character in head if character.isalnum())
    is_header = head.endswith((">", "]", "[")) or not words
    return ("[" if head.endswith("[") else "") + bracket + rest if is_header else ""


def _find_think_tags(source: str, reasoned: str) -> tuple[str, str] | None:
    for tags in THINK_TAGS.values():
        if _between(reasoned, tags[0], REASON_MARK) is not None:
            return tags
    return next((tags for tags in THINK_TAGS.values() if tags[0] in source or tags[1] in source), None)


def _render(
    template: ChatTemplate,
    *,
    content: str | None = None,
    reasoning: str | None = None,
    call: bool = False,
    tools: bool = False,
) -> str:
    """A question, and with a content its answer. Empty when the template refuses it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "A"}]
    if content is not None:
        messages.append({"role": "assistant", "content": content})
    if reasoning is not None:
        messages[-1]["reasoning_content"] = reasoning
    if call:
        function = {"name": NAME_MARK, "arguments": {"x": 1}}
        messages[-1]["tool_calls"] = [{"id": PROBE_CALL_ID, "type": "function", "function": function}]
    schema = {"name": NAME_MARK, "description": "", "parameters": {"type": "object", "properties": {}}}
    offered = [{"type": "function", "function": schema}] if call or tools else None
    try:
        return template.render(messages, tools=offered, add_generation_prompt=False)
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
