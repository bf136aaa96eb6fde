"""Made-up traffic for `bench_routing.py --shapes`: what the recorded traces have little of. Arrivals come at random, one a second
on average: a load stretches them. The same name and count give the same trace."""

from collections.abc import Callable, Iterator
from math import cos, pi
from random import Random
from typing import NamedTuple

from penstock.sim.traces import Trace, TraceRequest

BLOCK = 256
RECENT = 200
"""Conversations that may go on."""


class _Draw:
    """Lots, and names for blocks that nobody had before."""

    def __init__(self, name: str) -> None:
        self.lots = Random(name)
        self._name = name
        self._fresh = 0

    def named(self, what: str) -> bytes:
        """The same block whenever the same is asked for."""
        return f"{self._name}/{what}".encode()

    def fresh(self, count: int) -> list[bytes]:
        """New ones."""
        self._fresh += count
        return [self.named(str(self._fresh - at)) for at in range(count)]


_Prompt = tuple[list[bytes], int]
"""Full blocks, and output tokens."""


def _chat(draw: _Draw) -> Iterator[_Prompt]:
    """Conversations that grow, under some forty system prompts of which few are common."""
    lots, talks = draw.lots, list[list[bytes]]()
    while True:
        if talks and lots.random() < 0.75:
            talk = lots.choice(talks[-RECENT:])
        else:
            system = min(int(lots.paretovariate(0.8)), 40)
            talks.append(talk := [draw.named(f"system {system}/{at}") for at in range(8)])
        talk += draw.fresh(lots.randrange(1, 5))
        yield list(talk), max(int(lots.lognormvariate(5, 0.8)), 1)


def _documents(draw: _Draw) -> Iterator[_Prompt]:
    """Questions about long documents, of which few are asked about often."""
    lots = draw.lots
    while True:
        document = min(int(lots.paretovariate(0.7)), 300)
        yield [draw.named(f"{document}/{at}") for at in range(10 + document % 60)], lots.randrange(20, 120)


def _agents(draw: _Draw) -> Iterator[_Prompt]:
    """Agents that call again and again with a prefix of 5,000 to 30,000 tokens, most of them those that have begun last."""
    lots, tasks = draw.lots, [draw.fresh(60)]
    while True:
        if lots.random() < 0.1:
            tasks.append(draw.fresh(lots.randrange(20, 120)))
        task = tasks[-1] if lots.random() < 0.7 else lots.choice(tasks)
        yield task + draw.fresh(2), lots.randrange(10, 100)


def _strangers(draw: _Draw) -> Iterator[_Prompt]:
    """Prompts that share nothing, some of them a hundred times as long as most."""
    lots = draw.lots
    while True:
        yield draw.fresh(min(int(0.8 * lots.paretovariate(0.9)), 230)), max(int(lots.lognormvariate(5, 1)), 1)


def _tenants(draw: _Draw) -> Iterator[_Prompt]:
    """Forty tenants, few of them large, with system prompts of 1,000 to 16,000 tokens, and questions that share no more."""
    lots = draw.lots
    sizes = [lots.randrange(4, 64) for _ in range(40)]
    while True:
        tenant = min(int(lots.paretovariate(0.9)), 40) - 1
        own = draw.fresh(lots.randrange(1, 12))
        yield [draw.named(f"{tenant}/{at}") for at in range(sizes[tenant])] + own, max(int(lots.lognormvariate(5, 0.8)), 1)


def _hot(draw: _Draw) -> Iterator[_Prompt]:
    """Three of five prompts begin with the same 30,000 tokens; the others share nothing."""
    lots = draw.lots
    while True:
        if lots.random() < 0.6:
            yield [draw.named(f"hot/{at}") for at in range(120)] + draw.fresh(lots.randrange(1, 4)), lots.randrange(20, 200)
        else:
            yield draw.fresh(lots.randrange(1, 40)), lots.randrange(20, 200)


def _retrieval(draw: _Draw) -> Iterator[_Prompt]:
    """Two to five documents of sixty, of which few are common, in any order, under one system prompt."""
    lots = draw.lots
    while True:
        found = list(dict.fromkeys(min(int(lots.paretovariate(0.8)), 60) for _ in range(lots.randrange(2, 6))))
        lots.shuffle(found)
        path, blocks = "", [draw.named(f"system/{at}") for at in range(4)]
        for document in found:
            path += f"{document},"
            blocks += [draw.named(f"{path}/{at}") for at in range(4 + document % 9)]
        yield blocks + draw.fresh(1), lots.randrange(30, 250)


def _reasoning(draw: _Draw) -> Iterator[_Prompt]:
    """Short questions with answers of 2,000 tokens in the middle, and of 16,000 at most."""
    lots = draw.lots
    while True:
        system = lots.randrange(4)
        blocks = [draw.named(f"{system}/{at}") for at in range(2)] + draw.fresh(lots.randrange(6))
        yield blocks, min(max(int(lots.lognormvariate(7.6, 0.9)), 50), 16_000)


def _news(draw: _Draw) -> Iterator[_Prompt]:
    """Tenants, and for a while in the middle of 400 requests a document of 13,000 tokens that most ask about."""
    lots, others = draw.lots, _tenants(draw)
    while True:
        for number in range(400):
            if 200 <= number < 300 and lots.random() < 0.8:
                yield [draw.named(f"news/{at}") for at in range(50)] + draw.fresh(1), lots.randrange(20, 150)
            else:
                yield next(others)


def _evenly(number: int) -> float:
    return 1.0


def _by_day(number: int) -> float:
    """From a seventh of the mean to nearly twice of it, and back, in 600 requests."""
    return 1 - 0.85 * cos(2 * pi * number / 600)


def _crowd(number: int) -> float:
    """Six times as many while the news are asked about."""
    return 6.0 if 200 <= number % 400 < 300 else 1.0


class Shape(NamedTuple):
    """What comes, and when."""

    prompts: Callable[[_Draw], Iterator[_Prompt]]
    unevenness: float = 1.0
    """The deviation of the time between two arrivals over its mean."""
    rate: Callable[[int], float] = _evenly
    """Arrivals a second around the request of a number."""


SHAPES = {
    "chat": Shape(_chat),
    "documents": Shape(_documents),
    "agents": Shape(_agents),
    "strangers": Shape(_strangers),
    "agents in bursts": Shape(_agents, 4.0),
    "chat in bursts": Shape(_chat, 4.0),
    "agents by day": Shape(_agents, rate=_by_day),
    "tenants in bursts": Shape(_tenants, 4.0),
    "one hot prefix": Shape(_hot),
    "retrieval": Shape(_retrieval),
    "reasoning": Shape(_reasoning),
    "flash crowd": Shape(_news, rate=_crowd),
}
"""By name."""


def shape(name: str, count: int) -> Trace:
    """`count` requests of one of `SHAPES`."""
    prompts, unevenness, rate = SHAPES[name]
    draw, at, regularity = _Draw(name), 0.0, unevenness**-2
    requests: list[TraceRequest] = []
    for number, (blocks, output_tokens) in zip(range(count), prompts(draw), strict=False):
        at += draw.lots.gammavariate(regularity, 1 / regularity) / rate(number)
        tokens = len(blocks) * BLOCK + draw.lots.randrange(1, BLOCK)
        requests.append(TraceRequest(number, at, tokens, output_tokens, tuple(blocks)))
    return Trace(name, BLOCK, requests)
