"""The script of a scripted engine: rules read from a JSON or TOML file, and which of them answers a message.

Values only; knows no tokenizer and no requests. docs/scripted-engine.md describes the file.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

DEFAULT_MAX_MODEL_LEN = 262_144
MAX_DELAY_MS = 600_000.0


class ScriptError(ValueError):
    """The script cannot be used; the message names the file and the place in it."""


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tool call. name None: the first tool offered. arguments None: made to fit the tool's schema; a text is
    written as it stands, valid JSON or not."""

    name: str | None = None
    arguments: dict[str, Any] | str | None = None


class ScriptedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an answer goes wrong. error: this request alone; step: every request of the step; crash: the engine."""

    kind: Literal["error", "step", "crash"]
    after_tokens: int = 0
    times: int = 1  # how often; 0: always. A crash counts the engines that the server has started


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first rule that fits answers. A rule without answer, tool_calls and token_ids does what the default does."""

    match: str = ""  # a regular expression, searched in the last user or tool message
    role: Literal["user", "tool", "any"] = "any"
    answer: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ScriptedCall, ...] = ()
    token_ids: tuple[int, ...] | None = None  # the whole answer, instead of a text
    finish: Literal["stop", "length"] = "stop"  # length: the answer is repeated until max_tokens ends it
    first_delay_ms: float = 0.0  # before the first token
    delay_ms: float = 0.0  # before every other token
    fault: ScriptedFault | None = None


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a file. step_ms: how long every step of the engine takes at least."""

    rules: tuple[Rule, ...] = ()
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    step_ms: float = 0.0

    def rule_for(self, role: str, text: str) -> tuple[int, Rule]:
        """The rule that answers a message, with its number; -1 and an empty rule where none fits."""
        for number, rule in enumerate(self.rules):
            if rule.role in ("any", role) and re.search(rule.match, text):
                return number, rule
        return -1, Rule()


def load_script(path: Path) -> Script:
    """Read a .toml or .json file. Raises ScriptError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ScriptError(f"the script {path} cannot be read: {error.strerror}") from None
    try:
        content = tomllib.loads(data.decode()) if path.suffix == ".toml" else msgspec.json.decode(data)
        script = msgspec.convert(content, Script)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ScriptError(f"the script {path} cannot be used: {error}") from None
    _check(path, script)
    return script


def _check(path: Path, script: Script) -> None:
    delays = [script.step_ms]
    if script.max_model_len < 1:
        raise ScriptError(f"the script {path} cannot be used: max_model_len must be at least 1")
    for number, rule in enumerate(script.rules):
        delays += [rule.delay_ms, rule.first_delay_ms]
        try:
            re.compile(rule.match)
        except re.error as error:
            raise ScriptError(f"the script {path} cannot be used: rules[{number}].match: {error}") from None
        if rule.token_ids is not None and not rule.token_ids and rule.finish == "length":
            raise ScriptError(f"the script {path} cannot be used: rules[{number}] repeats no tokens at all")
        if rule.token_ids is not None and (rule.answer is not None or rule.tool_calls or rule.reasoning):
            raise ScriptError(f"the script {path} cannot be used: rules[{number}] has token_ids and a text")
    if not all(0.0 <= delay <= MAX_DELAY_MS for delay in delays):
        raise ScriptError(f"the script {path} cannot be used: a delay lies between 0 and {MAX_DELAY_MS:.0f} ms")
