"""Clients as applications have them: OpenAI's library, streaming, and no retry that would hide a loss."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import openai

from penstock.api import headers

PATIENCE = 60.0  # seconds of silence that count as a hang


@dataclass(frozen=True)
class Answer:
    """What became of one request."""

    prompt: str
    started: float
    """As time.monotonic()."""
    ended: float
    replica: str
    """UID of the pod that answered; empty where no answer began."""
    text: str
    finish_reason: str | None
    tokens: int
    """Completion tokens by the answer's own count; 0 where it never came to that."""
    error: Exception | None

    @property
    def complete(self) -> bool:
        """It ended, and says so: an answer that merely stops is none."""
        return self.error is None and self.finish_reason == "length" and self.tokens > 0

    @property
    def retryable(self) -> bool:
        """It failed in a way that tells the client to send it again: never by hanging, never by looking complete."""
        match self.error:
            case openai.APIStatusError() as refusal:
                return refusal.status_code == 503 and "retry-after" in refusal.response.headers
            case openai.APITimeoutError() | httpx.TimeoutException() | None:
                return False
            case _:  # the connection broke, or the stream ended with an error event
                return True


def openai_client(url: str) -> openai.OpenAI:
    """The official client of a gateway."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


class Client(threading.Thread):
    """Asks the same thing again and again, each time for exactly so many tokens."""

    def __init__(self, url: str, model: str, prompt: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self.answers: list[Answer] = []
        self.replica = ""
        """Who is streaming to it at this moment."""
        self.received = 0
        """Chunks of the present answer so far."""
        self._client = openai_client(url)
        self._model, self._prompt, self._tokens = model, prompt, tokens
        self._last = threading.Event()

    def finish(self) -> None:
        """Ask nothing more once the present answer is there."""
        self._last.set()

    def run(self) -> None:
        while not self._last.is_set():
            answer = self._ask()
            self.answers.append(answer)
            if answer.error is not None:
                self._last.wait(0.2)  # a client that is refused does not hammer

    def _ask(self) -> Answer:
        started, text, finish_reason, tokens, error = time.monotonic(), "", None, 0, None
        replica = ""
        try:
            answer = self._client.chat.completions.with_raw_response.create(
                model=self._model,
                messages=[{"role": "user", "content": self._prompt}],
                max_tokens=self._tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            self.replica = replica = answer.headers.get(headers.REPLICA, "")
            with answer.parse() as stream:
                for chunk in stream:
                    self.received += 1
                    tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        finish_reason = choice.finish_reason or finish_reason
        except (openai.APIError, httpx.HTTPError) as problem:
            error = problem
        self.replica, self.received = "", 0
        return Answer(self._prompt, started, time.monotonic(), replica, text, finish_reason, tokens, error)


@contextmanager
def clients(url: str, model: str, count: int, tokens: int) -> Iterator[list[Client]]:
    """So many clients at once, each with a prompt of its own; all have finished their last answers at the end."""
    started = [Client(url, model, f"What does function number {number} do?", tokens) for number in range(count)]
    with ExitStack() as ending:
        for client in started:
            client.start()
            ending.callback(client.join, timeout=2 * PATIENCE)
        ending.callback(lambda: [client.finish() for client in started])  # all of them first, then the joins
        yield started


def answers_of(asked: list[Client]) -> list[Answer]:
    """Everything that they were answered, in order of time. Fails where a client is still at it."""
    assert not [client for client in asked if client.is_alive()], "a client hangs"
    return sorted((answer for client in asked for answer in client.answers), key=lambda answer: answer.ended)


def expect_no_loss(answers: list[Answer], tokens: int) -> None:
    """Every request was answered in full, and the same question always in the same way, whoever answered."""
    assert answers, "nothing was asked"
    lost = [answer for answer in answers if not answer.complete or answer.tokens != tokens]
    assert not lost, f"{len(lost)} of {len(answers)} requests were lost: {lost[0]}"
    texts: dict[str, set[str]] = {}
    for answer in answers:
        texts.setdefault(answer.prompt, set()).add(answer.text)
    assert all(len(variants) == 1 for variants in texts.values()), f"the replicas disagree: {texts}"


def expect_answers_of(asking: list[Client], replicas: set[str]) -> None:
    """All of these pods have answered something."""
    seen = {answer.replica for client in asking for answer in list(client.answers)}
    assert replicas <= seen, f"only {seen} of {replicas} have answered"


def expect_streams_of(asking: list[Client], replicas: set[str]) -> None:
    """One of these pods is amid an answer."""
    assert any(client.replica in replicas and client.received > 2 for client in asking)
