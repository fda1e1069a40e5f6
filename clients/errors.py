"""What the SDK raises besides the errors of the openai package, which pass through as they are."""

from __future__ import annotations


class TurnkeepError(Exception):
    """The root of the SDK's own errors."""


class PrefixBroken(TurnkeepError):
    """The next request would not begin with what the last one sent: the server would compute its history again.

    `reason` says what has changed ("tools", "system", "message 3", ...).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the next request would not extend the last one: {reason} changed")
        self.reason = reason


class ContextOverflow(TurnkeepError):
    """The conversation does not fit the model's context any more. Nothing was added to it: compact() or rewind()."""


class TurnInterrupted(TurnkeepError):
    """The answer broke off and could not be resumed within the retries; the conversation is as before the turn."""


class StepLimitReached(TurnkeepError):
    """An agent still called tools after its last allowed step. The conversation can go on from where it is."""


class InvalidTool(TurnkeepError, TypeError):
    """A function cannot be offered as a tool; the message says why."""
