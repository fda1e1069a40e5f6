"""Trains `tokenizer.json` from generated conversations: `python -m turnkeep.models.demo.tokenizer_training`.

A byte-level BPE with the full byte alphabet, one token per digit and the message markers as added tokens.
"""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from turnkeep.models.demo import words
from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.rendering import (
    BOS,
    CALL,
    CALL_END,
    DIRECTORY,
    END,
    PAD,
    SPECIAL_TOKENS,
    THINK,
    THINK_END,
    render_message,
    render_system,
)

VOCAB_SIZE = 1280
MAX_LENGTH = 8192

# One digit, a word with its space, a run of punctuation with its space, or white space.
_PIECES = r"\p{N}| ?[\p{L}\p{M}_]+| ?[^\s\p{L}\p{M}\p{N}_]+|\s+"


def training_text(num_conversations: int, num_turns: int) -> Iterator[str]:
    """Conversations with reasoning, then every word of the tables in the two spellings that matter."""
    for seed in range(num_conversations):
        script = conversation(seed, num_turns)
        yield render_system(script.system, script.tools)
        for message in script.messages()[1:]:
            yield render_message(message, with_reasoning=True)
    quoted = [*words.NAMES, *words.CITIES, *words.ITEMS, *words.DAYS, *words.STATUSES, "cancelled"]
    for _ in range(num_conversations):
        yield from (f"to {value}" for value in [*quoted, *words.COLORS, *words.PAYMENTS, *words.SUPPLIERS])
        yield from (f'"{value}"' for value in quoted)
    for phrasings, reasoning, answer in words.SMALL_TALK:
        for _ in range(20):
            yield from phrasings
            yield from (reasoning, answer)
    yield " ".join(string.ascii_letters)


def train_tokenizer(num_conversations: int = 400, num_turns: int = 30) -> Tokenizer:
    """Train the tokenizer; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=True,
    )

    def without_markers() -> Iterator[str]:
        for text in training_text(num_conversations, num_turns):
            for token in SPECIAL_TOKENS:
                text = text.replace(token, "\n")
            yield text

    tokenizer.train_from_iterator(without_markers(), trainer)
    # Reasoning and tool-call markers are content, which a decoder that skips special tokens has to keep; the
    # trainer knows only special ones.
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] not in (THINK, THINK_END, CALL, CALL_END)
    return Tokenizer.from_str(json.dumps(state))


def tokenizer_config(directory: Path) -> dict[str, object]:
    """The content of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": END,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": (directory / "chat_template.jinja").read_text(encoding="utf-8"),
    }


def main() -> None:
    """Train and write `tokenizer.json` and `tokenizer_config.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where to write (default: the package)")
    directory: Path = parser.parse_args().directory
    train_tokenizer().save(str(directory / "tokenizer.json"))
    config = json.dumps(tokenizer_config(DIRECTORY), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
