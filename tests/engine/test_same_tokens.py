"""Scheduling never changes tokens: cached or not, chunked or whole, alone or not, suspended or not."""

from __future__ import annotations

import random

import pytest
from engine_builders import VOCAB_SIZE, LoopBench, make_loop, submit

from turnkeep.engine.messages import EndTurn, Submit
from turnkeep.models.tiny import TinyKind

KINDS: tuple[TinyKind, ...] = ("hybrid", "attention_only", "attention_free")
MORE_KINDS: tuple[TinyKind, ...] = ("sliding", "short_conv", "parallel", "experts", "gated_delta")
NUM_PROMPTS = 6
SAMPLINGS = ({}, {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": 11, "presence_penalty": 0.3})


def prompts(count: int = NUM_PROMPTS) -> list[list[int]]:
    chance = random.Random(5)
    return [[chance.randrange(3, VOCAB_SIZE) for _ in range(23 + 14 * index)] for index in range(count)]


def messages(sampling: dict[str, float], count: int = NUM_PROMPTS) -> list[Submit]:
    return [
        submit(
            f"r{index}",
            prompt,
            12,
            boundaries=[(9, "trunk"), (len(prompt) - 2, "turn_start")],
            conversation_id=f"c{index}",
            **sampling,
        )
        for index, prompt in enumerate(prompts(count))
    ]


def run_each(bench: LoopBench, requests: list[Submit]) -> list[list[int]]:
    """One after another."""
    for message in requests:
        bench.loop.receive(message)
        bench.run()
    return [bench.tokens(message.request_id) for message in requests]


def run_together(bench: LoopBench, requests: list[Submit]) -> list[list[int]]:
    for message in requests:
        bench.loop.receive(message)
    bench.run()
    return [bench.tokens(message.request_id) for message in requests]


SMALL_STATES = {kind: {"state_dtype": dtype} for kind, dtype in (
    ("hybrid", "float16"), ("gated_delta", "float16"), ("attention_free", "bfloat16"),
)}  # fmt: skip
CASES = [
    *((kind, index, {}) for kind in KINDS for index in range(len(SAMPLINGS))),
    *((kind, 1, {}) for kind in MORE_KINDS),
    *((kind, 1, settings) for kind, settings in SMALL_STATES.items()),
]
Case = tuple[TinyKind, dict[str, str], dict[str, float], list[list[int]]]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """A model, settings of its engine, a way of sampling, and what it gives alone, cold and unchunked."""
    kind, index, settings = request.param
    expected = run_each(make_loop(kind, prefix_caching=False, **settings), messages(SAMPLINGS[index]))
    assert all(len(output) == 12 for output in expected)
    return kind, settings, SAMPLINGS[index], expected


@pytest.mark.parametrize("max_step_tokens", [7, 64])
def test_chunk_sizes_give_the_same_tokens(case: Case, max_step_tokens: int) -> None:
    kind, settings, sampling, expected = case
    bench = make_loop(kind, prefix_caching=False, max_step_tokens=max_step_tokens, **settings)
    assert run_each(bench, messages(sampling)) == expected


def test_a_batch_of_odd_lengths_gives_the_same_tokens(case: Case) -> None:
    kind, settings, sampling, expected = case
    assert run_together(make_loop(kind, max_step_tokens=50, **settings), messages(sampling)) == expected


def test_cache_hits_give_the_same_tokens(case: Case) -> None:
    kind, settings, sampling, expected = case
    bench = make_loop(kind, **settings)
    assert run_each(bench, messages(sampling)) == expected
    again = [
        submit(f"again{index}", message.prompt_ids, 12, **sampling) for index, message in enumerate(messages(sampling))
    ]
    assert run_each(bench, again) == expected
    for message in again:
        finished = bench.finished(message.request_id)
        assert finished.num_cached_tokens >= len(message.prompt_ids) - 2


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])  # without attention no page can be short
def test_suspension_gives_the_same_tokens(kind: TinyKind, sampling: dict[str, float]) -> None:
    requests = [
        submit(f"r{index}", prompt, 85, boundaries=[(9, "trunk")], **sampling)
        for index, prompt in enumerate(prompts(3))
    ]
    expected = run_each(make_loop(kind, prefix_caching=False), requests)
    bench = make_loop(kind, num_pages=40)
    assert run_together(bench, requests) == expected
    assert bench.stats().counters["num_suspensions"] > 0
    assert bench.finished("r0").num_suspensions == 0


@pytest.mark.parametrize(
    ("kind", "settings"), [*((kind, {}) for kind in (*KINDS, *MORE_KINDS)), *SMALL_STATES.items()], ids=str
)
def test_the_next_turn_computes_its_new_tokens_only_and_gives_what_a_cold_run_gives(
    kind: TinyKind, settings: dict[str, str]
) -> None:
    bench = make_loop(kind, **settings)
    cold = make_loop(kind, prefix_caching=False, **settings)
    history = prompts(1)[0]
    for turn in range(6):
        name = f"turn{turn}"
        message = submit(name, history, 9, boundaries=[(9, "trunk"), (len(history), "turn_start")], conversation_id="c")
        for engine in (bench, cold):
            engine.loop.receive(message)
            engine.run()
        assert bench.tokens(name) == cold.tokens(name)
        if turn:
            # The last sampled token was never fed to the model; it and the four new ones are computed.
            assert bench.finished(name).num_cached_tokens == len(history) - 5
        history = [*history, *bench.tokens(name), 3 + turn, 4, 5, 6]
        bench.loop.receive(EndTurn(name, len(history) - 4))


@pytest.mark.parametrize("kind", ["hybrid", "attention_free"])
def test_an_edit_of_the_newest_message_resumes_before_it_where_answers_come_back_changed(kind: TinyKind) -> None:
    """What the server asks for then: a turn_end in front of the newest message, and none at the answer's end."""
    bench = make_loop(kind)
    first, rest = prompts(2)[1][:20], prompts(2)[0]
    run_each(bench, [submit("one", first, 9, boundaries=[(20, "turn_start")], conversation_id="c")])
    bench.loop.receive(EndTurn("one", 20))  # the answer is printed without its thought in the next prompt
    shown = [*first, 5, 6, 7]
    asked = [*shown, *rest]
    boundaries = [(len(shown), "turn_end"), (len(asked), "turn_start")]
    run_each(bench, [submit("two", asked, 9, boundaries=boundaries, conversation_id="c")])
    bench.loop.receive(EndTurn("two", len(asked)))
    edited = [*shown, 9, *rest]
    (output,) = run_each(bench, [submit("edit", edited, 9, conversation_id="c")])
    assert bench.finished("edit").num_cached_tokens == len(shown)
    assert [output] == run_each(make_loop(kind, prefix_caching=False), [submit("cold", edited, 9)])


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_models_own_and_do_not_change_the_choice(kind: TinyKind) -> None:
    bench = make_loop(kind)
    plain, with_logprobs = (
        submit("plain", prompts(1)[0], 6),
        submit("with", prompts(1)[0], 6, num_logprobs=3),
    )
    assert run_each(bench, [plain, with_logprobs])[0] == bench.tokens("with")
    for event in bench.events:
        if getattr(event, "request_id", None) == "with" and hasattr(event, "logprobs"):
            assert event.logprobs is not None
            (entry,) = event.logprobs
            assert len(entry.top) == 3
            assert entry.top[0] == (event.token_ids[0], pytest.approx(entry.logprob))  # greedy: the likeliest


@pytest.mark.parametrize("dtypes", [{"state_dtype": "bfloat16"}, {"kv_dtype": "bfloat16"}], ids=str)
def test_a_turn_that_resumes_from_narrow_pools_goes_on_where_the_last_one_stopped(dtypes: dict[str, str]) -> None:
    bench = make_loop("hybrid", **dtypes)
    history = prompts(1)[0]
    whole = submit("whole", history, 24, conversation_id="a")
    assert len(run_each(bench, [whole])[0]) == 24
    first = submit("first", history, 12, boundaries=[(len(history), "turn_start")], conversation_id="b")
    run_each(bench, [first])
    bench.loop.receive(EndTurn("first", len(history) + 12))
    rest = submit("rest", [*history, *bench.tokens("first")], 12, conversation_id="b")
    run_each(bench, [rest])
    # The snapshot holds what the live row held, so the narrow type does not show between turns.
    assert bench.tokens("first") + bench.tokens("rest") == bench.tokens("whole")
    assert bench.finished("rest").num_cached_tokens == len(history) + 11
