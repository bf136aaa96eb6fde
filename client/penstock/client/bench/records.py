"""What is known of one request: when each of its tokens came.

Pure: stamps come from the caller, in seconds on any one clock.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.client.stream import Chunk


@dataclass(slots=True)
class Record:
    """One request and its answer. Times are seconds since the run began."""

    sent: float
    due: float
    """When it was to be sent; what `sent` is later is the client's doing."""
    stamps: list[float] = field(default_factory=list[float])
    """Arrival of each chunk that brought tokens."""
    tokens: list[int] = field(default_factory=list[int])
    """How many each of them brought; at least 1."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens from the server's prefix cache, where it says so."""
    counted: bool = True
    """Whether the server counted the tokens (`usage`); otherwise each chunk with text is taken for one."""
    error: str | None = None
    """The kind of error; None: the answer is complete."""
    message: str = ""

    @property
    def output_tokens(self) -> int:
        """N."""
        return sum(self.tokens)

    @property
    def ttft(self) -> float:
        """Time to the first token, s. Of complete answers only, as all that follow."""
        return self.stamps[0] - self.sent

    @property
    def e2el(self) -> float:
        """End-to-end latency: time to the last token, s."""
        return self.stamps[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first, s; None for an answer of one token."""
        return (self.stamps[-1] - self.stamps[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def itls(self) -> list[float]:
        """The N - 1 inter-token latencies, s. Tokens that came together share the gap before them evenly; those that came with
        the first token have none."""
        samples = [0.0] * (self.tokens[0] - 1)
        for gap, count in zip(self.icls(), self.tokens[1:], strict=True):
            samples += [gap / count] * count
        return samples

    def icls(self) -> list[float]:
        """Inter-chunk latencies, s: what a reader sees, whatever a chunk holds."""
        return [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]


class Recorder:
    """Makes a `Record` of a stream's chunks.

    Args:
        sent: When the request is sent.
        due: When it was to be sent.
    """

    def __init__(self, sent: float, due: float) -> None:
        self._record = Record(sent, due)
        self._stamps: list[float] = []
        self._characters: list[int] = []
        self._totals: list[int | None] = []  # completion_tokens so far, from servers that say it in each chunk
        self._finished = False
        self._output_tokens: int | None = None

    def add(self, stamp: float, chunk: Chunk) -> None:
        """Takes a chunk that arrived at `stamp`."""
        if chunk.usage is not None:
            self._output_tokens = chunk.usage.completion_tokens
            self._record.prompt_tokens = chunk.usage.prompt_tokens
            if details := chunk.usage.prompt_tokens_details:
                self._record.cached_tokens = details.cached_tokens
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        ends = choice.finish_reason is not None
        characters = choice.characters
        if characters or ends or chunk.usage is not None:  # not the opening chunk of a chat, which holds the role alone
            self._stamps.append(stamp)
            self._characters.append(characters)
            self._totals.append(chunk.usage.completion_tokens if chunk.usage is not None else None)
        self._finished |= ends

    def complete(self) -> Record:
        """The record at the end of the stream; an error if no choice came to its end or brought no token."""
        if not self._finished:
            return self.fail("cut off", "the stream ended before the answer did")
        counts = self._counts()
        self._record.counted = self._output_tokens is not None
        for stamp, count in zip(self._stamps, counts, strict=True):
            if count:
                self._record.stamps.append(stamp)
                self._record.tokens.append(count)
        if not self._record.tokens:
            return self.fail("no tokens", "the answer holds no token")
        return self._record

    def fail(self, kind: str, message: str) -> Record:
        """The record of a request that came to nothing."""
        self._record.error, self._record.message = kind, message
        return self._record

    def _counts(self) -> list[int]:
        totals = [total for total in self._totals if total is not None]
        if totals and len(totals) == len(self._totals):
            return [after - before for before, after in zip([0, *totals], totals, strict=False)]
        if self._output_tokens is None:
            return [int(count > 0) for count in self._characters]
        return share_tokens(self._output_tokens, self._characters)


def share_tokens(total: int, characters: Sequence[int]) -> list[int]:
    """How many of `total` tokens each chunk brought, from the lengths of their texts.

    A chunk with text brings at least one. One more token than that belongs to a closing chunk without text: the end-of-sequence
    token. What remains came several in a chunk and is shared in proportion to the text. Fewer tokens than chunks: the shortest
    texts were parts of a token, never the first.
    """
    if total <= 0 or not characters:
        return [0] * len(characters)
    counts = [int(length > 0) for length in characters]
    if not counts[-1] and total > sum(counts):
        counts[-1] = 1
    surplus = total - sum(counts)
    if surplus < 0:
        later = [at for at, count in enumerate(counts) if count][1:]
        for at in sorted(later, key=lambda at: characters[at])[:-surplus]:
            counts[at] = 0
    elif surplus > 0 and any(characters):
        # Each to the chunk with the most text a token, as seats are given to parties (D'Hondt).
        ahead = [(-length / (counts[at] + 1), at) for at, length in enumerate(characters) if length]
        heapq.heapify(ahead)
        for _ in range(surplus):
            at = ahead[0][1]
            counts[at] += 1
            heapq.heapreplace(ahead, (-characters[at] / (counts[at] + 1), at))
    elif surplus > 0:
        counts[-1] += surplus  # no text at all: tokens that are none
    return counts
