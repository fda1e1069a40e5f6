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
from turnkeep.server.parsers.output_format import CALL, CALL_END, THINK, THINK_END, OutputFormat
from turnkeep.server.tokenizer import Tokenizer

ANY_TEXT = r"/(?s:.+)/"
NAME_MARK, USER_MARK = "namemark", "USERMARK"
ARGUMENTS = re.compile(r'\{"first":(\s?)1,(\s?)"second":\s?"x"\}')
# JSON of an answer may be laid out over lines, but a model must not lose itself in blanks.
ANSWER_BLANKS = r"[ \n\t]{0,16}"


@dataclass(frozen=True, slots=True)
class CallLayout:
    """The text of a call is before + name + between + arguments + after; separator stands between two calls."""

    before: str = f'{CALL}\n{{"name": "'
    between: str = '", "arguments": '
    after: str = f"}}\n{CALL_END}"
    separator: str = "\n"
    key_separator: str = ": "
    item_separator: str = ", "


def find_call_layout(template: ChatTemplate) -> CallLayout | None:
    """How the template prints calls. None: not as a name followed by JSON arguments between the known tags."""
    function = {"name": NAME_MARK, "arguments": {"first": 1, "second": "x"}}
    calls = [{"id": f"call_{index}", "type": "function", "function": function} for index in range(2)]
    schema = {"name": NAME_MARK, "description": "", "parameters": {"type": "object", "properties": {}}}
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        text = template.render(
            [{"role": "user", "content": USER_MARK}, answer],
            tools=[{"type": "function", "function": schema}],
            add_generation_prompt=False,
        )
    except TemplateError:
        return CallLayout()
    text = text[text.rfind(USER_MARK) + len(USER_MARK) :]
    if NAME_MARK not in text:
        return CallLayout()  # a template that knows no calls; the parser still reads the usual form
    found = [*ARGUMENTS.finditer(text)]
    start, second = text.find(CALL), text.find(CALL, text.find(CALL_END))
    end = text.find(CALL_END)
    name = text.find(NAME_MARK)
    if len(found) != 2 or not 0 <= start < name < found[0].start() < end < second:
        return None
    return CallLayout(
        before=text[start:name],
        between=text[name + len(NAME_MARK) : found[0].start()],
        after=text[found[0].end() : end + len(CALL_END)],
        separator=text[end + len(CALL_END) : second],
        key_separator=f":{found[0][1]}",
        item_separator=f",{found[0][2]}",
    )


class GrammarWriter:
    """Writes grammars for one model. special_ids: tokens that llguidance takes for themselves, not for their text."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, output_format: OutputFormat, special_ids: frozenset[int]
    ) -> None:
        self._layout = find_call_layout(template)
        self._format = output_format
        # Bytes that are no text by themselves are special to llguidance too; they are spelled by no text here.
        added_ids = special_ids & (tokenizer.special_ids | tokenizer.control_ids)
        self._special = {tokenizer.token_text(token_id): token_id for token_id in added_ids}
        ordered = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(ordered) or "(?!)")

    def write(self, rules: OutputRules, tools: Sequence[dict[str, Any]], prompt_text: str | None) -> str:
        """The grammar of an answer to this prompt, whose end tells whether reasoning is open. None for a bare text,
        which is continued without reasoning. Raises ApiError."""
        lines: list[str] = []
        grammars: list[dict[str, Any]] = []
        bodies: list[str] = []
        if rules.calls != "none":
            self._add_calls(rules, tools, lines, grammars)
        if rules.calls == "required" or (rules.calls == "allowed" and rules.answer is not None):
            bodies.append(self._literal(CALL) + " invocation more")
        if rules.answer is not None:
            bodies.append("@answer")
            grammars.append({"name": "answer", **_answer_grammar(rules.answer)})
        elif rules.calls != "required":
            bodies += self._free_bodies(lines)
        start = f"start: {self._thought(prompt_text, lines)} body\nbody: " + "\n  | ".join(bodies)
        top = {"name": "top", "lark_grammar": "\n".join([start, *lines])}
        return json.dumps({"grammars": [top, *grammars]}, ensure_ascii=False)

    def _thought(self, prompt_text: str | None, lines: list[str]) -> str:
        """Reasoning is free; whether there is any is up to the prompt's end, or else to the model."""
        tail = "" if prompt_text is None else prompt_text.rstrip()
        if prompt_text is None or not self._format.has_reasoning or tail.endswith(THINK_END):
            return ""
        is_open = tail.endswith(THINK)
        if THINK in self._special and THINK_END in self._special:
            begin = "" if is_open else f"{self._literal(THINK)} "
            lines.append(f"thought: {begin}THOUGHT? {self._literal(THINK_END)}\nTHOUGHT: {ANY_TEXT}")
        else:
            begin = "" if is_open else THINK
            lines.append(f"thought[lazy]: /{_escape(begin)}(?s:.*){_escape(THINK_END)}/")
        gap = f" {_quoted(self._format.content_prefix)}?" if self._format.content_prefix else ""
        return f"thought{gap}" if is_open else f"(thought{gap})?"

    def _add_calls(
        self,
        rules: OutputRules,
        tools: Sequence[dict[str, Any]],
        lines: list[str],
        grammars: list[dict[str, Any]],
    ) -> None:
        """An invocation is a call behind its opening tag; `more` are the calls after the first."""
        layout = self._layout
        if layout is None:
            raise errors.unsupported("The form of this model's tool calls cannot be constrained.", rules.param)
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        alternatives = []
        for index, name in enumerate(rules.tool_names):
            before = layout.before.removeprefix(CALL) + json.dumps(name, ensure_ascii=False)[1:-1] + layout.between
            alternatives.append(f"{self._literal(before)} @arguments_{index} {self._literal(layout.after)}")
            schema = _arguments_schema(functions[name]["parameters"], layout)
            grammars.append({"name": f"arguments_{index}", "json_schema": schema})
        lines.append("invocation: " + "\n  | ".join(alternatives))
        again = f"({self._literal(layout.separator + CALL)} invocation)*"
        lines.append(f"more: {_quoted('') if rules.is_single_call else again}")

    def _free_bodies(self, lines: list[str]) -> list[str]:
        """Text in which the opening tag of a call means a call, so that no call escapes the rules."""
        lines.append(f"TEXT: {ANY_TEXT} & ~/(?s:.*){_escape(CALL)}(?s:.*)/")
        if CALL in self._special:
            return ["TEXT?", f"TEXT? {self._literal(CALL)} invocation more"]
        lines.append(f"before[lazy]: /(?s:.*){_escape(CALL)}/")
        return ["TEXT?", "before invocation more"]

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
