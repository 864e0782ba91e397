"""The cheapest way to send a message of any size, as one list of straight lines."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from commopt.plan.prices import Floats, Key, PriceTable, Whole

CHUNKING_MUST_SAVE = 0.03
_NO_BUCKET_BYTES = 2.0**50  # where whole numbers still have room in a float


class Cheapest:
    """Minimum over the prices of all strategies, and which one it is.

    Chunks are taken only where they save 3 % of the best time without: the gain is a prediction, the extra messages are
    certain. Equal prices: the strategy that comes first. Exact for every whole number of bytes; looking a size up costs
    one binary search, however many strategies there are.
    """

    def __init__(self, prices: Mapping[Key, PriceTable]) -> None:
        self._keys = sorted(prices, key=lambda key: key[1] > 1)  # those without chunks first, else as given
        self._tables = [prices[key] for key in self._keys]
        self._plain = sum(chunks == 1 for _, chunks in self._keys)
        begins = self._intervals()
        # No two lines cross within an interval: its middle tells which is the lowest everywhere in it.
        ends = np.append(begins[1:] - 1, begins[-1] + 2)
        winner = self._winner((begins + ends) / 2)
        every = np.arange(len(begins))
        at_begin, after = self._times(begins)[winner, every], self._times(ends)[winner, every]
        self._begins, self._winners, self._time_us = begins, winner, at_begin
        self._slope = (after - at_begin) / np.maximum(ends - begins, 1)
        self._slope[-1] = self._tables[winner[-1]].last_slope

    def times_us(self, nbytes: Whole) -> Floats:
        """Return the least time of each of these sizes."""
        place = np.searchsorted(self._begins, nbytes, side="right") - 1
        return self._time_us[place] + self._slope[place] * (nbytes - self._begins[place])

    def key(self, nbytes: int) -> Key:
        """Return the strategy and the chunks that take the least time."""
        place = int(np.searchsorted(self._begins, nbytes, side="right")) - 1
        return self._keys[int(self._winners[place])]

    def _times(self, nbytes: Whole | Floats) -> Floats:
        return np.array([table.times_us(nbytes) for table in self._tables])  # type: ignore[arg-type]

    def _winner(self, nbytes: Floats) -> Whole:
        times = self._times(nbytes)
        best: Whole = np.argmin(times[: self._plain], axis=0)
        if self._plain < len(self._keys):
            chunked = self._plain + np.argmin(times[self._plain :], axis=0)
            every = np.arange(len(nbytes))
            pays = times[chunked, every] <= (1 - CHUNKING_MUST_SAVE) * times[best, every]
            best = np.where(pays, chunked, best)
        return best

    def _intervals(self) -> Whole:
        """Return the sizes at which intervals begin in which no line bends, and no two that matter cross."""
        bends = np.unique([0, *(size for table in self._tables for size in table.nbytes)])
        left = self._times(bends)
        slopes = np.empty_like(left)
        slopes[:, :-1] = np.diff(left, axis=1) / np.diff(bends)
        slopes[:, -1] = [table.last_slope for table in self._tables]
        widths = np.append(np.diff(bends), np.inf)
        begins = [bends]
        for one in range(len(self._keys)):
            for other in range(one + 1, len(self._keys)):
                alike = (one < self._plain) == (other < self._plain)
                share = 1.0 if alike else 1.0 - CHUNKING_MUST_SAVE
                gap, closing = share * left[one] - left[other], slopes[other] - share * slopes[one]
                with np.errstate(over="ignore"):  # lines almost parallel cross at infinity
                    offset = np.divide(gap, closing, out=np.full_like(gap, -1.0), where=closing != 0)
                inside = (offset > 0) & (offset < np.minimum(widths, _NO_BUCKET_BYTES))
                begins.append(np.ceil(bends[inside] + offset[inside]).astype(np.int64))
        return np.unique(np.concatenate(begins)).astype(np.int64)
