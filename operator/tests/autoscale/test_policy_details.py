"""What a decision says, and the edges of what is learned: figures that no test of a whole life holds."""

import asyncio
from collections.abc import Sequence

import pytest

from penstock.api.fleet import PoolsView
from penstock.api.load_report import LoadReport
from penstock.operator.autoscale.bounds import Decision
from penstock.operator.autoscale.capacity import LEAST_KV, LEAST_SPEED, LEAST_STEP_S, MOST_STEP_S, Capacity, learn
from penstock.operator.autoscale.coldstart import Starting
from penstock.operator.autoscale.correction import Correction
from penstock.operator.autoscale.limits import Limits, ModelLimits, Settings
from penstock.operator.autoscale.loop import Autoscaler, ModelScale, Record
from penstock.operator.autoscale.policy import Memory, Observation, PoolMemory, PoolView, decide
from penstock.operator.autoscale.signals import PoolSignals, ReplicaSignal
from penstock.operator.autoscale.whatif import scaled
from penstock.operator.replicas import Replicas


def report(**figures: object) -> LoadReport:
    return LoadReport(1, 1, **{"num_requests_running": 6, "max_num_seqs": 8, **figures})  # type: ignore[arg-type]


def signals(*reports: LoadReport, held: int = 0) -> PoolSignals:
    return PoolSignals(held, tuple(ReplicaSignal(str(at), True, False, 0, it, 0.1) for at, it in enumerate(reports)))


def decision(
    view: PoolView, limits: Limits | None = None, memory: PoolMemory | None = None, settings: Settings | None = None
) -> Decision:
    remembered = Memory() if memory is None else Memory(pools={"p": memory})
    seen = Observation(5.0, 1.8e9, {"p": view})
    return decide(seen, ModelLimits({"p": limits or Limits(1, 8)}), settings or Settings(), remembered)[0]["p"]


@pytest.mark.parametrize(("factor", "words"), [(1.0, ""), (1.004, ""), (1.25, ", times 1.25 for the SLO")])
def test_a_reason_names_the_correction_where_there_is_one(factor: float, words: str) -> None:
    made = decision(PoolView(2, (), signals(report(), report())), memory=PoolMemory(correction=Correction(factor)))
    assert made.reason.startswith(f"demand is {2 * factor:.2f} replicas (12 requests{words})")
    assert made.inputs["slo_factor"] == round(factor, 3)


def test_figures_name_what_the_decision_rests_on() -> None:
    waiting = {"capacity": 2, "lora": 3}
    figures = {
        "kv_cache_usage_perc": 0.3, "prompt_tokens_per_s": 100.25, "generation_tokens_per_s": 7.5, "prefill_backlog_tokens": 40,
    }  # fmt: skip
    starting = (Starting(1.0), Starting(10_000.0, True))
    made = decision(PoolView(4, starting, signals(report(num_requests_waiting=waiting, **figures), report(), held=5)))
    told = made.inputs
    assert (told["requests"], told["held"], told["kv_usage"], told["backlog_tokens"]) == (6 + 6 + 2 + 5, 5, 0.3, 40)
    assert (told["prompt_tokens_per_s"], told["output_tokens_per_s"]) == (100.2, 7.5)
    assert (told["pending"], told["stuck"]) == (2, 1)
    assert [value for name, value in told.items() if "lora" in name] == [3]
    assert "3 wait for lora, which no replica more would help" in made.reason


@pytest.mark.parametrize(
    ("step_s", "learned"),
    [
        (LEAST_STEP_S, True),
        (LEAST_STEP_S * 0.99, False),
        (MOST_STEP_S, True),
        (MOST_STEP_S * 1.01, False),
    ],
)
def test_a_step_is_learned_within_its_bounds(step_s: float, learned: bool) -> None:
    assert (learn(Capacity(), [report(decode_step_s=step_s)]).line.step_s(6) > 0) == learned
    assert learn(Capacity(), [report(num_requests_running=0, decode_step_s=step_s)]).line.step_s(6) == 0


def test_speed_and_memory_are_learned_from_their_least_figure_on() -> None:
    at = learn(Capacity(), [report(prefill_tokens_per_s=LEAST_SPEED, kv_cache_usage_perc=LEAST_KV)])
    assert (at.prefill_tokens_per_s, at.rows_in_kv) == (LEAST_SPEED, 6 / LEAST_KV)
    below = learn(Capacity(), [report(prefill_tokens_per_s=LEAST_SPEED * 0.99, kv_cache_usage_perc=LEAST_KV * 0.99)])
    assert (below.prefill_tokens_per_s, below.rows_in_kv, below.max_num_seqs) == (0, 0, 8)


def test_another_load_is_more_of_everything_that_waits_and_runs() -> None:
    load = report(
        num_requests_waiting={"capacity": 3, "lora": 5},
        prompt_tokens_per_s=10.0,
        generation_tokens_per_s=4.0,
        prefill_tokens_per_s=500.0,
        decode_step_s=0.02,
    )
    found = scaled(signals(load, held=3), 2.5).replicas[0].report
    assert found is not None
    assert found.num_requests_waiting == {"capacity": 8, "lora": 12}
    assert (found.prompt_tokens_per_s, found.generation_tokens_per_s) == (25.0, 10.0)
    assert (found.prefill_tokens_per_s, found.decode_step_s) == (500.0, 0.02)
    assert scaled(signals(load, held=3), 3.0).held == 9


class Nothing:
    """An actuator with nothing to scale."""

    async def targets(self) -> Sequence[ModelScale]:
        return []

    async def scale(self, pool_id: str, replicas: int, victims: Sequence[str]) -> None:
        raise AssertionError

    async def spare(self, pool_id: str) -> None:
        raise AssertionError

    async def record(self, record: Record) -> None:
        raise AssertionError


async def test_who_listens_hears_of_a_look_without_gateways() -> None:
    heard: list[tuple[list[PoolsView], int]] = []

    async def nobody() -> Sequence[str]:
        return []

    def told(views: Sequence[PoolsView], asked: int) -> None:
        heard.append((list(views), asked))

    task = asyncio.create_task(Autoscaler(nobody, Replicas(), Nothing(), Settings(), tick_s=60, told=told).run())
    async with asyncio.timeout(60):
        while not heard:
            await asyncio.sleep(0.01)
    task.cancel()
    assert heard == [([], 0)]
