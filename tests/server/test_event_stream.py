"""SSE frames: one line each, whole whatever the text, and read alike by the official client wherever they are cut."""

from __future__ import annotations

import json

from openai._streaming import SSEDecoder

from turnkeep.server import event_stream

TEXTS = [
    "plain",
    "line\nbreak\r\n",
    "\u2028 and \u2029",
    "\x00\x1f",
    "grüße 😀",
    "data: [DONE]\n\n",
    '"quoted" \\',
]


def decode(pieces: list[bytes]) -> list[str]:
    return [event.data for event in SSEDecoder().iter_bytes(iter(pieces))]


def test_an_event_is_one_line_closed_by_a_blank_one() -> None:
    for text in TEXTS:
        frame = event_stream.encode_event({"text": text})
        assert frame.startswith(b"data: ")
        assert frame.endswith(b"\n\n")
        assert frame.count(b"\n") == 2
        assert b"\r" not in frame
        assert json.loads(frame[6:]) == {"text": text}


def test_the_official_decoder_reads_the_same_wherever_the_stream_is_cut() -> None:
    frames = [event_stream.encode_event({"text": text}) for text in TEXTS]
    stream = b"".join([event_stream.KEEP_ALIVE, *frames, event_stream.KEEP_ALIVE, event_stream.DONE])
    whole = decode([stream])
    assert [json.loads(data)["text"] for data in whole[:-1]] == TEXTS
    assert whole[-1] == "[DONE]"
    for cut in range(1, len(stream)):
        assert decode([stream[:cut], stream[cut:]]) == whole, f"cut at byte {cut}"
    assert decode([stream[i : i + 1] for i in range(len(stream))]) == whole
