"""When drafts are made although they do not seem to pay."""

from __future__ import annotations

from itertools import count

from turnkeep.scheduler.draft_probes import MAX_PROBE_EVERY, MAX_PROBE_STEPS, PROBE_EVERY, PROBE_STEPS, DraftProbes


def steps_to(probes: DraftProbes, *, has_new: bool = False) -> int:
    """Steps without drafts until some are due."""
    return next(number for number in count() if probes.is_due(has_new=has_new))


def finish(probes: DraftProbes) -> int:
    """Its steps after the first."""
    return next(number for number in count() if not probes.is_due(has_new=False))


def test_an_engine_begins_with_a_probe_and_waits_longer_every_time() -> None:
    probes = DraftProbes()
    waits = []
    for _ in range(4):
        waits.append(steps_to(probes))
        assert probes.is_first
        assert finish(probes) == PROBE_STEPS - 1
        assert not probes.is_first
    assert waits == [0, 2 * PROBE_EVERY - 1, MAX_PROBE_EVERY - 1, MAX_PROBE_EVERY - 1]
    probes.reset()
    assert steps_to(probes) == PROBE_EVERY


def test_a_request_that_begins_is_tried_before_its_turn_but_not_every_one() -> None:
    probes = DraftProbes()
    for _ in range(5):
        steps_to(probes)
        finish(probes)
    assert steps_to(probes, has_new=True) == PROBE_EVERY - 1


def test_a_probe_goes_on_while_nothing_is_lost_and_no_longer_than_it_may() -> None:
    probes = DraftProbes()
    num_steps = 0
    while probes.is_due(has_new=False):
        num_steps += 1
        probes.saw(1.01)
    assert num_steps == MAX_PROBE_STEPS
    steps_to(probes)
    probes.saw(1.5)
    assert probes.is_due(has_new=False)
    probes.saw(0.99)
    assert not probes.is_due(has_new=False)
