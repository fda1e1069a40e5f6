"""From characters of a prompt's text to token positions: where a marked place of a conversation stands, and the token
position near a place that stays what it is whatever follows.

Knows prompts and their delimiters; what is worth a boundary is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnkeep.cache.boundary import Boundary
from turnkeep.server.cache_hints import CacheMark
from turnkeep.server.chat_messages import Message
from turnkeep.server.common_prefix import common_prefix_length, common_prefix_tokens
from turnkeep.server.prompts import GUARDS, EncodedPrompt, PromptEncoder

UNSURE_TOKENS = 8  # without a delimiter: a cut anywhere in a text was seen to change at most its last 4 tokens
MAX_SLACK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What is known of the next prompt when a turn ends: it begins with token_ids (empty: unknown), of which the first
    stable_tokens are what the engine has computed or sampled."""

    stable_tokens: int
    token_ids: list[int]


def has_near_delimiter(prompt: EncodedPrompt, num_chars: int) -> bool:
    """Whether a delimiter ends so near before a place that standing behind it loses next to nothing."""
    num_cuts = prompt.num_cuts_within(num_chars)
    # A token has at least about one character.
    return num_chars - (prompt.cut_ends[num_cuts - 1] if num_cuts else 0) <= MAX_SLACK_TOKENS


def stable_position(encoder: PromptEncoder, prompt: EncodedPrompt, num_chars: int) -> int:
    """Token position of a text length that is repeated: behind the last delimiter within it, or a little before its
    end where the last delimiter is far away. Never the whole prompt."""
    num_cuts = prompt.num_cuts_within(num_chars)
    position = prompt.cut_tokens[num_cuts - 1] if num_cuts else 0
    if not has_near_delimiter(prompt, num_chars):
        start = prompt.cut_starts[num_cuts - 1] if num_cuts else 0
        first = position - 1 if num_cuts else 0
        ids = encoder.encode_piece(prompt.text[start:num_chars], prompt.guarded.guard)[0]
        sure = first + common_prefix_tokens(prompt.token_ids[first:], ids) - UNSURE_TOKENS
        if sure > position + MAX_SLACK_TOKENS - UNSURE_TOKENS:
            position = sure
    # The prompt's last token must be fed to get an answer; before a delimiter is as stable as behind it.
    return min(position, len(prompt.token_ids) - 1)


def marked_ends(
    encoder: PromptEncoder, prompt: EncodedPrompt, messages: Sequence[Message], marks: Sequence[CacheMark]
) -> list[int]:
    """How many characters of the prompt's text every mark covers, for a prompt of these canonical messages; a mark
    behind a whole message covers the delimiter that closes it, too. Empty when the template does not print the marked
    contents once each and in order. One rendering. Raises TemplateError."""
    sign = next((sign for sign in reversed(GUARDS) if sign not in prompt.text), None)
    if sign is None or not marks:
        return []
    signed = [dict(message) for message in messages]
    for mark in reversed(marks):  # from the end, so that earlier positions stay what they are
        _sign(signed, mark, sign)
    guarded = encoder.guard(signed, None, mark=prompt.guarded.guard, avoid=prompt.text)
    pieces = encoder.render(guarded.messages, prompt.setting).split(sign)
    if len(pieces) != len(marks) + 1:
        return []
    ends, before = [], ""
    for mark, piece in zip(marks, pieces, strict=False):
        before += piece
        end = common_prefix_length(prompt.text, before)
        if mark.num_chars is None:
            closing = encoder.tokenizer.delimiter_pattern.match(prompt.text, end)
            end = closing.end() if closing is not None else end
        ends.append(end)
    return ends


def with_declared(boundaries: Sequence[Boundary], positions: Sequence[int]) -> tuple[Boundary, ...]:
    """Boundaries and declared positions, ascending; at a position that has a boundary nothing is to be declared."""
    known = {boundary.position for boundary in boundaries}
    declared = [Boundary(position, "declared") for position in dict.fromkeys(positions) if position not in known]
    return tuple(sorted([*boundaries, *declared], key=lambda boundary: boundary.position))


def _sign(messages: list[Message], mark: CacheMark, sign: str) -> None:
    index, at = mark.message, mark.num_chars
    if at is None and "tool_calls" in messages[index] and index + 1 < len(messages):
        index, at = index + 1, 0  # calls are printed behind the content
    content = messages[index]["content"]
    at = len(content) if at is None else at
    messages[index]["content"] = content[:at] + sign + content[at:]
