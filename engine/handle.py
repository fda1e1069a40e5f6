"""The server's side of an engine: submit requests, get their events, know whether the engine lives. No torch.

ProcessEngine starts the engine in its own process; InProcessEngine runs the same loop in a thread, for tests and for
offline use. All methods are called from one asyncio event loop.
"""

from __future__ import annotations

from typing import Protocol

from turnkeep.engine.in_process_engine import InProcessEngine
from turnkeep.engine.local_handle import EngineStartError
from turnkeep.engine.messages import Prepare, Ready, Stats, Submit
from turnkeep.engine.process_engine import ProcessEngine
from turnkeep.engine.request_events import RequestEvent, RequestEvents

__all__ = ["EngineHandle", "EngineStartError", "InProcessEngine", "ProcessEngine", "RequestEvent", "RequestEvents"]


class EngineHandle(Protocol):
    """What the server needs of an engine."""

    @property
    def alive(self) -> bool:
        """The engine was started and has not died or been closed."""

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine was last heard of (it reports about once a second)."""

    async def start(self) -> Ready:
        """Load the model; returns when the engine can take requests. Raises EngineStartError."""

    def submit(self, message: Submit) -> RequestEvents:
        """Start a request. Raises ValueError when a request of this id is still open.

        When the engine is dead, the events are one Finished(error).
        """

    def stop(self, request_id: str, num_repeated_tokens: int | None = None) -> None:
        """Finish the request now with reason "stop"; of its tokens the first so many will be repeated (None: all)."""

    def end_turn(self, request_id: str, stable_tokens: int, has_tool_call: bool | None = None) -> None:
        """After Finished: how many tokens of prompt + output the next prompt is expected to repeat, and whether a
        program will send it (None: not known)."""

    def prepare(self, message: Prepare) -> None:
        """After end_turn: how the conversation's next prompt will begin, to be computed in idle time."""

    def close_conversation(self, cache_root: str, conversation_id: str) -> None:
        """The conversation will not return."""

    def expect(self, cache_root: str, conversation_id: str) -> None:
        """A request of this conversation has arrived; it will be submitted once it is tokenized."""

    def stats(self) -> Stats:
        """The newest Stats heard of; at most about a second old while the engine is alive."""

    async def read_stats(self) -> Stats:
        """Stats as of now. Raises ConnectionError when the engine is dead."""

    async def close(self) -> None:
        """End the engine; open requests get Finished. Idempotent."""
