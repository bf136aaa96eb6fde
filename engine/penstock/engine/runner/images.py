"""Embeddings of images, and the rows whose prompts hold them. Changes only by what a plan says."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32, StepPlan, ints
from penstock.engine.models.model import Encoding, Model, VisionModel
from penstock.engine.multimodal.normalization import normalized
from penstock.engine.multimodal.pixels import Pixels
from penstock.engine.multimodal.settings import ImageSettings
from penstock.engine.runner.memory_profile import PeakMemory
from penstock.prompt.hashing import PromptItem


class _Part(NamedTuple):
    """What a step's tokens have of an image."""

    at: int
    """Index of the row in the step."""
    item: PromptItem
    offset: int
    """First embedding that the step needs."""
    place: slice
    """Where they go among the step's tokens."""


class _Run:
    """A run through the tower, which may be divided among steps."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding, self._done = encoding, 0.0

    def advance(self, part: float) -> torch.Tensor | None:
        """Goes on until this part of the layers is done; the embeddings at the end."""
        while self._done < part:
            try:
                self._done = next(self._encoding)
            except StopIteration as ended:
                return ended.value
        return None


def whole(encoding: Encoding) -> torch.Tensor:
    """The embeddings of a run that is not divided."""
    found = _Run(encoding).advance(1.0)
    assert found is not None, "a run ends where all its layers are done"
    return found


def _widened(embeddings: torch.Tensor, width: int) -> torch.Tensor:
    """[n, hidden] → [n, width]: nothing is added to text after the first layers."""
    if width == embeddings.shape[1]:
        return embeddings
    wide = embeddings.new_zeros(len(embeddings), width)
    wide[:, : embeddings.shape[1]] = embeddings
    return wide


class Images:
    """What a rank keeps of images for one model.

    Args:
        settings: How the model reads them; None: it reads none.
        model: Returns the model, once it is there.
        encodes: Whether its tower is here: later stages of a pipeline know where images are, and have no embeddings.
    """

    def __init__(self, settings: ImageSettings | None, model: Callable[[], Model], *, encodes: bool = True) -> None:
        self._settings, self._model, self._encodes = settings, model, encodes
        self._two_way = settings is not None and settings.two_way
        self._under_way: dict[str, _Run] = {}
        self._embeddings: dict[str, torch.Tensor] = {}
        self._items: dict[int, tuple[PromptItem, ...]] = {}

    @property
    def names(self) -> set[str]:
        """Images whose embeddings are there."""
        return set(self._embeddings)

    def take_in(self, plan: StepPlan) -> None:
        """Rows and embeddings that go, and rows that come."""
        for name in plan.encoder_frees:
            self._embeddings.pop(name, None)
            self._under_way.pop(name, None)
        if self._items:
            for row in ints(plan.released):
                self._items.pop(row, None)
        for admission in plan.admissions:
            if admission.items:
                self._items[admission.row] = admission.items

    def encoding(self, pixels: Pixels) -> Encoding:
        """An image's run through the tower."""
        assert self._settings is not None, "an image for a model that reads text alone"
        image = torch.from_numpy(normalized(pixels.array(), self._settings.normalization))
        return cast("VisionModel", self._model()).encode_image(image, pixels.original)

    @torch.inference_mode()
    def blank(self) -> torch.Tensor | None:
        """The embeddings of a black image; None: the model reads no images here."""
        return None if self._settings is None or not self._encodes else whole(self.encoding(self._settings.sample()))

    def bytes(self, kept: int) -> int:
        """What the tower takes for an image, and so many embeddings that are kept."""
        with PeakMemory() as memory:
            found = self.blank()
        if found is None or self._settings is None:
            return 0
        # A layer's memory grows with the patches, and the largest image may take minutes.
        times = max(1.0, self._settings.tokens / len(found))
        return int(memory.peak * times) + found[0].nbytes * kept

    def encode(self, plan: StepPlan) -> None:
        """Makes the embeddings that the plan asks for, an image at a time: its numbers do not depend on others."""
        for run in plan.encoder_runs if self._encodes else ():
            if run.pixels is not None:
                self._under_way[run.identifier] = _Run(self.encoding(run.pixels))
            under_way = self._under_way.pop(run.identifier, None)
            if under_way is None:  # the step in which it began came to nothing; rows that need it will say so
                continue
            found = under_way.advance(run.done / run.work)
            if found is None:
                self._under_way[run.identifier] = under_way
            else:
                self._embeddings[run.identifier] = found

    def merge(
        self, rows: Int32, starts: Int32, counts: Int32, embed: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor | None, dict[int, str]]:
        """The step's embeddings, those of images among them.

        Args:
            rows: [r]: a step's.
            starts: [r]: the position of each row's first token.
            counts: [r]: its tokens in the step.
            embed: Embeds the step's tokens, [n, hidden].

        Returns:
            What `Model.forward` takes in place of tokens, or None where no token is an image's; and why rows, as indexes into
            `rows`, cannot be computed.
        """
        merged, failed = None, dict[int, str]()
        for at, item, offset, place in self._parts(rows, starts, counts) if self._encodes else ():
            found = self._embeddings.get(item.identifier)
            if found is None or len(found) != item.length:
                there = "none are there" if found is None else f"it has {len(found)}"
                failed[at] = f"the image at token {item.start} needs {item.length} embeddings, and {there}"
                continue
            merged = _widened(embed(), found.shape[1]) if merged is None else merged
            merged[place] = found[offset : offset + place.stop - place.start]
        return merged, failed

    def ends(self, rows: Int32, starts: Int32, counts: Int32) -> Int32 | None:
        """The position after the last token that each of the step's tokens sees; arguments as of `merge`.

        Returns:
            [n], or None where each sees up to itself.
        """
        ends = None
        for at, item, offset, place in self._parts(rows, starts, counts) if self._two_way else ():
            if ends is None:
                ends = np.arange(1, counts.sum() + 1, dtype=np.int32)
                ends += np.repeat(starts + counts - np.cumsum(counts), counts)
            assert offset + place.stop - place.start == item.length, f"a chunk of row {at} cuts the image at {item.start}"
            ends[place] = item.start + item.length
        return ends

    def following(
        self,
        rows: Int32,
        starts: Int32,
        counts: Int32,
        embed: Callable[[], torch.Tensor],
        passed: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """What a draft head reads: the embedding after each token.

        Args:
            rows: [r]: a step's.
            starts: [r]: the position of each row's first token.
            counts: [r]: its tokens in the step.
            embed: Embeds the tokens after the step's, [n, hidden].
            passed: What this returned in the first stage of a pipeline, whose embeddings are not here; None: they may be.

        Returns:
            [n, hidden] in place of tokens, or None where none of them is an image's whose embeddings are there.
        """
        merged = None
        for _, item, offset, place in self._parts(rows, starts + np.int32(1), counts):
            if passed is not None:
                found = passed[place]
            elif (of_image := self._embeddings.get(item.identifier)) is not None:
                found = of_image[offset : offset + place.stop - place.start]
            else:
                continue
            merged = embed().clone() if merged is None else merged
            # What DeepStack adds to the decoder's first layers comes after the embedding.
            merged[place] = found[:, : merged.shape[1]]
        return merged

    def reached(self, rows: Int32, starts: Int32, counts: Int32) -> Bool:
        """[r]: which rows have a token of an image among these; arguments as of `merge`."""
        found = np.zeros(len(rows), np.bool_)
        found[[part.at for part in self._parts(rows, starts, counts)]] = True
        return found

    def _parts(self, rows: Int32, starts: Int32, counts: Int32) -> Iterator[_Part]:
        if not self._items:
            return
        first = 0
        for at, (row, start, count) in enumerate(zip(ints(rows), ints(starts), ints(counts), strict=True)):
            for item in self._items.get(row, ()):
                begin, end = max(item.start, start), min(item.start + item.length, start + count)
                if begin < end:
                    yield _Part(at, item, begin - item.start, slice(first + begin - start, first + end - start))
            first += count

    def forget(self) -> None:
        """Drops all embeddings, and runs that are under way."""
        self._embeddings.clear()
        self._under_way.clear()

    def reset(self) -> None:
        """No row has a request, and nothing is kept."""
        self.forget()
        self._items.clear()
