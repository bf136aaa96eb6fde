"""Positions in time, row and column for models that rotate by all three (M-RoPE).

The tokens of an image share a time, and count rows and columns from there. The text after it goes on behind the longer of both,
not behind the number of tokens. So text has one position for all three, and that lags behind the token's place in the prompt.
"""

from typing import NamedTuple

import numpy as np

from penstock.engine.core.plan import Admission, Int32, Int64, StepPlan, ints


class _Image(NamedTuple):
    """Where an image lies in its prompt."""

    start: int
    end: int
    columns: int
    advance: int
    """Positions that the text after it is further than the image's first token."""


class ImagePositions:
    """Of the rows of one rank. Changes only by what a plan says.

    Args:
        max_num_seqs: Rows.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._lags = np.zeros(max_num_seqs, np.int64)
        self._images: dict[int, list[_Image]] = {}

    def take_in(self, plan: StepPlan) -> None:
        """Rows that go, and rows that come."""
        if self._images:
            for row in ints(plan.released):
                self._lags[row] = 0
                self._images.pop(row, None)
        for admission in plan.admissions:
            if admission.grids:
                self._admit(admission)

    def _admit(self, admission: Admission) -> None:
        images = [
            _Image(item.start, item.start + item.length, columns, max(rows, columns))
            for item, (rows, columns) in zip(admission.items, admission.grids, strict=True)
        ]
        self._images[admission.row] = images
        self._lags[admission.row] = sum(image.advance - (image.end - image.start) for image in images)

    def apply(self, rows: Int32, starts: Int32, counts: Int32, positions: Int64) -> Int64 | None:
        """Makes positions out of places.

        Args:
            rows: [r]: a step's.
            starts: [r]: the place of each row's first token.
            counts: [r]: its tokens in the step.
            positions: [n]: the tokens' places in their requests; becomes their positions in time.

        Returns:
            [3, n], or None where all three are the same.
        """
        if not self._images:
            return None
        found = None
        positions += np.repeat(self._lags[rows], counts)
        ends = np.cumsum(counts)
        for row, start, count, end in zip(ints(rows), ints(starts), ints(counts), ints(ends), strict=True):
            images = self._images.get(row)
            if images is None or start >= images[-1].end:
                continue
            own = self._within(images, start, count)
            positions[end - count : end] = own[0]
            if any(image.start < start + count and start < image.end for image in images):
                found = [] if found is None else found
                found.append((slice(end - count, end), own))
        if found is None:
            return None
        three = np.repeat(positions[None], 3, 0)
        for place, own in found:
            three[:, place] = own
        return three

    def reset(self) -> None:
        """No row has a request."""
        self._lags[:] = 0
        self._images.clear()

    @staticmethod
    def _within(images: list[_Image], start: int, count: int) -> Int64:
        """[3, count]: of a row's tokens from `start` on."""
        places = np.arange(start, start + count)
        found, lag = np.repeat(places[None], 3, 0), 0
        for image in images:
            inside = (places >= image.start) & (places < image.end)
            rows, columns = np.divmod(places[inside] - image.start, image.columns)
            found[:, inside] = image.start + lag + np.stack((np.zeros_like(rows), rows, columns))
            change = image.advance - (image.end - image.start)
            found[:, places >= image.end] += change
            lag += change
        return found
