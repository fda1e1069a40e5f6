"""Lets a model play the agent's side of one scripted turn against the simulated desk.

Takes any function that continues token ids; holds the demo format's parser for whole messages. The server has
its own streaming parsers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnkeep.models.demo.order_desk import OrderDesk
from turnkeep.models.demo.rendering import (
    ASSISTANT,
    END,
    TOOL,
    USER,
    load_tokenizer,
    render_message,
    render_system,
)
from turnkeep.models.demo.script import Conversation

MAX_MESSAGES = 6
MAX_MESSAGE_TOKENS = 96

# Continues a prompt's text greedily up to the end marker, which is not part of the result.
Generate = Callable[[str], str]

_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass
class Played:
    """What the model did in one turn: its calls, its final answer, and all it wrote and read."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    answer: str = ""
    text: str = ""


def parse_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The tool calls of one message; a call that is no valid JSON counts as a call of nothing."""
    calls = []
    for body in _CALL.findall(_THINKING.sub("", text)):
        try:
            call = json.loads(body)
            calls.append((str(call["name"]), dict(call["arguments"])))
        except (ValueError, KeyError, TypeError):
            calls.append(("", {}))
    return calls


def play_turn(script: Conversation, index: int, generate: Generate) -> Played:
    """Play turn `index` after the scripted history, up to an answer without calls or `MAX_MESSAGES` messages."""
    desk = OrderDesk(script.seed)
    prompt = render_system(script.system, script.tools)
    for turn in script.turns[:index]:
        prompt += f"{USER}{turn.user}{END}"
        prompt += "".join(render_message(message, with_reasoning=False) for message in turn.messages)
        for call in turn.expected_calls:
            desk.call(call.name, call.arguments)
    prompt += f"{USER}{script.turns[index].user}{END}"
    played = Played()
    for _ in range(MAX_MESSAGES):
        written = generate(prompt + played.text + ASSISTANT)
        played.text += f"{ASSISTANT}{written}{END}"
        calls = parse_calls(written)
        played.calls += calls
        if not calls:
            played.answer = _THINKING.sub("", written)
            break
        for name, arguments in calls:
            played.text += f"{TOOL}{desk.call_json(name, arguments)}{END}"
    return played


def reference_generate(directory: Path) -> Generate:
    """Greedy decoding in float32 by transformers' implementation of the model (needs the `test` extra)."""
    import torch
    from transformers import NemotronHForCausalLM

    model = NemotronHForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    tokenizer = load_tokenizer(directory)
    end = tokenizer.token_to_id(END)

    def generate(prompt: str) -> str:
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_MESSAGE_TOKENS,
                eos_token_id=end, pad_token_id=0,
            )  # fmt: skip
        written: list[int] = output[0, ids.shape[1] :].tolist()
        if written and written[-1] == end:
            written.pop()
        text: str = tokenizer.decode(written, skip_special_tokens=False)
        return text

    return generate
