"""Text to token ids and back over the `tokenizers` library, from the text of a tokenizer.json.

Owns what is special about added tokens: which ones delimit text, which ones control a model, and how text that only
looks like one of them stays text. Knows no chat template and no request.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

MAX_HELD_TOKENS = 64  # a longer run of undecodable tokens is text of its own, not an incomplete character


class TokenizerError(ValueError):
    """The tokenizer file cannot be used."""


def replace_lone_surrogates(text: str) -> str:
    """The text with each lone surrogate (JSON can carry them, UTF-8 cannot) replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    return text


class Tokenizer:
    """A model's vocabulary. Never adds a begin or end token by itself: chat templates print them.

    special_ids: added tokens that split the text wherever they stand, so text before one and after one tokenizes
    independently of the other side. control_ids: the tokens flagged special.
    """

    def __init__(self, tokenizer_json: str) -> None:
        """Raises TokenizerError when the text is not a tokenizer file."""
        try:
            self._description: dict[str, Any] = json.loads(tokenizer_json)
            self._backend = Backend.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"not a usable tokenizer file: {error}") from error
        self._backend.no_padding()
        self._backend.no_truncation()
        added = self._backend.get_added_tokens_decoder()
        self._added_text: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self._added_id: dict[str, int] = {text: token_id for token_id, text in self._added_text.items()}
        self.control_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.special_ids: frozenset[int] = frozenset(
            i for i, token in added.items() if not token.single_word and self._delimits(token.content)
        )
        self._guarded = frozenset(
            i for i, text in self._added_text.items() if i in self.control_ids or re.search(r"[^\w\s]", text)
        )
        self.delimiter_pattern = _alternatives(self._added_text[i] for i in self.special_ids)
        self.control_pattern = _alternatives(self._added_text[i] for i in self._guarded)
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self._plain: Backend | None = None
        self._plain_lock = threading.Lock()
        decoder = self._description.get("decoder") or {}
        self.is_byte_level: bool = decoder.get("type") == "ByteLevel"
        self._bytes: dict[int, bytes] = {}
        self.opening_ids: list[int] = self._opening_ids()

    def _opening_ids(self) -> list[int]:
        """What the tokenizer puts before a bare text (a begin token, with most families that have one), or nothing."""
        for probe, text in self._added_text.items():  # a token of the file's own: not every vocabulary has letters
            framed: list[int] = self._backend.encode(text, add_special_tokens=True).ids
            if framed.count(probe) == 1 and self._backend.encode(text, add_special_tokens=False).ids == [probe]:
                return framed[: framed.index(probe)]
        return []

    def _delimits(self, text: str) -> bool:
        """Whether a token surely ends where it ends: blank ones merge into longer ones, a prefix of another one may."""
        if not text.strip():
            return False
        return not any(other != text and other.startswith(text) for other in self._added_id)

    @property
    def description(self) -> str:
        """The text of the tokenizer.json."""
        return json.dumps(self._description)

    def encode(self, text: str, allow_special: bool = True) -> list[int]:
        """Token ids of a text. Without `allow_special`, text that spells a control token is encoded as plain text."""
        text = replace_lone_surrogates(text)
        if allow_special:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return ids
        if not self.control_pattern.search(text):
            return self.encode(text)
        ids = self._plain_backend().encode(text, add_special_tokens=False).ids
        if self._guarded.isdisjoint(ids):
            return ids
        return self._encode_split(text)

    def _encode_split(self, text: str) -> list[int]:
        """Encode with every spelled control token broken after its first character: its id can then not arise."""
        ids: list[int] = []
        start = 0
        for match in self.control_pattern.finditer(text):
            ids += self.encode(text[start : match.start() + 1], allow_special=len(match[0]) > 1)
            start = match.start() + 1
        ids += self.encode(text[start:], allow_special=False)
        return [i for i in ids if i not in self._guarded]

    def _plain_backend(self) -> Backend:
        """The same vocabulary without control tokens; made on first need, because few texts spell one."""
        with self._plain_lock:
            if self._plain is None:
                # By text: the library gives tokens new ids where the file's do not follow on from the vocabulary.
                dropped = {self._added_text[token_id] for token_id in self._guarded}
                kept = [token for token in self._description["added_tokens"] if token["content"] not in dropped]
                self._plain = Backend.from_str(
                    json.dumps({**self._description, "added_tokens": kept, "post_processor": None})
                )
                self._plain.no_padding()
                self._plain.no_truncation()
            return self._plain

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of token ids. Ids without a token give nothing; incomplete UTF-8 gives U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def hidden_ids(self, keep: Iterable[str] = ()) -> frozenset[int]:
        """Control tokens that must not become visible text; `keep` names the ones a parser wants to see."""
        kept = {self._added_id.get(text) for text in keep}
        return frozenset(i for i in self.control_ids if i not in kept)

    def delimiter_id(self, text: str) -> int:
        """Id of a delimiter found by `delimiter_pattern`."""
        return self._added_id[text]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token of a byte-level vocabulary, as its decoder forms them."""
        known = self._bytes.get(token_id)
        if known is None:
            text = self.token_text(token_id)
            values = [BYTE_OF_CHARACTER.get(character) for character in text]
            known = text.encode() if None in values else bytes(value for value in values if value is not None)
            self._bytes[token_id] = known
        return known


class Detokenizer:
    """Text of a growing sequence of tokens, piece by piece; the pieces together are what `decode` gives for all.

    A piece never ends inside a UTF-8 sequence: its bytes are held until it is complete or until `flush`.
    Ids in `skip_ids` give no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skip_ids = skip_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._context: list[int] = []  # tokens already delivered that the decoder needs in front of the next ones
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Text that became complete with these tokens."""
        wanted = [i for i in ids if i not in self._skip_ids]
        if self._utf8 is not None:
            return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, wanted)))
        return "".join(map(self._push_one, wanted))

    def push_one(self, token_id: int) -> str:
        """As push() of one token."""
        if self._utf8 is None:
            return self.push((token_id,))
        return "" if token_id in self._skip_ids else self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What was still held, at the end of the sequence."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._deliver(self._new_text()) if self._held else ""

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._deliver(text)

    def _new_text(self) -> str:
        # Decoders treat the first token of a sequence on its own (leading space), so context stands in front.
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._held)[len(before) :]

    def _deliver(self, text: str) -> str:
        if text:
            self._context, self._held = self._held, []
        return text


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the leftmost, then longest of the texts; nothing when there are none."""
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (printable ones stand for themselves)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_OF_CHARACTER = _byte_of_character()
