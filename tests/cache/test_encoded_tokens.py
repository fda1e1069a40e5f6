"""Token ids as bytes: they read as they were written, and compare as the tokens would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeep.cache.encoded_tokens import EncodedTokens, common_tokens, decode_tokens, encode_tokens

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(token_ids, st.integers(-45, 45), st.integers(-45, 45))
def test_they_read_like_the_list_they_were_made_of(ids: list[int], start: int, stop: int) -> None:
    tokens = EncodedTokens(ids)
    assert len(tokens) == len(ids)
    assert list(tokens) == ids
    assert tokens == ids
    assert tokens[start:stop] == ids[start:stop]
    assert tokens[start:] == ids[start:]
    assert tokens[::2] == ids[::2]
    assert not ids or (tokens[-1], tokens[0], tokens.largest()) == (ids[-1], ids[0], max(ids))
    assert EncodedTokens.from_bytes(bytes(tokens.encoded)) == tokens


@given(token_ids)
def test_lists_arrays_and_tuples_give_the_same_bytes(ids: list[int]) -> None:
    expected = b"".join(token.to_bytes(4, "big") for token in ids)
    assert encode_tokens(ids) == expected
    assert encode_tokens(tuple(ids)) == expected
    assert encode_tokens(np.array(ids, dtype=np.int64)) == expected
    assert bytes(encode_tokens(EncodedTokens(ids))) == expected
    assert decode_tokens(expected) == ids


@given(token_ids, token_ids, token_ids, st.integers(0, 90))
def test_the_common_tokens_of_two_are_counted(
    first: list[int], second: list[int], shared: list[int], limit: int
) -> None:
    ours, theirs = [*shared, *first], [*shared, *second]
    expected = 0
    while expected < min(limit, len(ours), len(theirs)) and ours[expected] == theirs[expected]:
        expected += 1
    assert common_tokens(encode_tokens(ours), encode_tokens(theirs), limit) == expected
    assert EncodedTokens(ours).starts_alike(EncodedTokens(theirs), expected)
    assert not EncodedTokens(ours).starts_alike(EncodedTokens(theirs), min(len(ours), len(theirs)) + 1)


def test_a_copy_grows_on_its_own() -> None:
    first = EncodedTokens([1, 2])
    second = EncodedTokens(first)
    second.extend([70_000])
    assert (list(first), list(second)) == ([1, 2], [1, 2, 70_000])
    with pytest.raises(IndexError):
        first[2]


@pytest.mark.parametrize("ids", [[-1], [2**32], np.array([-1]), (2**32,)])
def test_ids_that_do_not_fit_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        EncodedTokens(ids)


def test_tokens_that_do_not_fit_are_not_taken() -> None:
    tokens = EncodedTokens([1])
    with pytest.raises(ValueError, match="must lie in"):
        tokens.extend([2, 2**32])
    assert list(tokens) == [1]


def test_bytes_that_are_no_whole_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="whole number of tokens"):
        EncodedTokens.from_bytes(b"12345")
