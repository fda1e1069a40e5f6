"""Makes the grammar of one answer: free reasoning, then what the request demands, in the model's own call format.

Pure text in llguidance's notation; engine/grammar.py follows it. The form of a call is what the chat template prints
for one, so the output is what the next prompt will repeat.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnkeep.server import errors
from turnkeep.server.chat_template import ChatTemplate, TemplateError
from turnkeep.server.output_rules import OutputRules
from turnkeep.server.parsers.output_format import CALL, CALL_END, PROBE_CALL_ID, OutputFormat
from turnkeep.server.tokenizer import Tokenizer

ANY_TEXT = r"/(?s:.+)/"
NAME_MARK, USER_MARK = "namemark", "USERMARK"
ARGUMENTS = re.compile(r'\{"first":(\s?)1,(\s?)"second":\s?"x"\}')
CLOSING_BRACKETS = re.compile(r"[\]}]*")
# JSON of an answer may be laid out over indented lines, but a model must not lose itself in blanks.
ANSWER_BLANKS = r"( |\n[ \t]{0,16})?"


@dataclass(frozen=True, slots=True)
class CallLayout:
    """Calls are first + name + between + arguments, for each further one again + name + between + arguments, and last.

    again None: the model makes one call at a time. opener: the tag that `first` begins with, empty for bare JSON.
    """

    opener: str = CALL
    first: str = f'{CALL}\n{{"name": "'
    between: str = '", "arguments": '
    again: str | None = f'}}\n{CALL_END}\n{CALL}\n{{"name": "'
    last: str = f"}}\n{CALL_END}"
    key_separator: str = ": "
    item_separator: str = ", "


def find_call_layout(template: ChatTemplate, output_format: OutputFormat) -> CallLayout | None:
    """How the template prints calls. None: not as names followed by JSON arguments, or with an id in each."""
    one = _printed_calls(template, 1)
    if one is None or NAME_MARK not in one:
        # A template that knows no calls; the parser still reads the usual form.
        return CallLayout() if output_format.syntax.openers == (CALL,) else None
    name, arguments = one.find(NAME_MARK), ARGUMENTS.search(one)
    if arguments is None or arguments.start() < name:
        return None
    starts = {one.rfind(opener, 0, name): opener for opener in output_format.syntax.openers}
    start, opener = max(starts.items(), default=(-1, ""))
    for outer in output_format.syntax.openers:  # of a section of calls, in front of the first
        if one[:start].endswith(outer):
            start, opener = start - len(outer), outer
    if start < 0:
        opener, start = "", one.rfind("{", 0, name)
        start -= one[start - 1 : start] == "["
        # Bare JSON begins where the answer begins; anything in front of it would be a tag that is not known.
        if not output_format.syntax.bare_starts or one[:start] != _generation_prompt(template):
            return None
    last = _end_of_calls(one[arguments.end() :], output_format)
    layout = CallLayout(
        opener=opener,
        first=one[start:name],
        between=one[name + len(NAME_MARK) : arguments.start()],
        again=_between_calls(_printed_calls(template, 2)),
        last=last,
        key_separator=f":{arguments[1]}",
        item_separator=f",{arguments[2]}",
    )
    has_id = any(PROBE_CALL_ID in text for text in (layout.first, layout.between, layout.again or "", last))
    return None if has_id else layout


def _printed_calls(template: ChatTemplate, num_calls: int) -> str | None:
    """What the template prints behind a user message for an answer of calls. None: it refuses."""
    function = {"name": NAME_MARK, "arguments": {"first": 1, "second": "x"}}
    calls = [{"id": PROBE_CALL_ID, "type": "function", "function": function}] * num_calls
    return _printed(template, [{"role": "assistant", "content": "", "tool_calls": calls}])


def _generation_prompt(template: ChatTemplate) -> str | None:
    return _printed(template, [])


def _printed(template: ChatTemplate, answers: list[dict[str, Any]]) -> str | None:
    """What is printed behind a user message: the answers, or without any the generation prompt."""
    schema = {"name": NAME_MARK, "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": schema}]
    messages = [{"role": "user", "content": USER_MARK}, *answers]
    try:
        text = template.render(messages, tools=tools, add_generation_prompt=not answers)
    except TemplateError:
        return None
    return text[text.rfind(USER_MARK) + len(USER_MARK) :]


def _between_calls(two: str | None) -> str | None:
    """What stands between the arguments of one call and the name of the next."""
    found = [*ARGUMENTS.finditer(two or "")]
    if two is None or len(found) != 2:
        return None
    return two[found[0].end() : two.rfind(NAME_MARK, 0, found[1].start())]


def _end_of_calls(rest: str, output_format: OutputFormat) -> str:
    """The part of what is printed behind the last arguments that belongs to the calls."""
    tags = [closer for closer in output_format.syntax.closers if len(closer) > 1]
    ends = [rest.find(tag) + len(tag) for tag in tags if tag in rest]
    brackets = CLOSING_BRACKETS.match(rest)
    end = min(ends, default=len(brackets[0]) if brackets else 0)
    for tag in tags:  # that of a section of calls
        end += len(tag) if rest.startswith(tag, end) else 0
    return rest[:end]


class GrammarWriter:
    """Writes grammars for one model. special_ids: tokens that llguidance takes for themselves, not for their text."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, output_format: OutputFormat, special_ids: frozenset[int]
    ) -> None:
        self._layout = None if output_format.is_harmony else find_call_layout(template, output_format)
        self._format = output_format
        # Bytes that are no text by themselves are special to llguidance too; they are spelled by no text here.
        added_ids = special_ids & (tokenizer.special_ids | tokenizer.control_ids)
        self._special = {tokenizer.token_text(token_id): token_id for token_id in added_ids}
        ordered = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(ordered) or "(?!)")

    def write(self, rules: OutputRules, tools: Sequence[dict[str, Any]], prompt_text: str | None) -> str:
        """The grammar of an answer to this prompt, whose end tells whether reasoning is open. None for a bare text,
        which is continued without reasoning. Raises ApiError."""
        if self._format.is_harmony and prompt_text is not None:
            raise errors.unsupported("The output of this model, in channels, cannot be constrained.", rules.param)
        lines: list[str] = []
        grammars: list[dict[str, Any]] = []
        bodies: list[str] = []
        if rules.calls != "none":
            layout = self._add_calls(rules, tools, lines, grammars)
            if rules.calls == "required" or rules.answer is not None:
                bodies.append(f"{self._literal(layout.first)} calls")
            else:
                bodies += self._free_bodies(layout, lines, rules.param)
        if rules.answer is not None:
            bodies.append("@answer")
            grammars.append({"name": "answer", **_answer_grammar(rules.answer)})
        start = f"start: {self._thought(prompt_text, lines)} body\nbody: " + "\n  | ".join(bodies)
        top = {"name": "top", "lark_grammar": "\n".join([start, *lines])}
        return json.dumps({"grammars": [top, *grammars]}, ensure_ascii=False)

    def _thought(self, prompt_text: str | None, lines: list[str]) -> str:
        """Reasoning is free; whether there is any is up to the prompt's end, or else to the model."""
        begin, end = self._format.think_tags
        tail = "" if prompt_text is None else prompt_text.rstrip()
        if prompt_text is None or not self._format.has_reasoning or tail.endswith(end):
            return ""
        is_open = tail.endswith(begin)
        opening = "" if is_open else f"{self._literal(begin)} "
        if self._special_pattern.fullmatch(end):
            lines.append(f"thought: {opening}THOUGHT? {self._literal(end)}\nTHOUGHT: {ANY_TEXT}")
        elif is_open or self._special_pattern.search(begin):
            lines.append(f"thought: {opening}thinking\nthinking[lazy]: /(?s:.*){_escape(end)}/")
        else:  # one lexeme, as what follows may begin like text
            lines.append(f"thought[lazy]: /{_escape(begin)}(?s:.*){_escape(end)}/")
        gap = f" {_quoted(self._format.content_prefix)}?" if self._format.content_prefix else ""
        return f"thought{gap}" if is_open else f"(thought{gap})?"

    def _add_calls(
        self,
        rules: OutputRules,
        tools: Sequence[dict[str, Any]],
        lines: list[str],
        grammars: list[dict[str, Any]],
    ) -> CallLayout:
        """Adds `calls`: everything behind the layout's `first`."""
        layout = self._layout
        if layout is None:
            raise errors.unsupported("The form of this model's tool calls cannot be constrained.", rules.param)
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        alternatives = []
        for index, name in enumerate(rules.tool_names):
            before = json.dumps(name, ensure_ascii=False)[1:-1] + layout.between
            alternatives.append(f"{self._literal(before)} @arguments_{index}")
            schema = _arguments_schema(functions[name]["parameters"], layout)
            grammars.append({"name": f"arguments_{index}", "json_schema": schema})
        lines.append("call: " + "\n  | ".join(alternatives))
        is_single = rules.is_single_call or layout.again is None
        more = "" if is_single else f" ({self._literal(layout.again or '')} call)*"
        lines.append(f"calls: call{more} {self._literal(layout.last)}")
        return layout

    def _free_bodies(self, layout: CallLayout, lines: list[str], param: str) -> list[str]:
        """Text in which the opening tag of a call means a call, so that no call escapes the rules."""
        openers = self._format.syntax.openers
        if not layout.opener:
            raise errors.unsupported("This model's tool calls cannot be told from text as it is written.", param)
        tags = "|".join(map(_escape, openers))
        lines.append(f"TEXT: {ANY_TEXT} & ~/(?s:.*)({tags})(?s:.*)/")
        if self._special_pattern.match(layout.opener):
            return ["TEXT?", f"TEXT? {self._literal(layout.first)} calls"]
        lines.append(f"before[lazy]: /(?s:.*){_escape(layout.opener)}/")
        return ["TEXT?", f"before {self._literal(layout.first.removeprefix(layout.opener))} calls"]

    def _literal(self, text: str) -> str:
        """A fixed text; special tokens in it stand for themselves."""
        parts: list[str] = []
        position = 0
        for match in self._special_pattern.finditer(text):
            if match.start() > position:
                parts.append(_quoted(text[position : match.start()]))
            parts.append(f"<[{self._special[match[0]]}]>")
            position = match.end()
        if position < len(text):
            parts.append(_quoted(text[position:]))
        return " ".join(parts) or _quoted("")


def _answer_grammar(answer: dict[str, Any]) -> dict[str, Any]:
    """One of llguidance's grammars for the form of a content."""
    if "json_schema" in answer:
        return {"json_schema": {**answer["json_schema"], "x-guidance": {"whitespace_pattern": ANSWER_BLANKS}}}
    if "regex" in answer:
        return {"lark_grammar": f"start: /{_inside_slashes(answer['regex'])}/"}
    if "choice" in answer:
        return {"lark_grammar": "start: " + " | ".join(map(_quoted, answer["choice"]))}
    return answer


def _arguments_schema(parameters: dict[str, Any], layout: CallLayout) -> dict[str, Any]:
    """Arguments as the template prints JSON. Tools' schemas may hold words that only people read: those are passed
    over. A tool takes the parameters that it declares, and no others unless it says so."""
    schema = {"type": "object", **parameters}
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    schema["x-guidance"] = {
        "whitespace_flexible": False,
        "key_separator": layout.key_separator,
        "item_separator": layout.item_separator,
        "lenient": True,
    }
    return schema


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escape(text: str) -> str:
    return _inside_slashes(re.escape(text))


def _inside_slashes(pattern: str) -> str:
    """A pattern as it may stand between slashes."""
    result: list[str] = []
    characters = iter(pattern)
    for character in characters:
        if character == "\\":
            result.append(character + next(characters, ""))
        else:
            result.append({"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(character, character))
    return "".join(result)
