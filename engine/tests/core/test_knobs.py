"""Faults that a knob mends: the symptom as the metrics have it, then the one change that its runbook names, then no symptom."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import Machine, make_config, make_request

RUNBOOKS = Path(__file__).parents[3] / "docs" / "runbooks"
STEP_S, TOKEN_S = 0.008, 40e-6
"""What a step takes, and a token of it: an 8B model on one H100, as the simulator has it."""


@dataclass
class Seen:
    """What the metrics told of a run, at its worst."""

    waiting: dict[str, int]
    """Most that waited, by what for."""
    usage: float
    """Most of the KV memory that requests held."""
    preemptions: int
    gaps: list[float]
    """Seconds between tokens, in order of size."""


def watched(machine: Machine) -> Seen:
    """Runs it to its end."""
    seen = Seen({}, 0.0, 0, [])
    decoding: set[int] = set()
    pool = machine.scheduler.kv.pool
    while machine.scheduler.indexes():
        before = {index: len(tokens) for index, tokens in machine.streams.items()}
        plan = machine.step()
        took = STEP_S + TOKEN_S * (int(plan.num_new_tokens.sum()) if plan is not None else 0)
        grown = {index for index, tokens in machine.streams.items() if len(tokens) > before.get(index, 0)}
        seen.gaps += [took] * len(grown & decoding)
        decoding |= grown
        for reason, count in machine.scheduler.waiting().items():
            seen.waiting[reason] = max(seen.waiting.get(reason, 0), count)
        seen.usage = max(seen.usage, pool.num_used / pool.num_blocks)
    machine.check_no_leak()
    seen.preemptions = machine.scheduler.totals.num_preemptions
    seen.gaps.sort()
    return seen


def p99(gaps: list[float]) -> float:
    return gaps[len(gaps) * 99 // 100]


def advice(alert: str) -> str:
    """What the runbook of an alert has one do."""
    return (RUNBOOKS / f"{alert}.md").read_text().partition("## How to fix")[2]


@pytest.mark.req("OB-30")
def test_a_queue_without_pressure_on_memory_is_the_token_budget():
    def run(budget: int) -> Seen:
        machine = Machine(make_config(num_blocks=512, max_num_seqs=32, budget=budget))
        for step in range(20):  # short prompts, more of them at a time than a small budget computes
            machine.add(*(make_request(4 * step + number, [step, number] * 6, 4) for number in range(4)))
            machine.step()
        return watched(machine)

    tight = run(budget=16)
    assert tight.waiting["capacity"] >= 32
    assert (tight.usage < 0.5, tight.preemptions) == (True, 0), "neither memory nor preemptions are the cause"
    assert "--max-num-batched-tokens" in advice("PenstockQueueGrows")
    assert run(budget=128).waiting.get("capacity", 0) == 0


@pytest.mark.req("OB-31")
@pytest.mark.parametrize(("seqs", "blocks"), [(2, 16), (8, 64)], ids=["fewer sequences", "more memory"])
def test_preemptions_with_full_memory_end_with_fewer_sequences_or_more_of_it(seqs: int, blocks: int):
    def run(max_num_seqs: int, num_blocks: int) -> Seen:
        config = make_config(num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_model_len=32, budget=64, caching=False)
        machine = Machine(config)
        machine.add(*(make_request(index, [index] * 8, 16) for index in range(12)))  # each grows from two blocks to six
        return watched(machine)

    cramped = run(8, 16)
    assert cramped.preemptions >= 3
    assert cramped.usage > 0.9
    assert "maxNumSeqs" in advice("PenstockPreemptionStorm") and "more memory" in advice("PenstockPreemptionStorm")
    assert run(seqs, blocks).preemptions == 0


@pytest.mark.req("OB-32")
def test_the_gaps_that_a_long_prompt_makes_for_others_shrink_with_its_share_of_a_step():
    def run(threshold: int) -> Seen:
        machine = Machine(make_config(num_blocks=2048, max_model_len=4096, budget=512, threshold=threshold))
        machine.add(*(make_request(index, [index] * 4, 60) for index in range(4)))  # they chat
        for _ in range(4):
            machine.step()
        machine.add(make_request(9, [number % 50 for number in range(3000)], 4))
        return watched(machine)

    without, clamped = run(0), run(64)
    assert p99(without.gaps) > 3 * without.gaps[0]
    assert p99(clamped.gaps) < p99(without.gaps) / 2


@pytest.mark.req("OB-36")
def test_one_adapter_more_than_slots_makes_requests_wait_that_a_slot_more_serves():
    def run(slots: int) -> Seen:
        machine = Machine(make_config(num_blocks=512, budget=64, loras=(slots, 4)))
        for name in "abc":
            assert machine.load(name) is None
        for index in range(6):
            machine.ask(index, [index] * 6, 8, "abc"[index % 3])
        return watched(machine)

    short = run(slots=2)
    assert short.waiting["lora"] >= 2
    assert (short.waiting.get("capacity", 0), short.preemptions, short.usage < 0.5) == (0, 0, True)
    assert "--max-loras" in advice("PenstockQueueGrows")
    assert run(slots=3).waiting.get("lora", 0) == 0
