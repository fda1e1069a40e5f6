"""The tokenizer: lossless on any text, one token per digit, single-token markers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnkeep.models.demo.rendering import (
    CALL,
    CALL_END,
    DIRECTORY,
    END,
    SPECIAL_TOKENS,
    THINK,
    THINK_END,
    load_tokenizer,
)
from turnkeep.models.demo.tokenizer_training import tokenizer_config, train_tokenizer

TOKENIZER = load_tokenizer()


@given(st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_encoding(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(st.integers(min_value=0, max_value=10**12))
@settings(max_examples=50, deadline=None)
def test_every_digit_is_one_token(number: int) -> None:
    assert TOKENIZER.encode(str(number), add_special_tokens=False).tokens == list(str(number))


@pytest.mark.parametrize("marker", SPECIAL_TOKENS)
def test_a_marker_is_one_token_anywhere(marker: str) -> None:
    ids = TOKENIZER.encode(f"a{marker}b", add_special_tokens=False).ids
    assert ids.count(TOKENIZER.token_to_id(marker)) == 1
    assert TOKENIZER.token_to_id(marker) == SPECIAL_TOKENS.index(marker)


def test_markers_of_content_survive_a_decoder_that_skips_special_tokens() -> None:
    ids = TOKENIZER.encode(f"{THINK}a{THINK_END}{CALL}b{CALL_END}{END}", add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == f"{THINK}a{THINK_END}{CALL}b{CALL_END}"


def test_the_stored_tokenizer_is_what_the_script_trains() -> None:
    stored = json.loads((DIRECTORY / "tokenizer.json").read_text(encoding="utf-8"))
    assert json.loads(train_tokenizer().to_str()) == stored
    stored_config = json.loads((DIRECTORY / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert stored_config == tokenizer_config(DIRECTORY)
