"""Where a request's last tokens stood before: runs of a few tokens by their places, in constant time for each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RUN = 3  # tokens that must agree for a place to be looked at
MAX_LOOKED_AT = 16  # places of one run, the latest first
MAX_AGREEING = 32  # tokens that are compared
_BITS = 21  # of a token id in a key: three fill an int64


class TokenIndex:
    """Grows at its end only. A place is the position of a run's last token."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._latest: dict[int, int] = {}  # run -> its last place
        self._earlier: list[int] = []  # of the run that ends at a position: its place before that, or -1

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens: a prompt at once, what is generated one by one."""
        if not self.token_ids and len(token_ids) > RUN:
            self._fill(token_ids)
            return
        tokens = self.token_ids
        for token_id in token_ids:
            place = len(tokens)
            tokens.append(token_id)
            if place < RUN - 1:
                self._earlier.append(-1)
                continue
            key = (tokens[place - 2] << 2 * _BITS) | (tokens[place - 1] << _BITS) | token_id
            self._earlier.append(self._latest.get(key, -1))
            self._latest[key] = place

    def _fill(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        ids = np.array(self.token_ids, dtype=np.int64)
        keys = (ids[:-2] << 2 * _BITS) | (ids[1:-1] << _BITS) | ids[2:]
        order = np.argsort(keys, kind="stable")  # places of one run stand together, in their order
        is_same = keys[order[1:]] == keys[order[:-1]]
        earlier = np.full(len(ids), -1, dtype=np.int64)
        earlier[order[1:][is_same] + RUN - 1] = order[:-1][is_same] + RUN - 1
        self._earlier = earlier.tolist()
        self._latest = dict(zip(keys.tolist(), range(RUN - 1, len(ids)), strict=True))  # the last of equals stays

    def matches(self) -> list[tuple[int, int]]:
        """Earlier places of the last run, the latest first, and how many tokens up to each agree with the last ones."""
        tokens = self.token_ids
        found: list[tuple[int, int]] = []
        last = len(tokens) - 1
        place = self._earlier[last] if tokens else -1
        while place >= 0 and len(found) < MAX_LOOKED_AT:
            length = RUN
            while length < MAX_AGREEING and length <= place and tokens[place - length] == tokens[last - length]:
                length += 1
            found.append((place, length))
            place = self._earlier[place]
        return found
