"""Drafting for a step or two where it does not seem to pay, to see whether that is still so."""

from __future__ import annotations

PROBE_EVERY, MAX_PROBE_EVERY = 128, 512  # steps without drafts before some are made; twice as many every time
PROBE_STEPS, MAX_PROBE_STEPS = 2, 6


class DraftProbes:
    """Nothing is known at first, so an engine begins with a probe. A request that begins may bring other text: it is
    tried before its turn would come, though no more than once in PROBE_EVERY steps."""

    def __init__(self) -> None:
        self._every = PROBE_EVERY
        self._num_steps = PROBE_EVERY  # without drafts
        self._num_probed = MAX_PROBE_STEPS  # steps of the probe
        self._num_left = 0  # of its steps

    @property
    def num_steps(self) -> int:
        """Steps since the last drafts."""
        return self._num_steps

    def is_due(self, *, has_new: bool) -> bool:
        """For a step for which drafting does not seem to pay: whether to draft all the same. has_new: some request has
        no token of its own yet."""
        if self._num_left == 0:
            self._num_steps += 1
            if self._num_steps <= (PROBE_EVERY if has_new else self._every):
                return False
            self._num_left, self._num_probed, self._num_steps = PROBE_STEPS, 0, 0
            self._every = min(2 * self._every, MAX_PROBE_EVERY)
        self._num_left -= 1
        self._num_probed += 1
        return True

    @property
    def is_first(self) -> bool:
        """The probe has just begun."""
        return self._num_probed <= 1

    def saw(self, speedup: float) -> None:
        """A step of it, which was followed by another, gave so many tokens a second, in those of plain steps: as long
        as nothing is lost it goes on, since it takes some to tell."""
        if speedup >= 1.0 and self._num_left == 0 and self._num_probed < MAX_PROBE_STEPS:
            self._num_left = 1

    def reset(self) -> None:
        """Drafting pays."""
        self._every, self._num_steps, self._num_left, self._num_probed = PROBE_EVERY, 0, 0, MAX_PROBE_STEPS
