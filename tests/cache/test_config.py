"""The rules of the cache's settings, and where a snapshot policy puts snapshots."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cache_driver import CacheDriver

from turnkeep.cache.boundary import Boundary
from turnkeep.cache.config import CacheConfig, SnapshotPolicy, resolve_cache_config, snapshot_interval
from turnkeep.cache.snapshot_plan import SnapshotPlanner

NO_RULE = SnapshotPolicy(template_boundaries=False, branch_snapshots=False, declared_boundaries=False)
BARE = {"template_boundaries": False, "branch_snapshots": False, "declared_boundaries": False}


@pytest.mark.parametrize("interval", [-1, 2.0, True, "64", None])
def test_the_interval_is_a_whole_number(interval: Any) -> None:
    with pytest.raises(ValueError, match="periodic_snapshot_interval"):
        SnapshotPolicy(periodic_snapshot_interval=interval)


@pytest.mark.parametrize("offset", [0, -3, 1.0, True, "8"])
def test_offsets_from_the_start_are_positive_whole_numbers(offset: Any) -> None:
    with pytest.raises(ValueError, match="offsets_from_start"):
        SnapshotPolicy(additional_snapshot_offsets_from_start=(64, offset))


@pytest.mark.parametrize("offset", [-1, 0.0, False])
def test_offsets_from_the_end_are_whole_numbers(offset: Any) -> None:
    with pytest.raises(ValueError, match="offsets_from_end"):
        SnapshotPolicy(additional_snapshot_offsets_from_end=(0, offset))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reuse_policy", "always"),
        ("eviction_policy", "random"),
        ("max_num_turns", 0),
        ("max_branches", True),
        ("max_tenant_share", 1.5),
        ("idle_ttl_s", -1.0),
        ("max_held_share", float("nan")),
    ],
)
def test_other_settings_are_checked_too(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        CacheConfig(**{name: value})


@pytest.mark.parametrize("text", ['{"snapshots": {"interval": 3}}', '{"reuse": "per_request"}'])
def test_unknown_settings_are_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(text, type=CacheConfig)


@pytest.mark.parametrize("text", ['{"periodic_snapshot_interval": true}', '{"periodic_snapshot_interval": 64.5}'])
def test_decoded_settings_are_as_strict(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=SnapshotPolicy)


def test_the_old_name_of_the_interval_is_taken_with_a_notice_and_never_with_the_new_one() -> None:
    assert snapshot_interval(None, None) == (0, ())
    assert snapshot_interval(64, None) == (64, ())
    interval, (notice,) = snapshot_interval(None, 128)
    assert interval == 128
    assert "deprecated" in notice
    for given in (0, 64):
        with pytest.raises(ValueError, match="only one of them"):
            snapshot_interval(given, 128)
    assert b"mamba_state_cache_interval" not in msgspec.json.encode(CacheConfig())


def test_with_per_conversation_the_interval_is_forced_to_zero_and_the_offsets_stay() -> None:
    policy = SnapshotPolicy(periodic_snapshot_interval=64, additional_snapshot_offsets_from_end=(0,))
    config, (notice,) = resolve_cache_config(CacheConfig(snapshots=policy), has_state=True)
    assert config.snapshots.periodic_snapshot_interval == 0
    assert config.snapshots.additional_snapshot_offsets_from_end == (0,)
    assert "periodic_snapshot_interval" in notice


def test_with_per_request_the_interval_stays() -> None:
    given = CacheConfig(reuse_policy="per_request", snapshots=SnapshotPolicy(periodic_snapshot_interval=64))
    assert resolve_cache_config(given, has_state=True) == (given, ())


def test_a_model_with_state_and_no_rule_at_all_is_told_that_it_cannot_hit() -> None:
    config, (notice,) = resolve_cache_config(CacheConfig(snapshots=NO_RULE), has_state=True)
    assert not config.prefix_caching
    assert "disabled" in notice
    assert resolve_cache_config(CacheConfig(snapshots=NO_RULE), has_state=False)[0].prefix_caching


def test_an_interval_that_per_conversation_takes_away_is_no_rule() -> None:
    given = CacheConfig(snapshots=SnapshotPolicy(periodic_snapshot_interval=64, **BARE))
    config, notices = resolve_cache_config(given, has_state=True)
    assert not config.prefix_caching
    assert len(notices) == 2


def test_all_reusable_is_per_request_where_state_decides() -> None:
    config, notices = resolve_cache_config(CacheConfig(reuse_policy="all_reusable"), has_state=True)
    assert config.reuse_policy == "per_request"
    assert len(notices) == 1
    given = CacheConfig(reuse_policy="all_reusable")
    assert resolve_cache_config(given, has_state=False) == (given, ())


@pytest.mark.parametrize(
    ("num_tokens", "positions"), [(150, [64, 128, 150]), (128, [64, 106, 128]), (32, [10, 32]), (9, [9])]
)
def test_interval_and_offsets_make_one_sorted_list(num_tokens: int, positions: list[int]) -> None:
    policy = SnapshotPolicy(
        periodic_snapshot_interval=64,
        additional_snapshot_offsets_from_start=(128, 999),
        additional_snapshot_offsets_from_end=(0, 22, 999),
    )
    planned = SnapshotPlanner(policy, None).planned((), num_tokens)
    assert [boundary.position for boundary in planned] == positions


def test_what_the_template_names_decides_the_kind_at_its_position() -> None:
    policy = SnapshotPolicy(additional_snapshot_offsets_from_end=(0, 5))
    given = (Boundary(20, "turn_start"), Boundary(7, "declared"), Boundary(30, "trunk"), Boundary(0, "trunk"))
    planned = SnapshotPlanner(policy, None).planned(given, 20)
    assert planned == (Boundary(7, "declared"), Boundary(15, "fixed"), Boundary(20, "turn_start"))


def test_kinds_that_are_switched_off_are_left_out() -> None:
    given = (Boundary(5, "trunk"), Boundary(7, "declared"), Boundary(9, "turn_start"))
    assert SnapshotPlanner(NO_RULE, None).planned(given, 20) == ()
    only_declared = msgspec.structs.replace(NO_RULE, declared_boundaries=True)
    assert SnapshotPlanner(only_declared, None).planned(given, 20) == (Boundary(7, "declared"),)


def test_without_template_boundaries_a_turn_leaves_no_end_behind() -> None:
    driver = CacheDriver(config=CacheConfig(snapshots=SnapshotPolicy(template_boundaries=False)))
    driver.turn(list(range(20)), [1, 2], "c")
    assert driver.snapshot_positions() == []


def test_without_branch_snapshots_none_is_asked_for_where_prompts_part() -> None:
    for is_on in (True, False):
        config = CacheConfig(eviction_policy="lru", snapshots=SnapshotPolicy(branch_snapshots=is_on))
        driver = CacheDriver(config=config)
        driver.turn(list(range(60)), [1, 2], "a")
        run = driver.open([*range(50), 7, 8], "b")
        assert run is not None
        assert [boundary.position for boundary in run.seq.boundaries] == ([50] if is_on else [])


def test_as_many_turns_of_a_line_as_asked_for_are_kept_side_by_side() -> None:
    driver = CacheDriver(config=CacheConfig(eviction_policy="lru", max_num_turns=2), num_pages=100)
    known = list(range(20))
    ends = []
    for number in range(4):
        known = driver.turn([*known, 50 + number, 60], [1, 2], "c").token_ids
        ends.append(len(known) - 1)
    assert driver.snapshot_positions("turn_end", superseded=False) == ends[2:]
    assert driver.snapshot_positions("turn_end", superseded=True) == ends[:2]


def test_with_per_request_no_turn_is_superseded_by_the_next() -> None:
    driver = CacheDriver(config=CacheConfig(eviction_policy="lru", reuse_policy="per_request"), num_pages=100)
    known = list(range(20))
    for number in range(4):
        known = driver.turn([*known, 50 + number, 60], [1, 2], "c").token_ids
    assert len(driver.snapshot_positions("turn_end", superseded=False)) == 4
