"""What leaves the device goes to host memory and disk, and comes back whole, on a match, for its own tenant only."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_driver import MODEL_KINDS, ModelKind
from tier_driver import TieredDriver

from turnkeep.cache.tiers.keys import owner_key
from turnkeep.cache.tiers.record import TierBudget

PROMPT = list(range(100, 150))
ANSWER = list(range(200, 210))
NEXT = [*PROMPT, *ANSWER, *range(300, 320)]


def turn(driver: TieredDriver, conversation_id: str = "c", *, salt: int = 0) -> list[int]:
    """One turn; its tokens as the next prompt repeats them."""
    prompt = [token + 1000 * salt for token in PROMPT]
    run = driver.turn(prompt, ANSWER, conversation_id, trunk=20, turn_start=len(PROMPT))
    return run.token_ids


@pytest.mark.parametrize("kind", MODEL_KINDS)
@pytest.mark.parametrize("on_disk", [False, True])
def test_evicted_turn_comes_back_from_a_colder_tier(kind: ModelKind, on_disk: bool, tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path if on_disk else None, kind)
    hot = driver.match([*turn(driver), 1, 2]).num_tokens
    driver.cache.clear()
    driver.settle_background()
    assert driver.match(NEXT).num_tokens == 0
    match = driver.bring(NEXT, "c")
    assert match.num_tokens == hot
    driver.open_brought(NEXT, "c")
    assert driver.counters.num_hits["host"] == 1


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_new_process_goes_on_from_what_the_disk_holds(kind: ModelKind, tmp_path: Path) -> None:
    first = TieredDriver(tmp_path, kind)
    turn(first)
    first.idle()
    second = TieredDriver(tmp_path, kind)
    match = second.bring(NEXT, "c")
    assert match.num_tokens == 59
    run = second.open_brought(NEXT, "c")
    assert second.finish_turn(run, ANSWER) is not None or kind == "attention_only"
    assert second.counters.num_hits == {"disk": 1}


def test_the_last_page_of_a_model_without_state_is_used_as_far_as_a_prompt_repeats_it(tmp_path: Path) -> None:
    first = TieredDriver(tmp_path, "attention_only", page_size=16)
    turn(first)
    first.idle()
    for num_repeated in (48, 49, 55, 59):
        second = TieredDriver(tmp_path, "attention_only", page_size=16)
        prompt = [*NEXT[:num_repeated], 1, 2]
        assert second.bring(prompt, "c").num_tokens == num_repeated
        run = second.open_brought([*prompt, *range(300, 320)], "c")
        second.finish_turn(run, ANSWER)  # content is checked


def test_what_is_kept_of_a_page_gives_way_to_more_of_it(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path, "attention_only", page_size=16)
    tails: list[list[int]] = []
    tokens = PROMPT[:34]
    for num_new in (4, 4, 10):
        tokens = driver.turn([*tokens, *range(900, 900 + num_new)], [7], "c").token_ids
        driver.idle()
        tails.append([record.name.position for record in driver.tiers.index.disk if not record.name.page_keys])
    assert tails == [[38], [43], [54]]
    assert len(list(tmp_path.iterdir())) == len(driver.tiers.index.disk)


def test_an_evicted_last_page_is_kept_although_it_was_never_written(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path, "attention_only", page_size=16)
    turn(driver)
    driver.cache.clear()
    driver.settle_background()
    assert TieredDriver(tmp_path, "attention_only", page_size=16).bring(NEXT, "c").num_tokens == 59


def test_loaded_snapshot_is_superseded_by_the_turn_that_used_it(tmp_path: Path) -> None:
    first = TieredDriver(tmp_path)
    turn(first)
    first.idle()
    second = TieredDriver(tmp_path)
    run = second.open_brought(NEXT, "c")
    second.settle(second.finish_turn(run, ANSWER, [(len(NEXT), "turn_start")]), len(NEXT) + len(ANSWER))
    assert second.snapshot_positions("turn_end", superseded=True) == [59]
    assert second.snapshot_positions(superseded=False) == [len(NEXT), len(NEXT) + len(ANSWER) - 1]


def test_equal_tokens_of_another_tenant_are_never_found(tmp_path: Path) -> None:
    first = TieredDriver(tmp_path)
    first.turn(PROMPT, ANSWER, "c", turn_start=len(PROMPT), cache_root="tenant")
    first.idle()
    second = TieredDriver(tmp_path)
    assert second.bring(NEXT, "c").num_tokens == 0
    assert second.bring(NEXT, "c", cache_root="other").num_tokens == 0
    assert second.bring(NEXT, "c", cache_root="tenant").num_tokens == 59


def test_another_layout_in_the_same_folder_is_foreign(tmp_path: Path) -> None:
    first = TieredDriver(tmp_path)
    turn(first)
    first.idle()
    second = TieredDriver(tmp_path, layout=b"another model".ljust(32))
    assert second.bring(NEXT, "c").num_tokens == 0
    assert second.counters.num_ignored_files["foreign"] > 0


def test_what_the_disk_has_is_not_written_again(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path)
    turn(driver)
    driver.idle()
    written = driver.counters.written_bytes
    assert written > 0
    driver.cache.clear()
    driver.settle_background()
    driver.open_brought(NEXT, "c")
    driver.idle()
    assert driver.counters.written_bytes == written


def test_idle_time_writes_trunk_turn_start_and_turn_end(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path)
    turn(driver)
    driver.idle()
    boundaries = sorted((record.name.position, record.name.boundary) for record in driver.tiers.index.disk
                        if record.name.kind == "snapshot")  # fmt: skip
    assert boundaries == [(20, "trunk"), (50, "turn_start"), (59, "turn_end")]
    assert driver.tiers.offloader.num_unwritten == 0


def test_nothing_is_written_while_a_conversation_is_in_full_swing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnkeep.cache.tiers.offloader.QUIET_S", 100.0)
    driver = TieredDriver(tmp_path)
    turn(driver)
    assert not driver.tiers.use_idle_time(is_awaited=False)
    assert not list(tmp_path.iterdir())


def test_superseded_snapshots_are_not_written_and_written_ones_go_first(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path)
    tokens = turn(driver)
    driver.idle()
    driver.turn([*tokens, *range(400, 440)], ANSWER, "c", turn_start=len(tokens) + 40)
    driver.idle()
    positions = [record.name.position for record in driver.tiers.index.disk if record.name.kind == "snapshot"]
    assert positions[:2] == [59, 50] or positions[:2] == [50, 59]
    assert positions[2:] == [20, 100, 109]


def test_a_damaged_file_costs_its_own_tokens_and_nothing_else(tmp_path: Path) -> None:
    first = TieredDriver(tmp_path)
    turn(first)
    first.idle()
    second = TieredDriver(tmp_path, checks=True)
    (newest,) = [record for record in second.tiers.index.disk if record.name.position == 59]
    path = tmp_path / f"{newest.name.key.hex()}.snapshot"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert second.bring(NEXT, "c").num_tokens == 0  # the load failed
    assert second.counters.num_ignored_files == {"corrupt": 1}
    assert second.bring(NEXT, "c").num_tokens == 50  # the one before is whole


def test_a_snapshot_without_its_pages_is_no_snapshot(tmp_path: Path) -> None:
    first = TieredDriver(tmp_path)
    turn(first)
    first.idle()
    runs = sorted(tmp_path.glob("*.pages"))
    assert runs
    for path in runs:
        path.unlink()
    second = TieredDriver(tmp_path)
    assert second.tiers.index.is_empty
    assert second.bring(NEXT, "c").num_tokens == 0
    second.settle_background()
    assert not list(tmp_path.glob("*.snapshot")), "what nothing can use is erased"


def test_a_tier_over_its_budget_drops_the_oldest_conversation_whole(tmp_path: Path) -> None:
    page_budget = TierBudget(page_bytes=3 * 15 * (4 * 8 + 40) + 3000, snapshot_bytes=1 << 20)
    driver = TieredDriver(tmp_path, num_pages=200, num_rows=40, disk=page_budget, host=TierBudget(0, 0))
    for salt in range(6):
        turn(driver, f"c{salt}", salt=salt)
        driver.idle()
    used = sum(path.stat().st_size for path in tmp_path.glob("*.pages"))
    assert used <= page_budget.page_bytes
    assert used == driver.tiers.index.disk.used_bytes["pages"]
    assert driver.tiers.reading().gauges["tier_disk_max_page_bytes"] > used  # before the oldest went
    driver = TieredDriver(tmp_path, num_pages=200, num_rows=40, disk=page_budget, host=TierBudget(0, 0))
    found = [driver.bring([*(token + 1000 * salt for token in PROMPT), *ANSWER, 1]).num_tokens for salt in range(6)]
    assert found[0] == 0
    assert found[5] == 59
    assert sorted(found) == found


def test_snapshot_budget_is_kept_apart_from_that_of_pages(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path, num_pages=200, num_rows=40, disk=TierBudget(1 << 20, 2000), host=TierBudget(0, 0))
    for salt in range(6):
        turn(driver, f"c{salt}", salt=salt)
        driver.idle()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.snapshot")) <= 2000
    kept = {record.name.key for record in driver.tiers.index.disk if record.name.kind == "pages"}
    assert {path.stem for path in tmp_path.glob("*.pages")} == {key.hex() for key in kept}
    assert all(record.users for record in driver.tiers.index.disk if record.name.kind == "pages")


def test_expected_conversation_is_read_before_its_prompt_comes(tmp_path: Path) -> None:
    first = TieredDriver(tmp_path)
    turn(first)
    first.idle()
    second = TieredDriver(tmp_path)
    second.tiers.expect("", "c")
    second.settle_background()
    assert second.counters.num_expected == 1
    match = second.match(NEXT)
    cold = second.tiers.find(match)
    assert cold is not None
    assert second.tiers.load(cold, match, "c") == "done", "no waiting is left"
    assert second.match(NEXT).num_tokens == 59


def test_nothing_is_read_for_a_conversation_that_is_on_the_device(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path, host=TierBudget(0, 0))
    turn(driver)
    driver.idle()
    driver.tiers.expect("", "c")
    driver.tiers.expect("", "unknown")
    driver.tiers.expect("tenant", "c")
    assert not driver.background.urgent


def test_a_load_without_room_changes_nothing(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path, num_pages=20, num_rows=8)
    turn(driver)
    driver.cache.clear()
    driver.settle_background()
    other = driver.open(list(range(5000, 5060)))
    assert other is not None
    assert driver.step(other)
    assert driver.bring(NEXT, "c").num_tokens == 0
    assert not driver.counters.num_hits
    driver.cache.close(other.seq)
    assert driver.bring(NEXT, "c").num_tokens == 59


def test_eviction_beyond_what_the_disk_can_take_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnkeep.cache.tiers.offloader.MIN_BACKLOG_BYTES", 500)
    driver = TieredDriver(tmp_path, host=TierBudget(0, 0))
    turn(driver, "a")
    turn(driver, "b", salt=1)
    driver.cache.clear()
    assert driver.counters.num_skipped_offloads["backlog"] > 0
    driver.settle_background()


def test_a_full_disk_stops_writing_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    driver = TieredDriver(tmp_path, host=TierBudget(0, 0))
    turn(driver)
    monkeypatch.setattr("turnkeep.cache.tiers.disk_tier.write_record", full)
    driver.idle()
    assert driver.counters.num_failed_writes > 0
    assert driver.tiers.index.is_empty
    assert not driver.tiers.use_idle_time(is_awaited=False), "not tried again at once"
    monkeypatch.undo()
    driver.clock.now_s += 100
    turn(driver, "d", salt=2)
    driver.idle()
    assert not driver.tiers.index.is_empty


def test_leaving_engine_writes_what_idle_time_had_not(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path)
    turn(driver)
    driver.tiers.flush(60.0)
    assert TieredDriver(tmp_path).bring(NEXT, "c").num_tokens == 59


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path)
    turn(driver)
    driver.idle()
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {0o600}
    names = "".join(path.name for path in tmp_path.iterdir())
    assert "c." not in names


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_closed_conversation_leaves_nothing_on_disk(
    kind: ModelKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnkeep.cache.tiers.loader.MIN_LOAD_TOKENS", 1)
    driver = TieredDriver(tmp_path, kind)
    tokens = turn(driver)
    driver.turn([*tokens, *range(400, 440)], ANSWER, "c", turn_start=len(tokens) + 40)
    turn(driver, "other", salt=1)
    driver.idle()
    driver.cache.close_conversation("", "c")
    driver.settle_background()
    assert driver.tiers.index.newest(owner_key("", "c")) == []
    driver.cache.clear()
    driver.settle_background()
    assert driver.bring(NEXT, "c").num_tokens == (0 if kind == "attention_only" else 20), "the trunk is everybody's"
    assert driver.bring([*(token + 1000 for token in PROMPT), *ANSWER, 1]).num_tokens == 59


def test_what_a_fork_goes_on_from_outlives_its_parent(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path, "attention_only")
    tokens = turn(driver, "parent")
    driver.idle()
    driver.turn([*tokens, *range(400, 440)], ANSWER, "child")
    driver.idle()
    driver.cache.close_conversation("", "parent")
    driver.cache.clear()
    driver.settle_background()
    assert driver.bring([*tokens, *range(400, 440), *ANSWER, 1]).num_tokens == 109


def test_a_snapshot_whose_file_is_gone_is_offloaded_again_when_it_is_evicted(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path, host=TierBudget(0, 0))
    turn(driver)
    driver.idle()
    for record in [record for record in driver.tiers.index.disk if record.name.kind == "snapshot"]:
        driver.tiers.index.drop_from_disk(record)
    driver.settle_background()
    assert driver.tiers.index.is_empty
    driver.cache.clear()
    driver.settle_background()
    assert driver.bring(NEXT, "c").num_tokens == 59


def test_a_snapshot_that_is_wanted_again_is_written_after_all(tmp_path: Path) -> None:
    driver = TieredDriver(tmp_path)
    tokens = turn(driver)
    driver.turn([*tokens, *range(400, 440)], ANSWER, "c", turn_start=len(tokens) + 40)
    driver.turn(PROMPT, [*ANSWER[:-1], 7, 8], "c", turn_start=len(PROMPT))  # the user went back and asked again
    assert 50 in driver.snapshot_positions("turn_start", superseded=False)
    driver.idle()
    written = [record.name.position for record in driver.tiers.index.disk if record.name.kind == "snapshot"]
    assert 50 in written
