"""Stop strings: never shown, not even in part, and found alike for every split."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnkeep.server.parsers import StopStrings


def feed(stops: list[str], text: str, cuts: list[int]) -> tuple[str, list[str], StopStrings]:
    stopper = StopStrings(stops)
    positions = [0, *sorted(cuts), len(text)]
    pieces = [stopper.push(text[a:b]) for a, b in pairwise(positions)]
    pieces.append(stopper.flush())
    return "".join(pieces), pieces, stopper


@pytest.mark.parametrize(
    ("stops", "text", "expected", "matched"),
    [
        (["STOP"], "one STOP two", "one ", "STOP"),
        (["STOP"], "one STO", "one STO", None),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),  # complete first
        (["b", "ab"], "xab", "x", "ab"),  # complete together: the longer one
        (["aab"], "aaab", "a", "aab"),
        ([""], "text", "text", None),
        ([], "text", "text", None),
        (["x"], "x", "", "x"),
    ],
)
def test_the_text_ends_before_the_stop_string(stops: list[str], text: str, expected: str, matched: str | None) -> None:
    for cut in range(len(text) + 1):
        out, _, stopper = feed(stops, text, [cut])
        assert out == expected
        assert stopper.matched == matched
        assert stopper.stopped == (matched is not None)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    st.text("ab\n", max_size=30),
    st.randoms(use_true_random=False),
)
def test_splits_do_not_matter_and_no_part_of_a_stop_string_is_delivered(
    stops: list[str], text: str, choice: random.Random
) -> None:
    whole = feed(stops, text, [])[0]
    out, pieces, stopper = feed(stops, text, [choice.randint(0, len(text)) for _ in range(6)])
    assert out == whole
    assert text.startswith(out)
    if stopper.stopped:
        assert text[len(out) :].startswith(stopper.matched or "?")
        assert pieces[-1] == ""
    else:
        assert out == text
        assert not any(stop in text for stop in stops)


def test_text_that_cannot_begin_a_stop_string_is_not_held() -> None:
    stopper = StopStrings(["END"])
    assert stopper.push("abc") == "abc"
    assert stopper.push("dE") == "d"
    assert stopper.push("x") == "Ex"
    assert stopper.push("EN") == ""
    assert stopper.push("D more") == ""
    assert stopper.push("ignored") == ""
