"""A step may give a request several tokens: each is looked at as if it had come alone."""

from __future__ import annotations

import pytest
from scheduler_builders import make_bench, make_request

from turnkeep.scheduler.drafts import DraftTree
from turnkeep.scheduler.events import Finished, TokenOut
from turnkeep.scheduler.step_plan import SampledToken, StepOutput


@pytest.mark.parametrize(
    ("sampling", "num_kept", "reason"),
    [
        ({"stop_token_ids": (7,)}, 4, "stop"),
        ({"stop_token_ids": (7,), "min_new_tokens": 5}, 5, None),
        ({"stop_token_ids": (7,), "ignore_eos": True}, 5, None),
        ({"stop_token_ids": (5,)}, 2, "stop"),
        ({"max_new_tokens": 3}, 3, "length"),
        ({"max_new_tokens": 5, "stop_token_ids": (8,)}, 5, "stop"),
    ],
)
def test_what_lies_behind_the_end_of_a_request_is_dropped(
    sampling: dict[str, object], num_kept: int, reason: str | None
) -> None:
    bench = make_bench(has_state=False, page_size=16)
    bench.scheduler.submit(make_request("a", 6, **({"max_new_tokens": 20} | sampling)))
    for step in ((4,), (5, 6, 7, 8)):
        plan = bench.scheduler.plan()
        assert plan is not None
        bench.scheduler.apply(plan, StepOutput({"a": tuple(SampledToken(token) for token in step)}, duration_s=0.0))
    events = bench.scheduler.drain_events()
    assert [event.token.token_id for event in events if isinstance(event, TokenOut)] == [4, 5, 6, 7, 8][:num_kept]
    finished = [event for event in events if isinstance(event, Finished)]
    assert [event.reason for event in finished] == ([] if reason is None else [reason])
    stats = bench.scheduler.stats()
    # The last token of a step was sampled, not computed.
    assert (stats.num_generated_tokens, stats.num_computed_tokens) == (num_kept, 6 + num_kept - 1)


def test_the_first_nodes_of_a_tree_are_a_tree() -> None:
    tree = DraftTree((4, 5, 6, 7), (-1, 0, -1, 1), (0.9, 0.8, 0.1, 0.5))
    assert tree.depths() == [1, 2, 1, 3]
    assert tree.first(3) == DraftTree((4, 5, 6), (-1, 0, -1), (0.9, 0.8, 0.1))
    assert tree.first(9) is tree
