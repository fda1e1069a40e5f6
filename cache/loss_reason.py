"""Why tokens that were computed before are computed again, in one word for reports and metrics.

no_snapshot: their pages are there, no snapshot is. capacity: a snapshot found no row, or the match no room. evicted:
it was there and had to go. tier: a colder tier had it and could not bring it in time.
"""

from __future__ import annotations

from typing import Literal

LossReason = Literal["none", "no_snapshot", "capacity", "evicted", "tier"]
