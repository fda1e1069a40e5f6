"""Boundaries of the families' templates: never beyond what is repeated, and what each kind of turn reuses."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from family_templates import FAMILY_NAMES, FamilyConversation, family_case
from text_fixtures import NOW, TOOLS, common_prefix

from turnkeep.server.boundaries import BoundaryFinder
from turnkeep.server.chat_messages import normalize_messages
from turnkeep.server.prompts import EncodedPrompt, PromptEncoder

NUM_HISTORIES = int(os.environ.get("TURNKEEP_BOUNDARY_HISTORIES", "4"))
FIRST_SEED = int(os.environ.get("TURNKEEP_BOUNDARY_SEED", "7000"))
NUM_CONTINUATIONS = 6
MAX_SLACK = 16
PROMPT_END_TOKENS = 32  # what follows the newest message in a prompt may be printed otherwise in the next
NUM_ROUNDS = 20

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Turn:
    """Tokens: reused, the most that could have been, of the prompt, of prompt and answer, up to the trunk's end."""

    reused: int
    best: int
    num_prompt: int
    num_computed: int
    trunk: int

    def kind_after(self, before: Turn, first: Turn) -> str:
        """How much was reused, in the words of EXPECTED; `first` is the turn that began the conversation."""
        limits = (
            ("answer", before.num_computed - 2),
            ("prompt", before.num_prompt - PROMPT_END_TOKENS),
            ("turn", first.num_prompt - PROMPT_END_TOKENS),
            ("trunk", first.trunk),
        )
        return next((kind for kind, limit in limits if self.reused >= limit), "none")


@dataclass
class Bench:
    """A family behind an encoder and a finder, with a cache that is as good as its boundaries: the tokens of every
    sequence that was computed, and the positions where it can be resumed."""

    name: str
    held: list[tuple[list[int], set[int]]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.case = family_case(self.name)
        self.encoder = PromptEncoder(self.case.template, self.case.tokenizer)
        self.finder = BoundaryFinder(self.case.template, self.case.tokenizer, encoder=self.encoder)

    def prompt(self, messages: Messages, tools: Any = TOOLS) -> EncodedPrompt:
        return self.encoder.encode(messages, tools=tools, now=NOW)

    def fresh_ids(self, messages: Messages, tools: Any = TOOLS) -> list[int]:
        """Tokens of a prompt, by an encoder that remembers nothing."""
        return PromptEncoder(self.case.template, self.case.tokenizer).encode(messages, tools=tools, now=NOW).token_ids

    def positions(self, messages: Messages, prompt: EncodedPrompt, tools: Any = TOOLS) -> dict[str, int]:
        found = self.finder.prompt_boundaries(messages, tools, None, prompt.token_ids, prompt=prompt, now=NOW)
        assert all(0 < boundary.position < len(prompt.token_ids) for boundary in found)
        return {boundary.kind: boundary.position for boundary in found}

    def written(
        self, prompt: EncodedPrompt, messages: Messages, answer: dict[str, Any], tools: Any = TOOLS
    ) -> list[int]:
        """Prompt and sampled tokens, when the model writes the answer as its template prints it."""
        family = self.case.family
        guarded = self.encoder.guard([*messages, answer], tools, mark=prompt.guarded.guard, avoid=prompt.text)
        setting = replace(prompt.setting, tools=guarded.tools, add_generation_prompt=False)
        text = self.encoder.render(guarded.messages, setting)
        end = family.calls_end if answer.get("tool_calls") and family.calls_end else family.end
        if text.startswith(prompt.text):
            said = text[len(prompt.text) :]
        else:  # history prints another header than the generation prompt: only the text behind it is alike
            body = self.encoder.render(guarded.messages[:-1], setting)
            after = text[len(body) :]
            said = after[after.index(start) :] if (start := _first_words(answer, after)) else ""
            is_open = prompt.text.rstrip().endswith("<think>")
            said = (answer.get("reasoning_content", "") + family.open_end if is_open else "") + said
        said = said[: said.rindex(end)] if end in said else said
        ids, *_ = self.encoder.encode_piece(said + end, guarded.guard)
        return [*prompt.token_ids, *ids]

    def turn(self, messages: Messages, answer: dict[str, Any]) -> Turn:
        """One turn through the cache."""
        prompt = self.prompt(messages)
        ids = self.fresh_ids(messages)
        assert ids == prompt.token_ids
        shared = [(common_prefix(ids, held), positions) for held, positions in self.held]
        reused = max((p for n, positions in shared for p in positions if p <= min(n, len(ids) - 1)), default=0)
        best = max((min(n, len(ids) - 1) for n, _ in shared), default=0)
        computed = self.written(prompt, messages, answer)
        positions = set(self.positions(messages, prompt).values())
        assert not shared or reused <= best
        stable = self.finder.turn_end(messages, answer, TOOLS, None, computed, prompt=prompt, now=NOW).stable_tokens
        # The end token is never fed: the live row stands before it.
        if stable >= len(computed) - 1:
            positions.add(len(computed) - 1)
        self.held.append((computed[:-1], positions))
        self.turns.append(Turn(reused, best, len(ids), len(computed), min(positions)))
        return self.turns[-1]


def _first_words(answer: dict[str, Any], text: str) -> str:
    content = answer["content"].strip()
    if content and content in text:
        return content
    return next((mark for mark in ("<tool_call>", "<TOOLCALL>", "[TOOL_CALLS]", "<|tool_call>") if mark in text), "")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": "I think of lamps.", **fields}


def called(number: int) -> dict[str, Any]:
    function = {"name": "find_order", "arguments": {"order": f"A{number}", "n": number}}
    return said("", tool_calls=[{"id": f"call{number:05d}", "type": "function", "function": function}])


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "content": f"order {number} is late", "tool_call_id": f"call{number:05d}"}


START: Messages = [
    {"role": "system", "content": "You help. " + "Be kind to every customer. " * 8},
    user("Where is it?"),
]


def looped(num_rounds: int) -> Messages:
    return [*START, *(message for number in range(num_rounds) for message in (called(number), result(number)))]


def without_reasoning(messages: Messages) -> Messages:
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]


TRANSITIONS = ("loop", "user", "retry", "fork", "dropped", "dropped loop")
# How far the next prompt finds its tokens computed. answer: to the end of what was generated; prompt: to the end
# of the prompt before it; turn: to the first word of the agent in the turn before; trunk: system text and tools.
# A change here is a change of what every turn of the family costs.
EXPECTED: dict[str, tuple[str, ...]] = {
    "qwen3_coder": ("answer", "answer", "prompt", "answer", "answer", "answer"),
    "qwen35": ("answer", "turn", "prompt", "turn", "prompt", "prompt"),
    "qwq": ("prompt", "prompt", "prompt", "prompt", "prompt", "prompt"),
    "nemotron2": ("prompt", "prompt", "prompt", "prompt", "prompt", "prompt"),
    "nemotron3": ("answer", "turn", "prompt", "turn", "prompt", "prompt"),
    "granite3": ("answer", "answer", "prompt", "answer", "answer", "answer"),
    "granite4": ("answer", "answer", "prompt", "answer", "answer", "answer"),
    "llama3": ("answer", "answer", "prompt", "answer", "answer", "answer"),
    "mistral3": ("answer", "trunk", "prompt", "turn", "turn", "answer"),
    "devstral": ("answer", "answer", "prompt", "answer", "turn", "prompt"),
    "gemma4": ("prompt", "prompt", "prompt", "prompt", "prompt", "prompt"),
    "gpt_oss": ("answer", "turn", "prompt", "turn", "prompt", "prompt"),
    "hermes3": ("prompt", "prompt", "prompt", "answer", "answer", "prompt"),
    "lfm2": ("answer", "turn", "prompt", "turn", "prompt", "prompt"),
    "glm4": ("answer", "turn", "prompt", "turn", "prompt", "prompt"),
    "kimi_k2": ("answer", "turn", "prompt", "turn", "answer", "prompt"),
    "minimax_m2": ("answer", "turn", "prompt", "turn", "prompt", "prompt"),
    "seed_oss": ("answer", "answer", "prompt", "answer", "turn", "prompt"),
    "deepseek3": ("answer", "answer", "prompt", "answer", "answer", "answer"),
}


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_each_kind_of_turn_reuses_what_its_template_repeats(name: str) -> None:
    bench = Bench(name)
    first = bench.turn(START, called(0))
    found: dict[str, str] = {}

    def go_on(kind: str, messages: Messages, answer: dict[str, Any], before: Turn | None = None) -> None:
        before = before or bench.turns[-1]
        turn = bench.turn(messages, answer)
        found[kind] = turn.kind_after(before, first)
        # Where tools stand in front of the newest user message, a boundary behind them serves a retry only.
        if (kind, name) != ("fork", "mistral3"):
            assert turn.best - turn.reused <= MAX_SLACK, (kind, turn)

    for number in range(1, NUM_ROUNDS + 1):
        go_on("loop", looped(number), called(number))
    closed = bench.turn(looped(NUM_ROUNDS), said("It is late."))
    asked = [*looped(NUM_ROUNDS), said("It is late."), user("Why?")]
    go_on("user", asked, said("Snow."))
    go_on("retry", asked, said("Snow."))
    go_on("fork", [*asked[:-1], user("When will it come?")], said("Soon."), before=closed)
    bench = Bench(name)
    first = bench.turn(START, called(0))
    for number in range(1, 5):
        go_on("dropped loop", without_reasoning(looped(number)), called(number))
    bench.turn(asked, said("Snow."))
    go_on("dropped", without_reasoning([*asked, said("Snow."), user("Oh?")]), said("Yes."))
    assert tuple(found[kind] for kind in TRANSITIONS) == EXPECTED[name]


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", " :\t")])
def test_arguments_that_a_client_writes_anew_give_the_same_prompt(name: str, separators: tuple[str, str]) -> None:
    bench = Bench(name)
    messages = [*looped(2), said("Über é"), user("x")]
    written = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(
                call["function"]["arguments"], separators=separators
            )}}
            for call in message.get("tool_calls", ())
        ]  # fmt: skip
        written.append({**message, "content": message["content"] or None, "tool_calls": calls} if calls else message)
    assert bench.fresh_ids(normalize_messages(written)) == bench.fresh_ids(normalize_messages(messages))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_boundaries_lie_within_every_next_prompt(name: str) -> None:
    """turn_start within whatever may follow; turn_end within what was asked for; both near the end of it."""
    bench = Bench(name)
    num_checks = 0
    for number in range(NUM_HISTORIES):
        source = FamilyConversation(FIRST_SEED + number)
        in_loop = number % 3 == 2
        messages = source.history(source.choice.randint(0, 3), in_loop=in_loop)
        tools = TOOLS if number % 2 else None
        prompt = bench.prompt(messages, tools)
        positions = bench.positions(messages, prompt, tools)
        start = positions.get("turn_start", 0)
        last_end = positions.get("turn_end", 0)
        if not in_loop and last_end < len(prompt.token_ids) - 1:  # there it is for a retry
            edited = bench.fresh_ids([*messages[:-1], source.user()], tools)
            assert last_end <= common_prefix(prompt.token_ids, edited), (FIRST_SEED + number, last_end)
        base = messages[: max(i for i, message in enumerate(messages) if message["role"] == "user") + 1]
        shared = []
        for after in continuations(source):
            for next_messages in ([*messages, *after], [*base, *after]):
                shared.append(common_prefix(prompt.token_ids, bench.fresh_ids(next_messages, tools)))
        assert start <= min(shared), (FIRST_SEED + number, start, shared)
        assert in_loop or min(shared) - start <= MAX_SLACK, (FIRST_SEED + number, start, shared)
        num_checks += len(shared)
        for calls in (False, True):
            answer = source.answer(calls=calls)
            ids = bench.written(prompt, messages, answer, tools)
            stable = bench.finder.turn_end(messages, answer, tools, None, ids, prompt=prompt, now=NOW).stable_tokens
            for _ in range(NUM_CONTINUATIONS):
                after = source.results(answer) if calls else [source.user()]
                n = common_prefix(ids, bench.fresh_ids([*messages, answer, *after], tools))
                assert stable <= n, (FIRST_SEED + number, calls, stable, n)
                num_checks += 1
    assert num_checks == NUM_HISTORIES * 4 * NUM_CONTINUATIONS
    assert bench.finder.num_failures == bench.encoder.num_without_cuts == 0


def continuations(source: FamilyConversation) -> list[Messages]:
    """Answers with what follows them: a closed turn, tool results, a finished loop, and others."""
    call = source.answer(calls=True)
    found = [
        [source.answer(calls=False), source.user()],
        [call, *source.results(call)],
        [call, *source.results(call), source.answer(calls=False), source.user()],
    ]
    while len(found) < NUM_CONTINUATIONS:
        found.append([*source.turn()[1:], source.user()])
    return found
