"""Grammars of requests: written, compiled once outside this process, and remembered.

A grammar reaches the engine only after a worker process has compiled it within a deadline; a worker that takes longer,
or too much memory, is killed and replaced. Knows no HTTP and no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import turnkeep
from turnkeep.server import errors
from turnkeep.server.grammar_worker import Tokenizer as WorkerSetup
from turnkeep.server.output_rules import OutputRules
from turnkeep.server.structured_output import GrammarWriter
from turnkeep.server.text_model import TextModel

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
DEADLINE_S = 2.0
MAX_REMEMBERED = 1024
MAX_GRAMMAR_BYTES = 1 << 20


class GrammarChecker:
    """One for a server; all methods run in its event loop. One worker, one grammar at a time."""

    def __init__(self, text_model: TextModel, *, deadline_s: float = DEADLINE_S) -> None:
        self.num_started = 0  # workers
        self._text_model = text_model
        self._deadline_s = deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self._writer: GrammarWriter | None = None
        self._lock = asyncio.Lock()
        self._checked: OrderedDict[bytes, str] = OrderedDict()  # digest -> what is wrong, empty for nothing

    async def grammar(
        self, rules: OutputRules, tools: Sequence[dict[str, Any]], prompt_text: str | None, vocab_size: int
    ) -> str:
        """The grammar of one answer, for SamplingParams. Raises ApiError 400 for one that cannot be used, 501 where
        llguidance is not installed."""
        writer = await self._grammar_writer(vocab_size)
        grammar = writer.write(rules, tools, prompt_text)
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise errors.bad_request(f"{rules.param} asks for too large a grammar.", rules.param)
        wrong = await self._check(grammar, vocab_size)
        if wrong:
            param = "tools" if rules.answer is None else rules.param
            message = f"The output cannot be held to this form: {errors.shorten(wrong, 400)}"
            raise errors.bad_request(message, param)
        return grammar

    async def close(self) -> None:
        """End the worker. Idempotent."""
        async with self._lock:
            await self._kill()

    async def _grammar_writer(self, vocab_size: int) -> GrammarWriter:
        if self._writer is None:
            async with self._lock:
                if self._writer is None:
                    special = await self._start(vocab_size)
                    model = self._text_model
                    self._writer = GrammarWriter(model.template, model.tokenizer, model.format, frozenset(special))
        return self._writer

    async def _check(self, grammar: str, vocab_size: int) -> str:
        digest = hashlib.sha256(grammar.encode()).digest()
        if digest in self._checked:  # known ones do not wait for those that are compiled now
            self._checked.move_to_end(digest)
            return self._checked[digest]
        async with self._lock:
            if digest in self._checked:  # by the one before in the queue
                return self._checked[digest]
            try:
                if self._process is None:
                    await self._start(vocab_size)
                async with asyncio.timeout(self._deadline_s):
                    answer = await self._exchange(grammar)
                wrong = msgspec.msgpack.decode(answer, type=str)
            except TimeoutError:
                await self._kill()
                wrong = f"it takes more than {self._deadline_s:g} s to compile"
            except (asyncio.IncompleteReadError, ConnectionError):
                await self._kill()
                wrong = "it is too complex to compile"
            except asyncio.CancelledError:  # the answer would be taken for that of the next grammar
                await self._kill()
                raise
            self._checked[digest] = wrong
            while len(self._checked) > MAX_REMEMBERED:
                self._checked.popitem(last=False)
            return wrong

    async def _start(self, vocab_size: int) -> list[int]:
        """A worker that has its tokenizer. Returns the ids that stand for themselves."""
        if importlib.util.find_spec("llguidance") is None:
            raise errors.ApiError(
                501,
                "Structured output needs the package llguidance, which is not installed on this server "
                "(pip install 'turnkeep[structured]').",
                kind="server_error",
                code="not_implemented",
            )
        source = str(Path(turnkeep.__file__).parent.parent)
        inherited = os.environ.get("PYTHONPATH")
        paths = source if not inherited else os.pathsep.join((source, inherited))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "turnkeep.server.grammar_worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths}, start_new_session=True,
        )  # fmt: skip
        self.num_started += 1
        model = self._text_model
        setup = WorkerSetup(model.tokenizer.description, vocab_size, sorted(model.eos_token_ids))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return msgspec.msgpack.decode(await self._exchange(setup), type=list[int])
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            await self._kill()
            log.exception("the grammar worker did not start")
            raise errors.internal() from None
        except asyncio.CancelledError:
            await self._kill()
            raise

    async def _exchange(self, value: object) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        body = msgspec.msgpack.encode(value)
        process.stdin.write(len(body).to_bytes(4, "big") + body)
        await process.stdin.drain()
        header = await process.stdout.readexactly(4)
        return await process.stdout.readexactly(int.from_bytes(header, "big"))

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.shield(process.wait())
