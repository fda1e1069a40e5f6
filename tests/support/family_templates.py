"""Chat templates that behave like those of the families people run, each with a tokenizer that knows its tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from text_fixtures import TEMPLATES, RandomConversation, byte_level_json

from turnkeep.server.chat_template import ChatTemplate
from turnkeep.server.tokenizer import Tokenizer

IM, THINK, CALL = ("<|im_start|>", "<|im_end|>"), ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
ROLES = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
MISTRAL = (
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]", "[THINK]", "[/THINK]"),
)


@dataclass(frozen=True)
class Family:
    """What a family adds to its template. end: the token that ends an answer; calls_end: one that asks for results.

    parser: the syntax of its calls; open_end: what a model writes to end the thought that the prompt opened.
    kwargs: template switches to compare under.
    """

    tokens: tuple[str, ...]
    end: str
    parser: str
    calls_end: str | None = None
    open_end: str = "\n</think>\n\n"
    kwargs: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})


FAMILIES: dict[str, Family] = {
    "qwen3_coder": Family((*IM, *CALL), "<|im_end|>", "qwen3_coder", kwargs=({},)),
    "qwen35": Family((*IM, *CALL, *THINK), "<|im_end|>", "qwen3_coder"),
    "qwq": Family((*IM, *CALL, *THINK), "<|im_end|>", "hermes", kwargs=({},)),
    "nemotron2": Family(
        (*(f"<SPECIAL_{number}>" for number in (10, 11, 12)), *THINK), "<SPECIAL_12>", "nemotron", kwargs=({},)
    ),
    "nemotron3": Family(
        (*IM, *CALL, *THINK), "<|im_end|>", "qwen3_coder", open_end="\n</think>\n",
        kwargs=({}, {"enable_thinking": False}, {"truncate_history_thinking": False}),
    ),
    "granite3": Family((*ROLES, "<|tool_call|>"), "<|end_of_text|>", "granite", kwargs=({},)),
    "granite4": Family((*ROLES, *CALL), "<|end_of_text|>", "hermes", kwargs=({},)),
    "llama3": Family(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"), "<|eot_id|>", "llama3_json",
        kwargs=({}, {"date_string": "01 Jan 2026"}),
    ),
    "mistral3": Family(MISTRAL, "<|eos|>", "mistral", kwargs=({},)),
    "devstral": Family(MISTRAL, "<|eos|>", "mistral", kwargs=({},)),
    "gemma4": Family(
        (*("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"),
         *("<|tool_response>", "<tool_response|>", '<|"|>')), "<turn|>", "gemma",
    ),
    "gpt_oss": Family(
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"), "<|end|>",
        "harmony", calls_end="<|call|>", kwargs=({}, {"reasoning_effort": "high"}),
    ),
    "hermes3": Family((*IM, *CALL), "<|im_end|>", "hermes", kwargs=({},)),
    "lfm2": Family(
        (*IM, *THINK, "<|tool_call_start|>", "<|tool_call_end|>"), "<|im_end|>", "pythonic", kwargs=({},)
    ),
    "glm4": Family(
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *THINK, *CALL), "<|user|>",
        "glm", calls_end="<|observation|>",
    ),
    "deepseek3": Family(
        (*("<｜User｜>", "<｜Assistant｜>", *THINK, "<｜tool▁sep｜>"),
         *(f"<｜tool▁{part}▁{side}｜>" for part in ("output", "calls", "call") for side in ("begin", "end"))),
        "<|eos|>", "deepseek", open_end="</think>",
    ),
    "kimi_k2": Family(
        (*("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", *THINK),
         *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
         "<|tool_call_argument_begin|>"),
        "<|im_end|>", "kimi_k2", kwargs=({},),
    ),
    "minimax_m2": Family(
        ("]~!b[", "]~b]", "[e~[", *THINK, "<minimax:tool_call>", "</minimax:tool_call>"), "[e~[", "minimax",
        kwargs=({},),
    ),
    "seed_oss": Family(
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"), "<|eos|>", "seed_oss",
        kwargs=({}, {"thinking_budget": 0}),
    ),
}  # fmt: skip
FAMILY_NAMES = tuple(FAMILIES)


@dataclass(frozen=True)
class FamilyCase:
    name: str
    family: Family
    template: ChatTemplate
    tokenizer: Tokenizer
    tokenizer_json: str


@cache
def family_case(name: str) -> FamilyCase:
    """The family's template, with its own tokens in place of the fixture's markup."""
    family = FAMILIES[name]
    description = json.loads(byte_level_json())
    kept = [token for token in description["added_tokens"] if token["content"] in ("<|bos|>", "<|eos|>")]
    vocabulary = description["model"]["vocab"]
    next_id = max([*vocabulary.values(), *(token["id"] for token in description["added_tokens"])]) + 1
    for number, text in enumerate(family.tokens):
        is_special = text not in (*THINK, *CALL)
        kept.append({**kept[0], "id": next_id + number, "content": text, "special": is_special})
    description["added_tokens"] = kept
    text = json.dumps(description)
    template = ChatTemplate(
        (TEMPLATES / "families" / f"{name}.jinja").read_text(), bos_token="<|bos|>", eos_token="<|eos|>"
    )
    return FamilyCase(name, family, template, Tokenizer(text), text)


class FamilyConversation(RandomConversation):
    """Random messages as a client returns them: its calls carry ids of the form that all templates take."""

    def call(self) -> dict[str, Any]:
        return {**super().call(), "id": f"call{self.choice.randint(0, 99999):05d}"}
