"""Output that follows a grammar: what may come next, and the same tokens however the request is scheduled."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from engine_builders import make_loop, submit
from stepped_engine import Outcome, SteppedEngine
from tokenizers import Tokenizer

from turnkeep.engine.grammar import GrammarError, GrammarMatchers
from turnkeep.models.demo import rendering
from turnkeep.scheduler.request import SamplingParams

TOKENIZER_JSON = (rendering.DIRECTORY / "tokenizer.json").read_text()
TOKENIZER = Tokenizer.from_str(TOKENIZER_JSON)
VOCAB_SIZE = 1280
END_ID = 2


def schema(min_chars: int = 0) -> dict[str, Any]:
    order = {"type": "string", "minLength": min_chars, "maxLength": min_chars + 12}
    return {
        "type": "object",
        "properties": {"order": order, "count": {"enum": [1, 25, 700]}},
        "required": ["order", "count"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }


def grammar(start: str = "@answer", answer: object = None) -> str:
    parts = [{"name": "top", "lark_grammar": f"start: {start}"}]
    return json.dumps({"grammars": [*parts, {"name": "answer", "json_schema": answer or schema()}]})


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def matchers(max_matchers: int = 8) -> GrammarMatchers:
    return GrammarMatchers(lambda: TOKENIZER_JSON, VOCAB_SIZE, [END_ID], max_matchers=max_matchers)


def allowed(bits: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")).tolist())


def test_only_what_continues_the_grammar_is_allowed_and_the_end_only_at_its_end() -> None:
    states, ids = matchers(), encode('{"order":"B47","count":25}')
    for length in range(len(ids)):
        following = allowed(states.allowed_bits("r", grammar(), ids[:length], (7,)))
        assert ids[length] in following
        assert not {END_ID, 7} & following
        assert max(following) < VOCAB_SIZE
    assert allowed(states.allowed_bits("r", grammar(), ids, (7,))) == {END_ID, 7}


def test_a_state_that_was_dropped_or_belongs_to_other_tokens_is_computed_again() -> None:
    one, other = encode('{"order":"B47"'), encode('{"order":"C')
    expected = [matchers().allowed_bits("x", grammar(), ids, ()) for ids in (one, other)]
    few = matchers(max_matchers=1)
    for _ in range(3):
        assert [few.allowed_bits(name, grammar(), ids, ()) for name, ids in (("a", one), ("b", other))] == expected
    same = matchers()
    assert [same.allowed_bits("a", grammar(), ids, ()) for ids in (one, other)] == expected
    assert same.allowed_bits("a", grammar(), one[:2], ()) == matchers().allowed_bits("x", grammar(), one[:2], ())


@pytest.mark.parametrize("text", ["not a grammar", "{}", grammar("@missing"), grammar(answer={"type": "nothing"})])
def test_what_is_no_grammar_is_an_error(text: str) -> None:
    with pytest.raises(GrammarError):
        matchers().allowed_bits("r", text, [], ())


def test_a_tokenizer_that_cannot_be_used_is_an_error_of_the_requests_that_need_it() -> None:
    broken = GrammarMatchers(lambda: "{}", VOCAB_SIZE, [END_ID])
    broken.prepare()
    with pytest.raises(GrammarError, match="tokenizer"):
        broken.allowed_bits("r", grammar(), [], ())


def test_output_outside_the_grammar_is_an_error() -> None:
    with pytest.raises(GrammarError, match="not what its grammar allows"):
        matchers().allowed_bits("r", grammar(), encode("Hello"), ())


@pytest.mark.parametrize("pattern", ["((a{1,9999}){1,9999}){1,9999}", "(a|b|ab)*(a|b){0,900}c", "(.*a){12}.{0,500}x"])
def test_a_pattern_that_explodes_is_cut_off_or_costs_little(pattern: str) -> None:
    text = json.dumps({"grammars": [{"name": "top", "lark_grammar": f"start: /{pattern}/"}]})
    states, ids = matchers(), encode("a") * 40
    started_s = time.process_time()
    try:
        for length in range(len(ids)):
            assert ids[0] in allowed(states.allowed_bits("r", text, ids[:length], ()))
    except GrammarError:
        pass
    assert time.process_time() - started_s < 2.0


def test_a_grammar_error_ends_its_own_request_only() -> None:
    bench = make_loop("hybrid")  # an engine that was given nothing to follow grammars with
    bench.loop.receive(submit("constrained", [3, 4, 5], grammar="{}"))
    bench.loop.receive(submit("free", [3, 4, 6]))
    bench.run()
    assert bench.finished("constrained").reason == "error"
    assert "grammars" in (bench.finished("constrained").message or "")
    assert bench.finished("free").reason == "length"


QUESTIONS = ("Where is order B47?", "How many lamps are left?")
PROMPTS = [encode(f"<|user|>{text}<|end|><|assistant|>") for text in QUESTIONS]
SAMPLING = SamplingParams(
    max_new_tokens=200,
    temperature=1.0,
    seed=3,
    stop_token_ids=(END_ID,),
    grammar=grammar(answer=schema(160)),
    presence_penalty=0.1,
)


def answers(outcomes: list[Outcome]) -> list[list[int]]:
    for outcome in outcomes:
        assert outcome.finished is not None
        assert outcome.finished.reason == "stop", outcome.finished
        values = json.loads(TOKENIZER.decode(outcome.token_ids))
        assert sorted(values) == ["count", "order"]
        assert isinstance(values["count"], int)
    return [outcome.token_ids for outcome in outcomes]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    engine = SteppedEngine(prefix_caching=False)
    return [answers(engine.run([prompt], sampling=SAMPLING))[0] for prompt in PROMPTS]


def test_cache_hits_and_batches_do_not_change_constrained_tokens(alone: list[list[int]]) -> None:
    engine = SteppedEngine()
    assert answers(engine.run(PROMPTS, sampling=SAMPLING, boundaries=[6])) == alone
    again = engine.run(PROMPTS, sampling=SAMPLING, boundaries=[6])
    assert answers(again) == alone
    assert all(outcome.num_cached_tokens > 0 for outcome in again)


def test_suspension_does_not_change_constrained_tokens(alone: list[list[int]]) -> None:
    engine = SteppedEngine(page_size=8, num_pages=31, num_state_rows=16, max_model_len=220)
    outcomes = engine.run(PROMPTS * 2, sampling=SAMPLING)
    assert answers(outcomes) == alone * 2
    assert sum(outcome.finished.num_suspensions for outcome in outcomes if outcome.finished is not None) > 0
