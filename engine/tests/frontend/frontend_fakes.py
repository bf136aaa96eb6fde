"""A core without a process: tests say what it generates."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from penstock.api.load_report import LoadReport
from penstock.engine.core.ipc.client import CoreError
from penstock.engine.messages import AddRequest, CoreReady, Finished, FinishReason, Logprobs, Started, StepOutputs
from penstock.engine.stats import CoreStats

Answer = Callable[[AddRequest], tuple[Sequence[int], FinishReason]]


def step_frame(
    tokens: dict[int, Sequence[int]],
    finished: Sequence[Finished] = (),
    started: Sequence[Started] = (),
    time: float = 0.0,
    logprobs: Logprobs | None = None,
) -> StepOutputs:
    """A frame from plain lists."""
    offsets = np.cumsum([0, *(len(ids) for ids in tokens.values())])
    return StepOutputs(
        engine_index=0,
        step_id=0,
        time=time,
        indexes=np.array(list(tokens), "<i8").tobytes(),
        offsets=offsets.astype("<i4").tobytes(),
        token_ids=np.array([token for ids in tokens.values() for token in ids], "<i4").tobytes(),
        started=list(started),
        finished=list(finished),
        logprobs=logprobs,
    )


def logprob_columns(positions: Sequence[int], top: Sequence[Sequence[tuple[int, float]]]) -> Logprobs:
    """Columns whose sampled token is the likeliest one."""
    ids = np.array([[token for token, _ in row] for row in top], "<i4")
    values = np.array([[logprob for _, logprob in row] for row in top], "<f4")
    return Logprobs(
        positions=np.array(positions, "<i4").tobytes(),
        sampled=values[:, 0].astype("<f4").tobytes(),
        ranks=np.zeros(len(positions), "<i4").tobytes(),
        width=ids.shape[1],
        top_ids=ids.tobytes(),
        top_logprobs=values.tobytes(),
    )


class FakeCore:
    """What `AsyncLLM` uses of `CoreClient`. With `answer`, a request is answered at once, a token a frame."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.first_number = 0
        self.added: list[AddRequest] = []
        self.aborted: list[list[int]] = []
        self._answer = answer
        self._outputs: asyncio.Queue[StepOutputs | CoreStats | CoreError] = asyncio.Queue()

    async def start(self) -> CoreReady:
        return CoreReady(epoch=1, max_model_len=64, num_blocks=8, load_seconds={"weights": 2.5})

    async def add(self, request: AddRequest) -> None:
        self.added.append(request)
        if self._answer is not None:
            ids, reason = self._answer(request)
            for at, token in enumerate(ids):
                last = [Finished(request.index, reason)] if at == len(ids) - 1 else []
                first = [Started(request.index, 0)] if at == 0 else []
                self.say(step_frame({request.index: [token]}, last, first))

    async def abort(self, indexes: Sequence[int]) -> None:
        self.aborted.append(list(indexes))

    async def outputs(self) -> AsyncIterator[StepOutputs | CoreStats]:
        while True:
            message = await self._outputs.get()
            if isinstance(message, CoreError):
                raise message
            yield message

    async def close(self) -> None:
        return

    def say(self, message: StepOutputs | CoreStats) -> None:
        self._outputs.put_nowait(message)

    def die(self, reason: str) -> None:
        self._outputs.put_nowait(CoreError(reason))

    def report(self, seq: int = 1, running: int = 0, steps: int = 0) -> None:
        load = LoadReport(epoch=1, seq=seq, num_requests_running=running, max_num_seqs=8, kv_blocks_total=8)
        self.say(CoreStats(load, steps, preemptions=2, prefix_queries=30, prefix_hits=10))
