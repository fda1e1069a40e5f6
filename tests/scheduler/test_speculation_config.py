"""Limits of draft trees: what is filled in, what has no effect, what contradicts itself."""

from __future__ import annotations

import pytest

from turnkeep.scheduler.speculation_config import (
    DEFAULT_MAX_DRAFT_LEN,
    SpeculationConfig,
    SpeculationConfigError,
    resolve_speculation,
)


def test_without_settings_the_limits_are_the_defaults_and_there_is_nothing_to_notice() -> None:
    assert resolve_speculation() == (SpeculationConfig(), ())


def test_a_missing_total_is_filled_in_with_the_largest_tree_and_a_notice() -> None:
    config, notices = resolve_speculation(max_draft_len=3, dynamic_tree_max_topk=4)
    assert config == SpeculationConfig(3, 4, 12)
    assert config.max_step_width == 13
    assert "max_total_draft_tokens is 12" in notices[0]


@pytest.mark.parametrize("total", [3, 7, 12])
def test_a_total_between_a_chain_and_the_largest_tree_is_taken(total: int) -> None:
    assert resolve_speculation(3, 4, total) == (SpeculationConfig(3, 4, total), ())


@pytest.mark.parametrize(
    ("length", "width", "total", "message"),
    [
        (0, 2, 4, "max_draft_len must be at least 1, not 0"),
        (-1, None, None, "max_draft_len must be at least 1, not -1"),
        (3, 0, None, "dynamic_tree_max_topk must be at least 1, not 0"),
        (3, 4, 2, r"between max_draft_len \(3\) and .* \(12\), not be 2"),
        (3, 4, 13, r"between max_draft_len \(3\) and .* \(12\), not be 13"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_numbers(
    length: int, width: int | None, total: int | None, message: str
) -> None:
    with pytest.raises(SpeculationConfigError, match=message):
        resolve_speculation(length, width, total)


def test_a_linear_draft_has_as_many_nodes_as_levels_and_a_width_has_no_effect() -> None:
    assert resolve_speculation(5, use_dynamic_tree=False) == (SpeculationConfig(5, 1, 5), ())
    config, notices = resolve_speculation(dynamic_tree_max_topk=4, use_dynamic_tree=False)
    assert config == SpeculationConfig(DEFAULT_MAX_DRAFT_LEN, 1, DEFAULT_MAX_DRAFT_LEN)
    assert "no effect" in notices[0]
    with pytest.raises(SpeculationConfigError, match=r"is max_draft_len \(5\), not 6"):
        resolve_speculation(5, None, 6, use_dynamic_tree=False)
