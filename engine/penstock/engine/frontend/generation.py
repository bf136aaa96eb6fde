"""A client's request while it is generated: its choices, and what of them has not been sent yet.

There is no queue of chunks: what a slow client has not taken is merged into one delta, so that it can neither stall the others
nor hold more than the request's own output.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from penstock.engine.core.plan import Float32
from penstock.engine.frontend.detokenizer import Detokenizer
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.stop import StopBuffer
from penstock.engine.messages import Lent, LifecycleEvent


class TokenLogprob(NamedTuple):
    """One generated token with its logprob and the likeliest alternatives (natural logarithm)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    text_offset: int
    """Characters generated before this token."""
    rank: int
    """0 for the likeliest."""


class PromptLogprob(NamedTuple):
    """A token of the prompt, given those before it, with the likeliest ones in its place (natural logarithm)."""

    token_id: int
    logprob: float
    rank: int
    """0 for the likeliest."""
    top: list[tuple[int, float]]


class Delta(msgspec.Struct, frozen=True):
    """What is new of a choice."""

    text: str
    token_ids: list[int]
    """Token ids of all new tokens, also of those whose text is held back. `num_tokens` counts the same."""
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    """`stop` or `length`; None: there is more to come."""
    stop_reason: str | int | None
    """The stop string or the client's stop token that ended it."""


class Choice:
    """One sequence of a request.

    Args:
        index: Its number in the core.
        number: Its number in the answer.
        prompt_tokens: Length of its prompt.
        detokenizer: Primed with that prompt.
        stops: Stop strings.
        stop_token_ids: Those of the client, which are reported as `stop_reason`.
        num_logprobs: Alternatives to report with each token; None: no logprobs.
        min_tokens: Tokens in whose text no stop string may end.
        interval: Tokens that a delta has at least, the first and the last one excepted.
        prompt_logprobs: Where those of the prompt gather, by position, in one list for all choices of a prompt; the first token
            has none. None: not asked for.
        include_stop: Whether the stop string or stop token is part of the text.
    """

    # No dictionary each: between two steps the processor's caches forget all streams, and miss each of their lines anew.
    __slots__ = (
        *("_characters", "_detokenizer", "_include_stop", "_interval", "_last_taken", "_logprobs", "_min_tokens", "_stop_reason"),
        *("_stop_token_ids", "_stops", "_text", "_token_ids", "cached_tokens", "finish_reason", "first_time"),
        *(
            "index",
            "last_time",
            "lent",
            "num_logprobs",
            "num_tokens",
            "number",
            "pooled",
            "prompt_logprobs",
            "prompt_tokens",
            "runs",
            "turns",
        ),
    )

    def __init__(
        self,
        index: int,
        number: int,
        prompt_tokens: int,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        stop_token_ids: frozenset[int],
        num_logprobs: int | None,
        min_tokens: int = 0,
        prompt_logprobs: list[PromptLogprob | None] | None = None,
        interval: int = 1,
        include_stop: bool = False,
    ) -> None:
        self.index = index
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.num_logprobs = num_logprobs
        self.prompt_logprobs = prompt_logprobs
        self.cached_tokens = 0
        self.num_tokens = 0
        self.first_time = 0.0
        """Time of the first token, as `last_time` is of the newest: Unix time in seconds by the core's clock."""
        self.last_time = 0.0
        self.pooled: Float32 | None = None
        """What an engine that embeds made of the prompt; it ends the choice."""
        self.lent: Lent | None = None
        """KV pages of its prompt that another replica may read now."""
        self.runs: list[tuple[int, int, float]] = []
        """Tokens of one step, where there was more than one: the first one's number, how many, and the time."""
        self.turns: list[tuple[LifecycleEvent, float]] = []
        """Events of its life in the core, by the core's clock."""
        self.finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._stops = StopBuffer(stops, include_stop) if stops else None
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._interval = interval
        self._characters = 0
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._last_taken = False

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the client's stop token that ended it."""
        return self._stop_reason

    @property
    def characters(self) -> int:
        """Length of the text decoded so far, held back or not."""
        return self._characters

    def add_token(self, token_id: int, logprob: TokenLogprob | None, shown: bool = True) -> bool:
        """Takes one token, whose text counts where it is shown; True where it completes a stop string, which ends the choice."""
        text = self._detokenizer.step(token_id) if shown else ""
        self.num_tokens += 1
        self._token_ids.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
        return bool(text) and self._show(text)

    def add_stop_token(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Takes the token that ended the sequence: it counts, and has no text unless that was asked for."""
        self.add_token(token_id, logprob, shown=self._include_stop or self._detokenizer.shows(token_id))

    def finish(self, reason: str, stop_token_id: int | None, stop_reason: str | None = None) -> None:
        """Ends a choice whose last token the core has sent; text held back is released."""
        if (rest := self._detokenizer.flush()) and self._show(rest):
            return
        if self._stops is not None:
            self._text.append(self._stops.flush())
        self.finish_reason = reason
        self._stop_reason = stop_token_id if stop_token_id in self._stop_token_ids else stop_reason

    @property
    def due(self) -> bool:
        """Whether there is as much as a delta must have."""
        new = len(self._token_ids)
        return new >= self._interval or new == self.num_tokens or self.finish_reason is not None

    def take(self) -> Delta | None:
        """What is new since the last delta; None where nothing is, or not enough."""
        if not self.due:
            return None
        text, logprobs, done = "".join(self._text), self._logprobs, self.finish_reason is not None
        # Tokens without text yet, as of a character half done, come with the text or the end.
        if self._last_taken or not (text or logprobs or done):
            return None
        delta = Delta(text, self._token_ids, logprobs, self.finish_reason, self._stop_reason)
        self._text, self._token_ids, self._last_taken = [], [], done
        if logprobs:
            self._logprobs = []
        return delta

    def _show(self, text: str) -> bool:
        self._characters += len(text)
        if self._stops is None:
            self._text.append(text)
            return False
        shown, stop = self._stops.feed(text, search=self.num_tokens > self._min_tokens)
        if shown:
            self._text.append(shown)
        if stop is not None:
            self.finish_reason, self._stop_reason = "stop", stop
        return stop is not None


class Usage(NamedTuple):
    """Token counts of an answer. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    image_tokens: int = 0
    """Image tokens of the prompt."""


class Generation:
    """All choices of one request, and the handler that waits for them.

    Args:
        choices: Prompt by prompt, `n` of each.
        n: Choices a prompt.
        stream: Whether the handler wants to know of every token, or of the end alone.
        arrival: Unix time in seconds.
        image_tokens: Of the prompt.
        rank: The data-parallel rank that runs it.
    """

    __slots__ = ("_error", "_follower", "_image_tokens", "_n", "_stream", "_wake", "arrival", "choices", "rank")

    def __init__(self, choices: list[Choice], n: int, stream: bool, arrival: float, image_tokens: int = 0, rank: int = 0) -> None:
        self.choices = choices
        self.rank = rank
        self._image_tokens = image_tokens
        self.arrival = arrival
        self._n = n
        self._stream = stream
        self._error: ApiError | None = None
        self._wake = asyncio.Event()
        self._follower: Callable[[], bool] | None = None

    @property
    def finished(self) -> bool:
        """Whether every choice has come to its end."""
        # Asked for each token: a generator would cost more than what it does.
        for choice in self.choices:  # noqa: SIM110
            if choice.finish_reason is None:
                return False
        return True

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        firsts = self.choices[:: self._n]
        return Usage(
            prompt_tokens=sum(choice.prompt_tokens for choice in firsts),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
            image_tokens=self._image_tokens,
        )

    def concerns(self, choice: Choice) -> bool:
        """Whether what has changed of a choice is to be told now."""
        if choice.finish_reason is None:
            return self._stream and choice.due
        return self._stream or self.finished

    def follow(self, take: Callable[[], bool]) -> None:
        """Has what is new taken by a function from now on, at once; the handler is woken at the end, by an error, and where the
        function says False: not now."""
        self._follower = take

    def tell(self) -> None:
        """Has the handler or who follows take what is new."""
        follower = self._follower
        if follower is None or self.finished or not follower():
            self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Ends the request with an error."""
        if not self.finished:
            self._follower, self._error = None, error
            self._wake.set()

    async def pooled(self) -> list[Float32]:
        """Waits for what an engine that embeds makes of each prompt; raises as `changed` does."""
        while not self.finished:
            await self.changed()
        vectors = [choice.pooled for choice in self.choices if choice.pooled is not None]
        assert len(vectors) == len(self.choices), "the core ends a request that embeds with its vector, or with an error"
        return vectors

    async def changed(self) -> None:
        """Waits for something new, the first token at the earliest; raises the `ApiError` that ended the request."""
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
