"""Answers of `/v1/completions`."""

from collections.abc import Sequence
from typing import Any

import orjson

from penstock.engine.frontend.generation import Choice, Delta, TokenLogprob, Usage
from penstock.engine.frontend.openai.encoding import ChunkFormat, prompt_logprobs_of, taken, token_name
from penstock.engine.frontend.openai.protocol import CompletionRequest
from penstock.engine.frontend.spec import GenerationSpec
from penstock.engine.frontend.vocabulary import Vocabulary

_NOTHING = Delta("", [], [], "length", None)


class CompletionFormat(ChunkFormat):
    """`text_completion`, whole and in chunks.

    Args:
        request: The checked body.
        spec: The same as it runs.
        model: The name that answers say.
        vocabulary: Texts of single tokens.
        echoes: The text of each prompt, which begins its choices; None: it does not.
    """

    _opening, _closing = b'"text":', b""

    def __init__(
        self,
        request: CompletionRequest,
        spec: GenerationSpec,
        model: str,
        vocabulary: Vocabulary,
        echoes: Sequence[str] | None = None,
    ) -> None:
        names = ("cmpl", "text_completion", "text_completion")
        super().__init__(*names, model, spec, request.stream_options, request.return_token_ids)
        self._request = request
        self._vocabulary = vocabulary
        self._echoes = echoes
        self._plain = self._plain and request.max_tokens != 0

    def first(self, choice: Choice) -> bytes:
        """See `Format`: this API has no opening chunk but for what the prompt says."""
        if self._echoes is None and not self._token_ids:
            return b""
        said = b'"text":' + orjson.dumps(self._echo(choice))
        if self._token_ids:
            said += b',"prompt_token_ids":' + orjson.dumps(self._prompt(choice))
        return self._event(choice, said + b',"logprobs":null,"finish_reason":null')

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The events for what is new of a choice; none where all of it is held back."""
        if self._plain and delta.finish_reason is None and not delta.logprobs:
            return self._text(choice, delta.text)
        delta = self._wanted(delta)
        logprobs = orjson.dumps(self._logprobs(delta.logprobs)) if delta.logprobs else b"null"
        return self._event(choice, b'"text":' + orjson.dumps(delta.text) + self._end(delta, logprobs, delta.finish_reason))

    def last(self, usage: Usage) -> bytes:
        """What ends a stream after all choices."""
        return super().last(self._counted(usage))

    def full(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The answer that is not streamed; takes what the choices hold."""
        answers = [(choice, taken(choice)) for choice in choices]
        if self._spec.n > self._request.n:
            answers = self._best(answers)
        return self._full([self._choice(at, *answer) for at, answer in enumerate(answers)], self._counted(usage))

    def _best(self, answers: list[tuple[Choice, Delta]]) -> list[tuple[Choice, Delta]]:
        """Return the `n` likeliest choices of each prompt, best first."""
        best: list[tuple[Choice, Delta]] = []
        for at in range(0, len(answers), self._spec.n):
            best += sorted(answers[at : at + self._spec.n], key=lambda answer: -_mean_logprob(answer[1]))[: self._request.n]
        return best

    def _choice(self, number: int, choice: Choice, delta: Delta) -> dict[str, Any]:
        delta = self._wanted(delta)
        echo = self._echo(choice)
        out: dict[str, Any] = {
            "index": number,
            "text": echo + delta.text,
            "logprobs": None if self._request.logprobs is None else self._all_logprobs(choice, delta, echo),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._request.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs_of(choice, self._vocabulary)
        if self._token_ids:
            out |= {"token_ids": delta.token_ids, "prompt_token_ids": self._prompt(choice)}
        return out

    def _wanted(self, delta: Delta) -> Delta:
        """The engine always generates a token: here, where none was wanted, it is dropped."""
        return _NOTHING if self._request.max_tokens == 0 else delta

    def _counted(self, usage: Usage) -> Usage:
        return usage._replace(completion_tokens=0) if self._request.max_tokens == 0 else usage

    def _prompt(self, choice: Choice) -> list[int]:
        return self._spec.prompts[choice.number // self._spec.n]

    def _echo(self, choice: Choice) -> str:
        return "" if self._echoes is None else self._echoes[choice.number // self._spec.n]

    def _all_logprobs(self, choice: Choice, delta: Delta, echo: str) -> dict[str, Any]:
        """Return the log-probabilities, those of the echoed prompt first. Its first token has none."""
        columns = self._logprobs(delta.logprobs)
        if self._echoes is None:
            return columns
        columns["text_offset"] = [offset + len(echo) for offset in columns["text_offset"]]
        scores, prompt = choice.prompt_logprobs or [], self._prompt(choice)
        assert len(scores) == len(prompt), "they were asked for with the echo"
        before = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = 0
        for token_id, score in zip(prompt, scores, strict=True):
            name = self._name(token_id)
            before["tokens"].append(name)
            before["token_logprobs"].append(score and score.logprob)
            # The engine may score more alternatives, where `prompt_logprobs` asks for more.
            top = [*score.top[: self._request.logprobs], (token_id, score.logprob)] if score else None
            before["top_logprobs"].append(top and {self._name(other): logprob for other, logprob in top})
            before["text_offset"].append(min(offset, len(echo)))
            offset += len(self._vocabulary.text_of(token_id)) if token_id not in self._vocabulary.special_ids else 0
        return {name: before[name] + columns[name] for name in columns}

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, list[Any]]:
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            # The sampled token is among them even where it is not one of the likeliest, as in OpenAI's answers.
            "top_logprobs": [
                {self._name(other): logprob for other, logprob in [*token.top, (token.token_id, token.logprob)]}
                for token in tokens
            ],
            "text_offset": [token.text_offset for token in tokens],
        }

    def _name(self, token_id: int) -> str:
        """Tokens that are no text get OpenAI's `bytes:` form, since here names are keys."""
        if self._request.return_tokens_as_token_ids:
            return token_name(token_id)
        data = self._vocabulary.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _mean_logprob(delta: Delta) -> float:
    return sum(token.logprob for token in delta.logprobs) / max(len(delta.logprobs), 1)
