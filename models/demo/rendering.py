"""The chat template once more in plain Python, and its tokens with a mask of what the agent writes itself.

Training renders millions of tokens and needs to know which the agent wrote; a test holds this to
`chat_template.jinja`. Knows the tokenizer, nothing about models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from turnkeep.models.demo.script import Message, Turn

PAD, BOS, END, SYSTEM, USER, ASSISTANT, TOOL = (
    "<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
)  # fmt: skip
THINK, THINK_END, CALL, CALL_END = "<think>", "</think>", "<tool_call>", "</tool_call>"
SPECIAL_TOKENS = (PAD, BOS, END, SYSTEM, USER, ASSISTANT, TOOL, THINK, THINK_END, CALL, CALL_END)

DIRECTORY = Path(__file__).resolve().parent


def load_tokenizer(directory: Path = DIRECTORY) -> Tokenizer:
    """The tokenizer of the demo model."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return tokenizer


def render_system(system: str | None, tools: list[dict[str, Any]] | None) -> str:
    """The system block; empty without system text and tools."""
    if system is None and not tools:
        return ""
    text = SYSTEM + (system or "")
    if tools:
        text += "\nTools:"
        for tool in tools:
            function = tool["function"]
            keys = ", ".join(function["parameters"]["properties"])
            text += f"\n{function['name']}({keys}): {function['description']}"
    return text + END


def render_message(message: Message, *, with_reasoning: bool) -> str:
    """One user, assistant or tool message as the template writes it."""
    if message["role"] == "user":
        return f"{USER}{message['content']}{END}"
    if message["role"] == "tool":
        return f"{TOOL}{message['content']}{END}"
    text = ASSISTANT
    if with_reasoning and message.get("reasoning_content"):
        text += f"{THINK}{message['reasoning_content']}{THINK_END}"
    text += message["content"] or ""
    for call in message.get("tool_calls", ()):
        function = call["function"]
        text += f'{CALL}{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}{CALL_END}'
    return text + END


@dataclass
class TokenSpan:
    """Token ids and, per token, the weight of the loss that predicts it."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def extend(self, other: TokenSpan) -> None:
        """Append another span."""
        self.ids.extend(other.ids)
        self.weights.extend(other.weights)

    def __len__(self) -> int:
        return len(self.ids)


class TurnEncoder:
    """Encodes turns for training. `context_weight` is the loss weight of tokens that the agent did not write."""

    def __init__(self, tokenizer: Tokenizer, *, context_weight: float) -> None:
        self.tokenizer = tokenizer
        self.context_weight = context_weight
        self._think = tokenizer.token_to_id(THINK)

    def context(self, text: str) -> TokenSpan:
        """Text that the agent reads."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        weights = [self.context_weight] * len(ids)
        weights[:1] = [0.0]
        return TokenSpan(ids, weights)

    def turn(self, turn: Turn, *, with_reasoning: bool) -> TokenSpan:
        """A whole turn. Without reasoning the first token of an agent message carries no loss: there the agent
        would really begin to think, the template has only removed it."""
        span = self.context(f"{USER}{turn.user}{END}")
        for message in turn.messages:
            text = render_message(message, with_reasoning=with_reasoning)
            part = self.context(text)
            if message["role"] == "assistant":
                part.weights = [0.0] + [1.0] * (len(part) - 1)
                if part.ids[1] != self._think:
                    part.weights[1] = 0.0
            span.extend(part)
        return span


def concatenate(spans: Sequence[TokenSpan]) -> TokenSpan:
    """All spans as one."""
    result = TokenSpan()
    for span in spans:
        result.extend(span)
    return result
