"""When a tower runs: in the step whose chunk reaches an image, once for equal images, under a budget of its own.

A run that exceeds a step's whole budget is divided among steps. It goes on whatever becomes of the request that needed it first.
A chunk never reaches into an image whose embeddings are not there: where the budget or the cache has no room for it, the chunk
ends before it. Where the tokens of an image see each other both ways, a chunk has all that are not computed yet, or none. Nothing
is taken before the chunk has its KV blocks, so that a chunk which is not granted leaves no trace.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from penstock.engine.core.scheduling.images.encoder_cache import EncoderCache
from penstock.engine.core.scheduling.request import Request
from penstock.engine.multimodal.inputs import EncoderRun, ImageInput
from penstock.engine.stats import EncoderStats

_ITSELF: Final = -1
"""What holds the entry of a run that is under way: no request's index."""


class Reach(NamedTuple):
    """How far a chunk gets, and with which images."""

    end: int
    """Position after its last token."""
    there: list[ImageInput]
    """Images whose embeddings the runner has."""
    missing: list[ImageInput]
    """Images whose embeddings the step makes."""
    begun: ImageInput | None = None
    """An image at the end of the chunk, whose run may begin and needs several steps."""


class _Run:
    """A run that needs several steps."""

    def __init__(self, image: ImageInput) -> None:
        self.image, self.done = image, 0

    @property
    def is_over(self) -> bool:
        """Whether the step that is being planned completes it, or did."""
        return self.done == self.image.work


class Encoder:
    """The tower as the scheduler sees it.

    Args:
        budget: Work of a step at most; see `ImageInput.work`.
        cache: What the runner holds.
        whole: Whether a chunk has all tokens of an image or none.
        ahead: Tokens after a chunk whose images it needs too, since a draft head reads the token after each.
    """

    def __init__(self, budget: int, cache: EncoderCache, *, whole: bool = False, ahead: int = 0) -> None:
        self._budget, self._cache, self._whole, self._ahead = budget, cache, whole, ahead
        self._left = budget
        self._runs: dict[str, EncoderRun] = {}
        self._under_way: dict[str, _Run] = {}
        self._unclaimed: set[str] = set()
        """Images with a divided run that no request has taken yet."""
        self._reached: dict[int, int] = {}
        self._requests: dict[int, Request] = {}
        self.seconds = 0.0
        """That the tower took, since the start."""
        self.num_runs = self.num_hits = self.num_embeddings = 0
        """Images that were encoded, images that were there already, and embeddings that were made, since the start."""

    @property
    def cache(self) -> EncoderCache:
        """What the runner holds."""
        return self._cache

    def stats(self, requests: Iterable[tuple[Request, int]]) -> EncoderStats | None:
        """What became of images; None: there can be none.

        Args:
            requests: Those that have not ended, each with its computed tokens.
        """
        cache = self._cache
        if not cache.size:
            return None
        counts = self.num_runs, self.num_hits, self.num_embeddings
        images = [image for request, computed in requests for image in request.images if image.end > computed]
        waiting = {image.item.identifier for image in images if image.item.identifier not in cache}
        return EncoderStats(*counts, self.seconds, cache.size, cache.used, cache.held, len(waiting))

    @property
    def is_busy(self) -> bool:
        """Whether a run needs further steps."""
        return bool(self._under_way)

    @property
    def rows(self) -> list[int]:
        """Rows whose images are not all computed."""
        return list(self._requests)

    def problem(self, request: Request) -> str | None:
        """Why a request's images can never be computed; None: they can."""
        end, most = 0, self._cache.size
        for image in request.images:
            if image.item.start < end or image.item.length < 1 or image.end > request.num_prompt_tokens:
                return f"the image at token {image.item.start} overlaps another one or the end of the prompt"
            if image.item.length > most:
                return f"an image of {image.item.length} embeddings does not fit: the engine keeps at most {most}"
            end = image.end
        return None

    def begin(self) -> None:
        """A new step is planned: runs that are under way come first."""
        self._left = self._budget
        for run in self._under_way.values():
            self._advance(run)

    def reach(self, request: Request, start: int, end: int) -> Reach:
        """How far a chunk of a request's tokens from `start` to `end` gets; `start` itself where it must wait."""
        there: list[ImageInput] = []
        missing: dict[str, ImageInput] = {}
        length = work = before = last = 0
        for image in request.images:
            name = image.item.identifier
            before, last = last, image.end
            if image.end <= start:
                continue
            if self._whole and image.item.start < end < image.end:
                end = max(start, image.item.start)
            if image.item.start - self._ahead >= end:
                break
            if name in missing:
                continue
            run = self._under_way.get(name)
            found = name in self._cache
            kept = [*there, image] if found else there
            needed = length if found else length + image.item.length
            # An image that is there may keep the room that one before it was to get.
            fits = needed <= self._cache.room(one.item.identifier for one in kept)
            divided = not found and image.work > self._budget
            if not fits or divided or (run is not None and not run.is_over) or (not found and work + image.work > self._left):
                begun = image if fits and divided else None
                # Where images touch, a request would hold one while it waits for the next one, and two such might wait for ever.
                stop = image.item.start - (self._ahead if before < image.item.start else 0)
                return Reach(max(start, stop), there, list(missing.values()), begun)
            there, length = kept, needed
            if not found:
                work += image.work
                missing[name] = image
        return Reach(end, there, list(missing.values()))

    def take(self, request: Request, reach: Reach) -> None:
        """A chunk is granted: its request holds the images until it is beyond them."""
        for image in reach.there:
            name = image.item.identifier
            is_new = self._cache.hold(name, request.index)
            # Who takes what a divided run has made first is the one that it ran for.
            self.num_hits += is_new and name not in self._unclaimed
            self._unclaimed.discard(name)
        for image in reach.missing:
            name, length, work = image.item.identifier, image.item.length, image.work
            self._cache.add(name, length, request.index)
            self._runs[name] = EncoderRun(name, image.pixels, work, work)
            self._left -= work
            self._count(image)
        self.start(reach)
        self._reached[request.row] = reach.end
        self._requests[request.row] = request

    def start(self, reach: Reach) -> None:
        """Begins a run that needs several steps, if one may begin and the step has work left for it."""
        if reach.begun is None or not self._left:
            return
        item = reach.begun.item
        run = self._under_way[item.identifier] = _Run(reach.begun)
        self._cache.add(item.identifier, item.length, _ITSELF)
        self._unclaimed.add(item.identifier)
        self._advance(run)

    def _advance(self, run: _Run) -> None:
        part = min(self._left, run.image.work - run.done)
        if not part:
            return
        name, pixels = run.image.item.identifier, None if run.done else run.image.pixels
        run.done += part
        self._left -= part
        self._runs[name] = EncoderRun(name, pixels, run.done, run.image.work)
        if run.is_over:
            self._count(run.image)

    def _count(self, image: ImageInput) -> None:
        self.num_embeddings += image.item.length
        self.num_runs += 1

    def left(self, request: Request) -> None:
        """A request loses its row."""
        self._reached.pop(request.row, None)
        self._requests.pop(request.row, None)
        for image in request.images:
            self._cache.release(image.item.identifier, request.index)

    def take_plan(self) -> tuple[list[EncoderRun], list[str]]:
        """What the next plan makes, and what it drops before. From then on its rows need no image that they are beyond."""
        for row, end in self._reached.items():
            request = self._requests[row]
            # A prompt may hold an image twice, and be within the second one.
            within = {image.item.identifier for image in request.images if image.item.start < end < image.end}
            for image in request.images:
                if image.end <= end and image.item.identifier not in within:
                    self._cache.release(image.item.identifier, request.index)
            if request.images[-1].end <= end:
                del self._requests[row]
        self._reached.clear()
        # One may be gone again: its request lost its row in this step, and another one took the room.
        runs = [run for name, run in self._runs.items() if name in self._cache]
        self._runs = {}
        for name in [name for name, run in self._under_way.items() if run.is_over]:
            del self._under_way[name]
            self._cache.release(name, _ITSELF)
        return runs, self._cache.take_evicted()

    def failed(self, runs: Iterable[EncoderRun]) -> None:
        """A step came to nothing: what it was to make may not be there."""
        for run in runs:
            self._under_way.pop(run.identifier, None)
        self._cache.forget(run.identifier for run in runs)

    def clear(self) -> None:
        """The runner has dropped everything."""
        self._under_way.clear()
        self._unclaimed.clear()
        self._cache.clear()
