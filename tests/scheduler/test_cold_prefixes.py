"""Requests whose prefix lies in a colder tier: they wait without holding anybody up, and never for ever."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from content_probe import expected_output
from scheduler_builders import VOCAB_SIZE, Bench, make_request
from tier_driver import AMPLE
from tiered_bench import TieredBench

from turnkeep.cache.tiers.loader import Loader
from turnkeep.cache.tiers.record import TierBudget
from turnkeep.scheduler.request import Request

NO_HOST = TierBudget(0, 0)
PROMPT = [token % VOCAB_SIZE for token in range(7, 60)]


def first_turn(tiered: TieredBench, name: str = "first") -> list[int]:
    """A turn of conversation c that leaves the device; the tokens that the next prompt repeats."""
    bench = tiered.bench
    bench.scheduler.submit(request(name, PROMPT))
    bench.run()
    tokens = [*PROMPT, *bench.outputs()[name]]
    bench.scheduler.end_turn(name, len(tokens))
    tiered.evict_all()
    return tokens


def request(name: str, prompt: list[int], **options: int) -> Request:
    return make_request(name, prompt, 4, boundaries=[(len(prompt), "turn_start")], conversation_id="c", **options)


def assert_right(bench: Bench, name: str, prompt: list[int], num_tokens: int = 4) -> None:
    assert bench.outputs()[name] == expected_output(prompt, num_tokens, VOCAB_SIZE)


def test_request_waits_for_its_load_while_others_run(tmp_path: Path) -> None:
    tiered = TieredBench(tmp_path, host=NO_HOST)
    bench = tiered.bench
    prompt = [*first_turn(tiered), 1, 2, 3]
    bench.scheduler.submit(request("back", prompt))
    bench.scheduler.submit(make_request("other", 12, 5, salt=3))
    for _ in range(5):
        assert bench.step(), "the other one runs"
    assert "back" not in bench.outputs()
    assert bench.finished()["other"].reason == "length"
    assert not bench.step(), "nothing runs, and nobody is told that it cannot"
    assert bench.scheduler.has_work
    assert bench.scheduler.use_idle_time()
    tiered.background.run()
    bench.run()
    assert_right(bench, "back", prompt)
    assert bench.finished()["back"].num_cached_tokens == len(prompt) - 4
    assert tiered.counters.num_hits == {"disk": 1}


def test_what_host_memory_has_needs_no_waiting(tmp_path: Path) -> None:
    tiered = TieredBench(tmp_path)
    prompt = [*first_turn(tiered), 1, 2, 3]
    tiered.bench.scheduler.submit(request("back", prompt))
    assert tiered.bench.step()
    tiered.bench.run()
    assert tiered.bench.finished()["back"].num_cached_tokens == len(prompt) - 4
    assert tiered.counters.num_hits == {"host": 1}
    assert_right(tiered.bench, "back", prompt)


def test_request_whose_load_fails_computes_and_the_loss_has_its_reason(tmp_path: Path) -> None:
    tiered = TieredBench(tmp_path, host=NO_HOST)
    bench = tiered.bench
    prompt = [*first_turn(tiered), 1, 2, 3]
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    bench.scheduler.submit(request("back", prompt))
    while bench.scheduler.has_work:
        bench.step()
        tiered.background.run()
    assert_right(bench, "back", prompt)
    assert bench.finished()["back"].num_cached_tokens == 0
    assert bench.cache.stats().counters.lost_tokens["tier"] == len(prompt) - 4
    assert tiered.counters.num_failed_loads["unreadable"] >= 1


def test_siblings_wait_for_one_load(tmp_path: Path) -> None:
    tiered = TieredBench(tmp_path, host=NO_HOST)
    bench = tiered.bench
    tokens = first_turn(tiered)
    for index in range(5):
        bench.scheduler.submit(request(f"sibling{index}", [*tokens, index, index]))
    assert not bench.step()
    num_reads = len(tiered.background.urgent)
    assert not bench.step()
    assert len(tiered.background.urgent) == num_reads
    tiered.background.run()
    bench.run()
    for index in range(5):
        assert_right(bench, f"sibling{index}", [*tokens, index, index])
    assert tiered.counters.num_hits == {"disk": 1}


@pytest.mark.parametrize("num_read", [0, 1, 2, 9])
def test_abort_at_any_point_of_a_load_leaves_nothing_held(num_read: int, tmp_path: Path) -> None:
    tiered = TieredBench(tmp_path, host=NO_HOST)
    bench = tiered.bench
    prompt = [*first_turn(tiered), 1, 2, 3]
    bench.scheduler.submit(request("back", prompt))
    bench.step()
    tiered.background.run(num_read)
    bench.scheduler.abort("back")
    bench.step()
    tiered.settle()
    assert bench.finished()["back"].reason == "abort"
    assert bench.cache.tiers is not None
    bench.cache.tiers.index.check()
    assert all(not record.num_holds for record in bench.cache.tiers.index.disk)
    bench.scheduler.submit(request("again", prompt))
    while bench.scheduler.has_work:
        bench.step()
        tiered.background.run()
    assert_right(bench, "again", prompt)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded is handed over page by page, one a turn of the loop (the clock of these tests stands still)."""
    monkeypatch.setattr("turnkeep.cache.tiers.loader.SLICE_S", 0.0)
    monkeypatch.setattr("turnkeep.cache.tiers.takeover.MAX_PIECE_PAGES", 1)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("host", [AMPLE, NO_HOST])
def test_others_run_between_the_pieces_of_a_long_load(host: TierBudget, tmp_path: Path) -> None:
    tiered = TieredBench(tmp_path, host=host)
    bench = tiered.bench
    prompt = [*first_turn(tiered), 1, 2, 3]
    bench.scheduler.submit(make_request("other", 12, 40, salt=3))
    bench.step()
    bench.scheduler.submit(request("back", prompt))
    bench.step()
    tiered.background.run()
    num_steps = 0
    while bench.scheduler.stats().num_waiting:
        assert bench.step()
        bench.cache.check()
        num_steps += 1
    assert num_steps >= len(prompt) // bench.cache.page_size - 1, "a page a step"
    bench.run()
    assert_right(bench, "back", prompt)
    assert bench.finished()["back"].num_cached_tokens == len(prompt) - 4
    assert tiered.counters.num_hits.total() == 1


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("num_pieces", [1, 3, 8, 14])
@pytest.mark.parametrize("ending", ["abort", "close", "leave"])
def test_a_load_that_is_handed_over_in_part_leaves_nothing_held(ending: str, num_pieces: int, tmp_path: Path) -> None:
    tiered = TieredBench(tmp_path)
    bench = tiered.bench
    tiers = bench.cache.tiers
    assert tiers is not None
    prompt = [*first_turn(tiered), 1, 2, 3]
    bench.scheduler.submit(request("back", prompt))
    for _ in range(num_pieces):
        bench.step()
    assert tiers.loader.is_handing_over
    assert bench.cache.stats().num_free_pages < bench.cache.stats().num_pages
    if ending == "close":
        bench.scheduler.close_conversation("", "c")
    elif ending == "leave":
        tiers.close()
    bench.scheduler.abort("back")
    bench.step()
    tiered.settle()
    assert not tiers.loader.is_loading
    tiered.evict_all()
    stats = bench.cache.stats()
    assert (stats.num_free_pages, stats.num_free_rows) == (stats.num_pages, stats.num_rows)
    assert all(not record.num_holds for record in [*tiers.index.host, *tiers.index.disk])


@pytest.mark.usefixtures("small_pieces")
def test_who_runs_goes_before_what_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[bool] = []
    give_way = Loader.give_way
    monkeypatch.setattr(Loader, "give_way", lambda self: given_up.append(give_way(self)) or given_up[-1])
    for num_pages in range(26, 30):
        for length in range(37, 41):
            tiered = TieredBench(None, num_pages=num_pages, num_state_rows=7, decode_reserve_tokens=1)
            bench = tiered.bench
            prompt = [*first_turn(tiered), 1, 2, 3]
            bench.scheduler.submit(make_request("long", length, 60, salt=9))
            bench.step()
            bench.scheduler.submit(request("back", prompt))
            while bench.scheduler.has_work:
                bench.step()
                bench.cache.check()
            reasons = {done.reason for done in bench.finished().values()}
            assert reasons == {"length"}, (num_pages, length)
            assert bench.scheduler.stats().num_suspensions == 0
            assert_right(bench, "back", prompt)
    assert any(given_up)


@pytest.mark.usefixtures("small_pieces")
def test_a_load_that_nobody_waits_for_is_no_shortage(tmp_path: Path) -> None:
    tiered = TieredBench(tmp_path, num_pages=24, num_state_rows=7)
    bench = tiered.bench
    prompt = [*first_turn(tiered), 1, 2, 3]
    bench.scheduler.submit(request("back", prompt))
    for _ in range(10):
        bench.step()
    bench.scheduler.abort("back")
    bench.scheduler.submit(make_request("other", 70, 4, salt=5))
    while bench.scheduler.has_work:
        bench.step()
        bench.cache.check()
    assert bench.finished()["other"].reason == "length"


def test_prompt_that_is_expected_is_read_ahead(tmp_path: Path) -> None:
    first_turn(TieredBench(tmp_path))
    tiered = TieredBench(tmp_path)
    tiered.bench.scheduler.expect("", "c")
    tiered.settle()
    prompt = [*PROMPT, *expected_output(PROMPT, 4, VOCAB_SIZE), 5]
    tiered.bench.scheduler.submit(request("back", prompt))
    assert tiered.bench.step(), "it runs at once"
    tiered.bench.run()
    assert_right(tiered.bench, "back", prompt)
    assert tiered.counters.num_hits == {"disk": 1}


def test_suspended_request_comes_back_through_a_colder_tier(tmp_path: Path) -> None:
    tiered = TieredBench(tmp_path, host=NO_HOST, num_pages=22, num_state_rows=6, decode_reserve_tokens=1)
    bench = tiered.bench
    prompts = {"a": PROMPT[:30], "b": PROMPT[10:40]}
    for name, prompt in prompts.items():
        bench.scheduler.submit(make_request(name, prompt, 34))
    for _ in range(400):
        if not bench.scheduler.has_work:
            break
        bench.step()
        tiered.background.run()
    assert bench.scheduler.stats().num_suspensions > 0
    for name, prompt in prompts.items():
        assert_right(bench, name, prompt, 34)


def test_the_oldest_goes_on_however_many_wait_for_loads(tmp_path: Path) -> None:
    tiered = TieredBench(tmp_path, host=NO_HOST, num_pages=40, num_state_rows=7)
    bench = tiered.bench
    tokens = first_turn(tiered)
    bench.scheduler.submit(make_request("long", 20, 100, salt=9))
    bench.step()
    for index in range(6):
        bench.scheduler.submit(request(f"r{index}", [*tokens, index]))
    for _ in range(600):
        if not bench.scheduler.has_work:
            break
        bench.step()
        tiered.background.run(1)
    assert {name: done.reason for name, done in bench.finished().items()} == dict.fromkeys(
        ["first", "long", *(f"r{index}" for index in range(6))], "length"
    )
    bench.cache.check()


@pytest.mark.parametrize("host", [AMPLE, NO_HOST, TierBudget(2000, 300)])
@pytest.mark.parametrize("seed", range(4))
def test_random_conversations_in_pools_for_two_are_always_right(host: TierBudget, seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    tiered = TieredBench(tmp_path, host=host, num_pages=50, num_state_rows=9)
    histories = {f"c{index}": [generator.randrange(VOCAB_SIZE) for _ in range(45)] for index in range(6)}
    num_cached = num_hits = 0
    for turn in range(24):
        bench = tiered.bench
        names = generator.sample(sorted(histories), 2)
        for name in names:
            histories[name] += [generator.randrange(VOCAB_SIZE) for _ in range(3)]
            if generator.random() < 0.5:
                bench.scheduler.expect("", name)
            bench.scheduler.submit(
                make_request(
                    f"{name}-{turn}",
                    histories[name],
                    4,
                    boundaries=[(len(histories[name]), "turn_start")],
                    conversation_id=name,
                )
            )
        for _ in range(300):
            if not bench.scheduler.has_work:
                break
            bench.step()
            tiered.background.run(generator.randrange(3))
        for name in names:
            assert_right(bench, f"{name}-{turn}", histories[name])
            num_cached += bench.finished()[f"{name}-{turn}"].num_cached_tokens
            histories[name] = [*histories[name], *bench.outputs()[f"{name}-{turn}"]][-110:]
            bench.scheduler.end_turn(f"{name}-{turn}", 10_000)
        if generator.random() < 0.3:
            bench.scheduler.use_idle_time()
        if turn % 8 == 7:  # the engine dies
            num_hits += tiered.counters.num_hits.total()
            tiered = TieredBench(tmp_path, host=host, num_pages=50, num_state_rows=9)
    assert num_cached > 0
    assert num_hits > 0
