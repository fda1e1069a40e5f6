"""The conservation check itself: each kind of damage is found and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_driver import CacheDriver, Run


def damage_page_reference(driver: CacheDriver, run: Run) -> None:
    driver.cache._pages.retain(int(run.seq.page_ids[0]))


def damage_page_freed_early(driver: CacheDriver, run: Run) -> None:
    driver.cache._pages.release(int(run.seq.page_ids[-1]))


def damage_row_reference(driver: CacheDriver, run: Run) -> None:
    assert run.seq.state_row is not None
    driver.cache._rows.retain(run.seq.state_row)


def damage_row_with_two_owners(driver: CacheDriver, run: Run) -> None:
    snapshot = next(iter(driver.cache._reclaimer.snapshots))
    assert run.seq.state_row is not None
    driver.cache._rows.release(snapshot.row)
    snapshot.row = run.seq.state_row


def damage_pin(driver: CacheDriver, run: Run) -> None:
    run.seq.path.num_pins += 1


def damage_snapshot_pin(driver: CacheDriver, run: Run) -> None:
    assert run.seq.resumed_from is not None
    run.seq.resumed_from.num_pins += 1


def damage_table(driver: CacheDriver, run: Run) -> None:
    run.seq.table[[0, 1]] = run.seq.table[[1, 0]]


def damage_lengths(driver: CacheDriver, run: Run) -> None:
    run.seq.num_computed_tokens = run.seq.capacity_tokens + 1


def damage_index(driver: CacheDriver, run: Run) -> None:
    snapshot = next(iter(driver.cache._reclaimer.snapshots))
    assert snapshot.node.parent is not None
    snapshot.node.parent.suffixes.clear()


def damage_order(driver: CacheDriver, run: Run) -> None:
    driver.cache._tree.roots[""].order.append(b"")


def damage_passage(driver: CacheDriver, run: Run) -> None:
    run.seq.path.passable = run.seq.path.parent


def damage_count(driver: CacheDriver, run: Run) -> None:
    driver.cache._tree.num_nodes += 1


def damage_keeper(driver: CacheDriver, run: Run) -> None:
    next(snapshot for snapshot in driver.cache._reclaimer.snapshots if snapshot.keepers).keepers.clear()


def damage_policy(driver: CacheDriver, run: Run) -> None:
    snapshot = next(snapshot for snapshot in driver.cache._reclaimer.snapshots if not snapshot.num_pins)
    driver.cache._reclaimer._policy.removed(snapshot)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_page_reference, "references and"),
        (damage_passage, "wrong about what is below it"),
        (damage_page_freed_early, "references and"),
        (damage_row_reference, "references and"),
        (damage_row_with_two_owners, "two owners"),
        (damage_pin, "pins, not"),
        (damage_snapshot_pin, "pins"),
        (damage_table, "page table differs"),
        (damage_lengths, "out of order"),
        (damage_index, "can be found"),
        (damage_order, "out of order"),
        (damage_count, "nodes counted"),
        (damage_keeper, "keeper"),
        (damage_policy, "the policy knows"),
    ],
)
def test_damage_is_found(damage: Callable[[CacheDriver, Run], None], message: str) -> None:
    driver = CacheDriver()
    known = driver.turn(list(range(20)), [1, 2], "c", turn_start=18).token_ids
    run = driver.open([*known, *range(50, 60)], "c")
    assert run is not None
    assert driver.step(run)
    driver.publish(run)
    driver.cache.check()
    damage(driver, run)
    with pytest.raises(AssertionError, match=message):
        driver.cache.check()
