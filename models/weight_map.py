"""Which checkpoint tensors make up each parameter of a decoder: names and shapes, no tensors.

A parameter is one or more checkpoint tensors joined along a dimension (q, k and v become one matrix at load, so that
a decode step runs one product instead of three), with an optional change of form and factors. Torch-free. The sources
of each mixer are in `mixer_sources.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor of the checkpoint: its name there and the shape it must have.

    `by_group` is (groups, rows of each kind in a group) of a tensor that stores its rows group after group: they are
    put kind after kind, the first kind of all groups first.
    """

    name: str
    shape: tuple[int, ...]
    by_group: tuple[int, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """Parts joined along `dim`, changed, and shaped as the parameter; then rows are multiplied.

    Changes: "drop_dim1" [C, 1, W] -> [C, W]; "negative_exp" a -> -exp(a), "plus_one" a -> 1 + a (both float32).
    `row_factors` are runs
    (rows, factor) that cover the first dimension.
    """

    parts: tuple[TensorPart, ...]
    change: Literal["drop_dim1", "negative_exp", "plus_one"] | None = None
    dim: int = 0
    row_factors: tuple[tuple[int, float], ...] = ()

    def times(self, *runs: tuple[int, float]) -> ParameterSource:
        """The same source with factors on runs of rows; unchanged when all of them are 1."""
        return self if all(factor == 1.0 for _, factor in runs) else replace(self, row_factors=runs)

    def first_by_group(self, groups: tuple[int, tuple[int, ...]] | None) -> ParameterSource:
        """The same source whose first part is stored group after group; unchanged for None."""
        first, *others = self.parts
        return self if groups is None else replace(self, parts=(replace(first, by_group=groups), *others))


Sources = dict[str, ParameterSource]
Alternatives = dict[str, tuple[ParameterSource, ...]]


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All parameters of a decoder. `canonical` turns any accepted spelling of a tensor name into the one in `sources`;
    `alternatives` are other ways to make up a parameter, taken when the checkpoint has all their parts;
    `kept_aside` are prefixes of the draft head's tensors, which have a map of their own, `ignored` suffixes of tensors
    that are derived from others, `other_modalities` prefixes of tensors that text does not pass through."""

    sources: Sources
    canonical: Callable[[str], str]
    kept_aside: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    other_modalities: tuple[str, ...] = ()
    alternatives: Alternatives = field(default_factory=dict)


def one(name: str, *shape: int) -> ParameterSource:
    """A parameter that is stored as it is used."""
    return ParameterSource((TensorPart(name, shape),))


def joined(prefix: str, rows: dict[str, int], suffix: str, *inner: int) -> ParameterSource:
    """Tensors `prefix + key + suffix` of shape [rows, *inner], joined in the order of `rows`."""
    return ParameterSource(tuple(TensorPart(f"{prefix}{key}{suffix}", (count, *inner)) for key, count in rows.items()))
