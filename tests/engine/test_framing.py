"""Frames survive any cut of the stream; what is no frame or no message is an error, never a wrong message."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnkeep.cache.boundary import Boundary
from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.engine.framing import (
    FrameDecoder,
    FramingError,
    decode_events,
    decode_message,
    encode_events,
    encode_frame,
)
from turnkeep.engine.messages import (
    Abort,
    Admitted,
    CloseConversation,
    EndTurn,
    Failed,
    Finished,
    FromEngine,
    Loading,
    ReadStats,
    Ready,
    Shutdown,
    Stats,
    Stop,
    Submit,
    TokenLogprobs,
    Tokens,
)
from turnkeep.scheduler.request import SamplingParams

MESSAGES = [
    Submit(
        request_id="r",
        prompt_ids=EncodedTokens([1, 2, 70_000]),
        sampling=SamplingParams(max_new_tokens=3, seed=2**63, logit_bias={5: -1.5}, stop_token_ids=(1, 2)),
        boundaries=(Boundary(2, "trunk"), Boundary(3, "turn_start")),
        conversation_id="c",
        cache_root="tenant",
        priority=-1,
    ),
    Submit(request_id="", prompt_ids=EncodedTokens(), sampling=SamplingParams(max_new_tokens=1)),
    Abort("r"),
    Stop("r"),
    EndTurn("r", 17),
    CloseConversation("tenant", "c"),
    ReadStats(),
    Shutdown(),
]

EVENTS: list[FromEngine] = [
    Loading("weights", 1, 2),
    Ready(
        model_name="m",
        vocab_size=3,
        max_model_len=4,
        page_size=5,
        num_pages=6,
        num_state_rows=7,
        max_running=8,
        limiting_resource="memory",
        notices=["one"],
    ),
    Failed("no"),
    Admitted("r", 1, 2),
    Tokens("r", [1, 2]),
    Tokens("r", [3], [TokenLogprobs(-0.5, [(3, -0.5), (4, -1.0)])]),
    Finished(request_id="r", reason="stop", num_prompt_tokens=3, queue_s=0.25),
    Stats(
        num_steps=1, num_running=2, num_waiting=3, num_suspended=4, num_free_pages=5, num_free_rows=6, requested=True
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_back_as_they_were(message: object) -> None:
    (body,) = FrameDecoder().feed(encode_frame(message))
    assert decode_message(body) == message


def test_events_of_a_step_travel_in_one_frame() -> None:
    (body,) = FrameDecoder().feed(encode_events(EVENTS))
    assert decode_events(body) == EVENTS


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_any_cut_of_the_stream_gives_the_same_bodies(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    decoder = FrameDecoder()
    found: list[bytes] = []
    position = index = 0
    while position < len(stream):
        length = cuts[index % len(cuts)]
        found += decoder.feed(stream[position : position + length])
        position += length
        index += 1
    assert found == bodies
    assert decoder.num_buffered_bytes == 0


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_raise_one_kind_of_error(data: bytes) -> None:
    with contextlib.suppress(FramingError):
        for body in FrameDecoder(max_frame_bytes=1000).feed(data):
            decode_message(body)
    with contextlib.suppress(FramingError):
        decode_events(data)


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(FramingError, match="2000 bytes"):
        FrameDecoder(max_frame_bytes=1000).feed((2000).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "value",
    [
        {"type": "unknown"},
        {"type": "abort"},
        {"type": "abort", "request_id": 5},
        {"type": "tokens"},
        [1],
        "abort",
        None,
    ],
)
def test_a_wrong_message_is_a_framing_error(value: object) -> None:
    with pytest.raises(FramingError):
        decode_message(msgspec.msgpack.encode(value))
