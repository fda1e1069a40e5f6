"""Tokens to text and back: nothing lost, nothing invented, no control token by accident."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_fixtures import MARKUP, PIECES, SPECIAL, WORDS, byte_level_json, sentence_piece_json

from turnkeep.server.tokenizer import Detokenizer, Tokenizer, TokenizerError

BYTE_LEVEL = Tokenizer(byte_level_json())
SENTENCE_PIECE = Tokenizer(sentence_piece_json())
AWKWARD = st.lists(st.sampled_from([*PIECES, *WORDS, *SPECIAL, *MARKUP, "<|im_", "_end|>"]), max_size=12).map("".join)


def test_no_begin_token_is_added_although_the_tokenizer_file_asks_for_one() -> None:
    begin = BYTE_LEVEL.token_id("<|bos|>")
    assert begin not in BYTE_LEVEL.encode("the order")
    assert BYTE_LEVEL.encode("<|bos|>the order")[0] == begin


@settings(max_examples=150, deadline=None)
@given(AWKWARD)
def test_text_survives_encoding_and_decoding(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text, allow_special=False)) == text


@settings(max_examples=150, deadline=None)
@given(AWKWARD)
def test_without_specials_no_text_becomes_a_control_token(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCE_PIECE):
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text, allow_special=False))
        if not tokenizer.control_pattern.search(text):
            assert tokenizer.encode(text, allow_special=False) == tokenizer.encode(text)


def test_without_specials_a_vocabulary_that_spells_a_control_token_itself_still_gives_none() -> None:
    """A base vocabulary with ready merges up to the special token: the split form is used."""
    description = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [
            {"id": 3, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
        ],
        "pre_tokenizer": None, "decoder": None,
        "model": {"type": "Unigram", "unk_id": None, "vocab": [["<", -3.0], ["s", -3.0], [">", -3.0], ["<s>", 0.0]]},
    }  # fmt: skip
    tokenizer = Tokenizer(json.dumps(description))
    assert tokenizer.encode("<s>") == [3]
    assert tokenizer.encode("<s>", allow_special=False) == [0, 1, 2]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=30), st.integers(1, 5))
def test_pieces_of_any_token_sequence_add_up_to_its_text(ids: list[int], step: int) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(pieces) + detokenizer.flush() == BYTE_LEVEL.decode(ids)


@settings(max_examples=100, deadline=None)
@given(AWKWARD.filter(lambda text: not text.startswith(" ")), st.integers(1, 4))
def test_pieces_add_up_for_a_vocabulary_that_falls_back_to_bytes(text: str, step: int) -> None:
    ids = SENTENCE_PIECE.encode(text)
    detokenizer = Detokenizer(SENTENCE_PIECE)
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(pieces) + detokenizer.flush() == SENTENCE_PIECE.decode(ids)
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte level", "byte fallback"])
def test_a_character_appears_when_its_last_byte_is_there_and_never_in_part(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("kg 🦉")
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(pieces) == "kg 🦉"
    assert pieces[-1] == "🦉"
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_sequence_that_ends_inside_a_character_shows_it_when_flushed() -> None:
    ids = BYTE_LEVEL.encode("ok🦉")[:-1]
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert detokenizer.push(ids) == "ok"
    assert detokenizer.flush() == "\ufffd"


def test_skipped_tokens_give_no_text_and_do_not_break_a_character() -> None:
    hidden = BYTE_LEVEL.hidden_ids(keep=("<|im_end|>",))
    detokenizer = Detokenizer(BYTE_LEVEL, hidden)
    end, head = BYTE_LEVEL.token_id("<|im_end|>"), BYTE_LEVEL.token_id("<|head|>")
    assert end is not None
    assert head is not None
    owl = BYTE_LEVEL.encode("🦉")
    assert detokenizer.push([*owl[:2], head, *owl[2:], end]) == "🦉<|im_end|>"


def test_markup_flagged_special_is_hidden_unless_kept() -> None:
    description = json.loads(byte_level_json())
    description["added_tokens"] = [{**token, "special": True} for token in description["added_tokens"]]
    tokenizer = Tokenizer(json.dumps(description))
    think, end = tokenizer.token_id("<think>"), tokenizer.token_id("<|im_end|>")
    assert {think, end} <= tokenizer.hidden_ids()
    assert think not in tokenizer.hidden_ids(keep=("<think>",))
    assert end in tokenizer.hidden_ids(keep=("<think>",))


def test_only_tokens_that_surely_end_where_they_end_delimit() -> None:
    """A run of blanks and a token that begins a longer one may both turn into something else with the next text."""
    description = json.loads(byte_level_json())
    next_id = max(token["id"] for token in description["added_tokens"]) + 1
    for offset, content in enumerate(["    ", "<yy", "<yy>", "lonely"]):
        token = {"id": next_id + offset, "content": content, "single_word": content == "lonely", "lstrip": False,
                 "rstrip": False, "normalized": False, "special": False}  # fmt: skip
        description["added_tokens"].append(token)
    tokenizer = Tokenizer(json.dumps(description))
    assert tokenizer.token_id("<yy>") in tokenizer.special_ids
    assert {tokenizer.token_id(text) for text in ("    ", "<yy", "lonely")}.isdisjoint(tokenizer.special_ids)
    # Blanks and words among the added tokens are ordinary text for a user.
    assert tokenizer.encode("a    b", allow_special=False) == tokenizer.encode("a    b")


def test_lone_surrogates_are_replaced() -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("a\ud800b")) == "a\ufffdb"


def test_unknown_ids_give_no_text() -> None:
    assert BYTE_LEVEL.decode([10**6]) == ""
    assert Detokenizer(BYTE_LEVEL).push([10**6]) == ""


def test_something_else_than_a_tokenizer_file_is_refused() -> None:
    for text in ("", "{}", "[1]"):
        with pytest.raises(TokenizerError):
            Tokenizer(text)
