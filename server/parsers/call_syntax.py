"""What a family's form of tool calls is to the output parser: tags around a body, and a scanner that finds its end.

A syntax has no state; its scanners hold what one body has shown so far. Knows no reasoning and no content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

MAX_NAME_CHARS = 256

ScanState = Literal["open", "complete", "malformed"]
Schemas = Mapping[str, Mapping[str, Any]]  # a tool's name -> JSON schema of its parameters


class Call(NamedTuple):
    """One call of a body. call_id: the id that the model itself gave it, in families whose calls carry one."""

    name: str
    arguments: str  # JSON text of an object
    call_id: str | None = None


class BodyScanner(Protocol):
    """Scans the body of a call, each character once. Whether a text is malformed or complete, and where, depends on
    the text alone, not on its pieces."""

    state: ScanState

    @property
    def num_taken(self) -> int:
        """How much of the body was understood, for scanners that can get far into a text that is no call; else 0."""
        ...

    def feed(self, text: str) -> int:
        """Scan more text. Returns where the body ended in it when it is complete (negative: so many characters before
        this text), else anything."""
        ...

    def read(self, body: str, schemas: Schemas) -> list[Call] | None:
        """The calls of a complete body, in order; None if it is no call."""
        ...


class CallSyntax(Protocol):
    """The form in which a family writes calls.

    openers begin a call wherever they stand; those in `kept_openers` belong to its body. With `bare_starts` one of
    these characters begins a call where an answer or the next call begins, if the name in it is declared.
    closers end it (one may be needed); a tag of several characters that closes nothing is dropped.
    """

    @property
    def openers(self) -> tuple[str, ...]: ...

    @property
    def kept_openers(self) -> tuple[str, ...]: ...

    @property
    def bare_starts(self) -> str: ...

    @property
    def closers(self) -> tuple[str, ...]: ...

    @property
    def needs_closer(self) -> bool: ...

    @property
    def markup(self) -> tuple[str, ...]:
        """Strings that the parser must see, even where they are control tokens."""
        ...

    @property
    def call_id_chars(self) -> int | None:
        """Length of the letters-and-digits ids that the family's templates demand; None for ids of any form."""
        ...

    def new_scanner(self) -> BodyScanner: ...


class MarkerScanner:
    """Shared ground of scanners that go from marker to marker: holds the text of which more must be seen.

    A subclass takes what it can off `_text` in `_step` and says whether it could; at the end of the body it sets
    `state`.
    """

    def __init__(self) -> None:
        self.state: ScanState = "open"
        self._text = ""
        self._num_fed = 0

    @property
    def num_taken(self) -> int:
        return self._num_fed - len(self._text)

    def feed(self, text: str) -> int:
        self._text += text
        self._num_fed += len(text)
        while self.state == "open" and self._step():
            pass
        return len(text) - len(self._text)

    def _step(self) -> bool:
        """Go on by one piece of the syntax. False: more text is needed."""
        return False

    def _take(self, num_chars: int) -> str:
        taken, self._text = self._text[:num_chars], self._text[num_chars:]
        return taken

    def _take_word(self, word: str) -> bool | None:
        """Take a word that must stand here after blanks. None: more text is needed to tell; False: it does not."""
        text = self._text.lstrip()
        if text.startswith(word):
            self._text = text[len(word) :]
            return True
        return None if word.startswith(text) else False

    def _find(self, markers: tuple[str, ...]) -> tuple[int, str | None]:
        """The marker that begins first, and where; without one, how much text holds surely no part of a marker."""
        best: tuple[int, str | None] = (-1, None)
        for marker in markers:
            position = self._text.find(marker)
            if position >= 0 and (best[1] is None or position < best[0]):
                best = (position, marker)
        if best[1] is not None:
            return best
        return max(0, len(self._text) - max(map(len, markers)) + 1), None
