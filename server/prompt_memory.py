"""What the server remembers of conversations as text and tokens: recent prompts, and what the engine really holds.

Token ids are found again by the text they stand for, so that a returning conversation encodes only its new text and
gets the ids that were sampled. Forgetting costs time only. Nothing is found under another cache root.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnkeep.server.prompts import EncodedPrompt

PROMPTS_PER_CONVERSATION = 4
PROMPTS_PER_ROOT = 4  # for new conversations that begin as others do


@dataclass(frozen=True, slots=True)
class MemoryKey:
    """A conversation of a cache root: its id, or for one without an id a digest of how it opens."""

    root: str
    conversation: str


def memory_key(
    root: str, conversation_id: str | None, messages: Sequence[Mapping[str, Any]], tools: object
) -> MemoryKey:
    """The key of a request. Without an id, a conversation is known by what it says up to its first user message."""
    if conversation_id is not None:
        return MemoryKey(root, f"id {conversation_id}")
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), len(messages))
    opening = repr((tools, messages[: first + 1])).encode("utf-8", "surrogatepass")
    return MemoryKey(root, f"opening {hashlib.sha256(opening).hexdigest()}")


class PromptMemory:
    """Bounded by max_chars of text, least recently used first out. Safe to use from several threads."""

    def __init__(self, *, max_chars: int = 64 * 1024 * 1024) -> None:
        self._max_chars = max_chars
        self._prompts: OrderedDict[tuple[str, str], list[EncodedPrompt]] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Lists of prompts: one for each conversation and root."""
        return len(self._prompts)

    @property
    def num_chars(self) -> int:
        return self._num_chars

    def recall(self, key: MemoryKey) -> list[EncodedPrompt]:
        """What a prompt of this conversation may continue, newest last. One that is new begins as others do; later its
        own ids count, and not those of a conversation that happens to read alike."""
        with self._lock:
            own = self._prompts.get((key.root, key.conversation))
            return list(own or self._prompts.get((key.root, ""), []))

    def remember(self, key: MemoryKey, prompt: EncodedPrompt) -> None:
        """Keep a prompt, or what the engine holds at the end of a turn (which stays with its conversation)."""
        with self._lock:
            # A prompt that the new one continues adds nothing; side calls of the same conversation stay.
            self._keep((key.root, key.conversation), prompt, PROMPTS_PER_CONVERSATION, drops_continued=True)
            if not prompt.num_answer_tokens:
                self._keep((key.root, ""), prompt, PROMPTS_PER_ROOT, drops_continued=False)
            while self._num_chars > self._max_chars and self._prompts:
                _, forgotten = self._prompts.popitem(last=False)
                self._num_chars -= sum(len(old.text) for old in forgotten)

    def _keep(self, name: tuple[str, str], prompt: EncodedPrompt, limit: int, *, drops_continued: bool) -> None:
        old = self._prompts.pop(name, [])
        kept = [one for one in old if not (drops_continued and prompt.text.startswith(one.text_up_to_last_cut))]
        self._prompts[name] = [*kept[-(limit - 1) :], prompt]
        self._num_chars += sum(len(one.text) for one in self._prompts[name]) - sum(len(one.text) for one in old)
