"""What Python gets of a request: vLLM's names, so that scripts carry over."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.generation import Choice, Generation, PromptLogprob, TokenLogprob
from penstock.engine.frontend.python.params import OutputKind
from penstock.engine.frontend.vocabulary import Vocabulary


class RequestFailed(RuntimeError):
    """The engine could not finish a request that was in order; `retriable` says that another try may succeed."""

    def __init__(self, message: str, retriable: bool) -> None:
        super().__init__(message)
        self.retriable = retriable


def python_error(error: ApiError) -> Exception:
    """`ValueError` for what the caller can change, `RequestFailed` for the rest."""
    if error.status < 500:
        return ValueError(error.message)
    return RequestFailed(error.message, error.retriable)


@contextmanager
def python_errors() -> Iterator[None]:
    """Errors as Python knows them."""
    try:
        yield
    except ApiError as error:
        raise python_error(error) from None


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate for a token."""

    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """1 for the likeliest."""
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` sequences of a request."""

    index: int
    text: str
    token_ids: list[int]
    """Token ids, those of a stop string included, whose text is removed."""
    cumulative_logprob: float | None
    """Sum over all tokens so far. None if no log-probabilities were requested."""
    logprobs: list[dict[int, Logprob]] | None
    """By position: token id → candidate, the sampled token first."""
    finish_reason: str | None
    """As over HTTP. None: not finished."""
    stop_reason: str | int | None
    """The stop string, or the stop token of `stop_token_ids`, that ended it."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Unix times in seconds by the core's clock; 0.0 where it has not happened."""

    arrival_time: float
    first_token_time: float
    last_token_time: float
    num_generation_tokens: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request as it stands."""

    request_id: str
    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """By position; None for the first token. None if they were not requested."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens that the prefix cache supplied."""
    metrics: RequestMetrics


class OutputBuilder:
    """Makes the outputs of one request of one prompt.

    Args:
        request_id: Its name.
        prompt: Its text, if there was one.
        prompt_token_ids: Its tokens.
        kind: What each output holds.
        generation: The request.
        vocabulary: Texts of single tokens.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        kind: OutputKind,
        generation: Generation,
        vocabulary: Vocabulary,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._generation = generation
        self._vocabulary = vocabulary
        self._sequences = [_Sequence(choice, kind, vocabulary) for choice in generation.choices]

    def take(self) -> RequestOutput | None:
        """The next output; None where nothing has changed."""
        changed = [sequence.advance() for sequence in self._sequences]
        if not any(changed):
            return None
        generation, choices = self._generation, self._generation.choices
        scores = choices[0].prompt_logprobs
        usage = generation.usage
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=None if scores is None else [entry and self._scored(entry) for entry in scores],
            outputs=[sequence.output() for sequence in self._sequences],
            finished=generation.finished,
            num_cached_tokens=usage.cached_tokens,
            metrics=RequestMetrics(
                arrival_time=generation.arrival,
                first_token_time=min((choice.first_time for choice in choices if choice.num_tokens), default=0.0),
                last_token_time=max(choice.last_time for choice in choices),
                num_generation_tokens=usage.completion_tokens,
            ),
        )

    def _scored(self, entry: PromptLogprob) -> dict[int, Logprob]:
        return _candidates(entry.token_id, entry.logprob, entry.rank, entry.top, self._vocabulary)


class _Sequence:
    """What has been taken of a choice, all of it or what is new."""

    def __init__(self, choice: Choice, kind: OutputKind, vocabulary: Vocabulary) -> None:
        self._choice = choice
        self._delta = kind == "delta"
        self._vocabulary = vocabulary
        self._sum = 0.0
        self._clear()

    def _clear(self) -> None:
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []

    def advance(self) -> bool:
        """Takes what is new; whether anything is."""
        if self._delta:
            self._clear()
        delta = self._choice.take()
        if delta is None:
            return False
        self._text += delta.text
        self._token_ids += delta.token_ids
        self._logprobs += [self._candidates(token) for token in delta.logprobs]
        self._sum += sum(token.logprob for token in delta.logprobs)
        return True

    def output(self) -> CompletionOutput:
        """A copy: what was given out does not change any more."""
        choice = self._choice
        asked = choice.num_logprobs is not None
        return CompletionOutput(
            index=choice.number,
            text=self._text,
            token_ids=self._token_ids.copy(),
            cumulative_logprob=self._sum if asked else None,
            logprobs=self._logprobs.copy() if asked else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _candidates(self, token: TokenLogprob) -> dict[int, Logprob]:
        return _candidates(token.token_id, token.logprob, token.rank, token.top, self._vocabulary)


def _candidates(
    token_id: int, logprob: float, rank: int, top: list[tuple[int, float]], vocabulary: Vocabulary
) -> dict[int, Logprob]:
    """vLLM's form, with ranks from 1; ranks come from 0."""
    entries = [(token_id, logprob, rank), *((other, value, at) for at, (other, value) in enumerate(top) if other != token_id)]
    return {token: Logprob(value, at + 1, vocabulary.text_of(token)) for token, value, at in entries}
