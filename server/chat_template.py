"""Chat templates: Jinja source to prompt text, in a sandbox with limits, as Hugging Face transformers renders them.

Also the door to the canonical messages it renders. Knows no tokenizer: prompt text may hold control tokens as text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from turnkeep.server.chat_messages import (
    Message,
    MessageError,
    TemplateError,
    check_template_kwargs,
    normalize_messages,
    normalize_tools,
)

__all__ = [
    "ChatTemplate",
    "Message",
    "MessageError",
    "RenderLimits",
    "TemplateError",
    "check_template_kwargs",
    "normalize_messages",
    "normalize_tools",
]

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may cost. max_s: processor time of its thread, so that a busy machine refuses nothing."""

    max_s: float = 2.0
    max_chars: int = 16 * 1024 * 1024


@dataclass(slots=True)
class _Rendering:
    """The rendering in progress, seen by the functions a template calls."""

    deadline_s: float
    max_chars: int
    now: float


_rendering: ContextVar[_Rendering | None] = ContextVar("rendering", default=None)


class _LimitExceeded(Exception):
    pass


class _GenerationTag(Extension):
    """{% generation %} marks what the agent wrote, for training; in a prompt it prints its body."""

    tags = {"generation"}  # noqa: RUF012  (the name and form that Jinja reads)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a look at the clock in every loop and a bound on results of `*`, `**` and `%`."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            tick = nodes.Call(nodes.Name("_tick", "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))
        for node in tree.find_all(nodes.Node):
            node.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        state = _rendering.get()
        limit = state.max_chars if state else RenderLimits().max_chars
        if operator == "**" and isinstance(left, int | float) and isinstance(right, int | float) and abs(right) > 64:
            raise _LimitExceeded("a power is too large")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > limit:
                    raise _LimitExceeded("a repetition is too long")
        if operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\d{5}|\*)", left):
            raise _LimitExceeded("a formatted field is too wide")
        return super().call_binop(context, operator, left, right)


class _TemplateNamespace(jinja2.utils.Namespace):
    """A namespace that takes no underscore names, which lead to the interpreter's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As Jinja's own: `self` stays usable as the name of a value.
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_namespace_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_namespace_name(name)
        super().__setitem__(name, value)


def _check_namespace_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")


def _tick() -> None:
    state = _rendering.get()
    if state is not None and time.thread_time() > state.deadline_s:
        raise _LimitExceeded("rendering takes too long")


def _raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    state = _rendering.get()
    return datetime.fromtimestamp(state.now if state else time.time()).strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_TemplateNamespace, _tick=_tick
    )
    return environment


class ChatTemplate:
    """One template with its model's special token texts. Rendering is pure and may run in any thread."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises TemplateError for a syntax error."""
        self.source = source
        self.limits = limits or RenderLimits()
        self._clock = clock
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        if bos_token is not None:
            self.special_tokens["bos_token"] = bos_token
        if eos_token is not None:
            self.special_tokens["eos_token"] = eos_token
        self._reasoning_keys = tuple(key for key in REASONING_KEYS if key in source)
        try:
            self._template = _make_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template has a syntax error at line {error.lineno}: {error.message}"
            ) from None

    @property
    def reads_reasoning(self) -> bool:
        """Whether the template prints the reasoning of messages at all."""
        return bool(self._reasoning_keys)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        now: float | None = None,
    ) -> str:
        """Prompt text of canonical messages. now: seconds since the epoch that `strftime_now` shows (default: the
        clock). Raises TemplateError when the template refuses the messages or a limit is reached."""
        variables = {
            **self.special_tokens,
            **(template_kwargs or {}),
            "messages": [self._aliased(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        state = _Rendering(
            time.thread_time() + self.limits.max_s, self.limits.max_chars, self._clock() if now is None else now
        )
        token = _rendering.set(state)
        try:
            return self._collect(variables, state)
        except TemplateError:
            raise
        except (jinja2.exceptions.TemplateError, _LimitExceeded) as error:
            raise TemplateError(_error_text(error), "messages") from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise TemplateError(_error_text(error), "messages") from error
        finally:
            _rendering.reset(token)

    def _collect(self, variables: dict[str, Any], state: _Rendering) -> str:
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.root_render_func(self._template.new_context(variables)):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > state.max_chars:
                raise _LimitExceeded(f"the prompt is longer than {state.max_chars} characters")
        _tick()
        return "".join(pieces)

    def _aliased(self, message: Message) -> Message:
        """The message with its reasoning under every name that this template reads."""
        reasoning = message.get("reasoning_content")
        if not reasoning:
            return message
        return {**message, **dict.fromkeys(self._reasoning_keys, reasoning)}


def _error_text(error: Exception) -> str:
    return f"the chat template cannot render these messages: {str(error)[:MAX_ERROR_CHARS]}"
