"""Drives the scheduler and the naive one with the same random life, and compares all that they decide.

make fuzz                       # a million steps
python engine/tests/core/scheduler_fuzzer.py --steps 5000 --seed 7
"""

import argparse
import random
import time

from harness import Machine, make_config, make_request
from naive_scheduler import NaiveScheduler

from penstock.engine.core.scheduling.pause import PauseState
from penstock.engine.messages import ExtendPrompt
from penstock.engine.sampling import RepetitionDetection

BLOCK, MAX_LEN, EPISODE = 4, 48, 250
TENANTS = ("", "a", "b")


class Rule:
    def __init__(self, blocked: set[int]) -> None:
        self.blocked = blocked

    def refuses(self, candidate):
        return "lora" if candidate.request.index in self.blocked else None


class Episode:
    """One configuration, and `EPISODE` steps of random life; `AssertionError` where the two part."""

    def __init__(self, seed: str) -> None:
        self.random = pick = random.Random(seed)
        chunked = pick.random() < 0.8
        self.config = make_config(
            block_size=BLOCK,
            max_model_len=MAX_LEN,
            # 13 blocks are the null block and one sequence of full length: the tightest pool there is.
            num_blocks=pick.choice([13, 14, 18, 25, 60]),
            max_num_seqs=pick.randint(1, 6),
            budget=pick.choice([1, 3, 7, 16, 64]) if chunked else 64,
            threshold=pick.choice([0, 0, 1, 5]) if chunked else 0,
            watermark=pick.choice([0.0, 0.1]),
            max_num_waiting=pick.choice([3, 30, 1000]),
            depth=pick.randint(1, 3),
            policy=pick.choice(["fcfs", "priority"]),
            weights=pick.choice([{}, {"a": 2.0, "b": 0.5}]),
            chunked=chunked,
            caching=False,
            drafts=pick.choice([0, 0, 1, 3, 6]),
        )
        self.real, self.naive = Machine(self.config), NaiveScheduler(self.config)
        self.real.scheduler.rules.append(Rule(self.naive.blocked))
        self.load = pick.choice([0.05, 0.2, 0.5])
        # Short prompts with long answers are what outgrows the pool.
        self.lengths, self.outputs = pick.choice([((1, 3, 4, 9), (16, 24, 40)), ((1, 4, 17, 30, 47, 48), (1, 2, 8, 24))])
        self.count = 0

    def run(self) -> None:
        for _ in range(EPISODE):
            self.live()
            self.step()
        self.naive.blocked.clear()
        self.set_pause(PauseState.UNPAUSED)
        for index in list(self.naive.requests):
            self.clear(index)
        while self.naive.requests or self.naive.flights:
            self.step()
        self.real.check_no_leak()

    def live(self) -> None:
        pick = self.random
        while pick.random() < self.load:
            self.add()
        waiting = [r.message.index for r in self.naive.of("ready")]
        parked = [r.message.index for r in self.naive.of("parked")]
        if waiting and pick.random() < 0.1:
            index, reason = pick.choice(waiting), pick.choice(["grammar", "remote_kv"])
            self.real.scheduler.park(index, reason, self.real.now)
            self.naive.park(index, reason)
        if parked and pick.random() < 0.3:
            self.clear(pick.choice(parked))
        if self.naive.requests and pick.random() < 0.05:
            index = pick.choice(list(self.naive.requests))
            self.real.abort(index)
            self.naive.end(self.naive.requests[index], self.real.finished[index].reason)
        if waiting and pick.random() < 0.1:
            self.naive.blocked.add(pick.choice(waiting))
        if pick.random() < 0.1:
            self.naive.blocked.clear()
        if pick.random() < 0.05:
            self.set_pause(pick.choice([PauseState.UNPAUSED, PauseState.UNPAUSED, PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]))

    def add(self) -> None:
        pick, index = self.random, self.count
        self.count += 1
        message = make_request(
            index,
            [pick.randrange(50) for _ in range(pick.choice(self.lengths))],
            pick.choice(self.outputs),
            stop=tuple(pick.sample(range(50), pick.choice([0, 0, 0, 3]))),
            priority=pick.choice([0, 0, 1, 2]) if self.config.scheduler.policy == "priority" else 0,
            tenant=pick.choice(TENANTS),
            deadline=self.real.now + pick.randint(1, 60) if pick.random() < 0.1 else None,
            complete=pick.random() < 0.9,
            # Of 50 tokens, two in a row are often equal, and longer patterns are as rare as in life.
            repetition=pick.choice([None, None, RepetitionDetection(8, 2)]),
        )
        self.naive.add(message)
        self.real.add(message)

    def clear(self, index: int) -> None:
        """What the request waits for comes, or a part of it."""
        pick, request = self.random, self.naive.requests.get(index)
        if request is None or request.state != "parked":
            return
        if request.reason == "streaming":
            message = ExtendPrompt(index, [pick.randrange(50) for _ in range(pick.randint(0, 9))], last=True)
            self.real.scheduler.extend(message, self.real.now)
            self.naive.extend(index, message.token_ids, message.last)
        else:
            self.real.scheduler.unpark(index, self.real.now)
            self.naive.unpark(index)

    def set_pause(self, state: PauseState) -> None:
        self.real.scheduler.pause_state = self.naive.pause = state

    def step(self) -> None:
        idle = self.random.random() < 0.1
        plan = self.real.step(idle=idle)
        expected = self.naive.schedule(self.real.now, idle=idle)
        assert (plan is None) == (expected is None), (plan, expected)
        if plan is not None:
            rows = zip(plan.num_new_tokens.tolist(), plan.samples.tolist(), strict=True)
            got = dict(zip(self.real.planned, rows, strict=True))
            assert got == expected, (got, expected)
        if self.naive.flights and (plan is None or len(self.naive.flights) >= self.config.depth):
            self.naive.update(self.real.told)
        self.compare()

    def compare(self) -> None:
        scheduler, naive = self.real.scheduler, self.naive
        assert scheduler.waiting() == naive.reasons()
        assert [r.index for r in scheduler._tenancy.running] == [r.message.index for r in naive.of("running")]
        assert scheduler.kv.num_free_blocks == naive.free()
        counters = scheduler._book._counters
        assert all(counters[tenant] == value for tenant, value in naive.counters.items()), "the accounts differ"
        assert set(self.real.finished) == set(naive.ends)
        for index in [index for index in naive.ends if index not in self.real.compared]:
            self.real.compared.add(index)
            reason, code, output = naive.ends[index]
            finished = self.real.finished[index]
            assert (finished.reason, finished.code, self.real.streams.get(index, [])) == (reason, code, output)


def main() -> None:
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began, number = time.monotonic(), 0
    with Progress(
        *Progress.get_default_columns()[:3], MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("steps")
    ) as progress:
        task = progress.add_task("scheduler", total=arguments.steps)
        while number * EPISODE < arguments.steps:
            seed = f"{arguments.seed}/{number}"
            try:
                Episode(seed).run()
            except BaseException:
                print(f"episode {seed} failed: Episode({seed!r}).run() repeats it")
                raise
            number += 1
            progress.advance(task, EPISODE)
    print(f"{number * EPISODE:,} steps of {number:,} lives, no difference, in {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
