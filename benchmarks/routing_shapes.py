"""Made-up traffic for `bench_routing.py --shapes`: what the recorded traces have little of. Arrivals come at random, one a second
on average: a load stretches them. The same name and count give the same trace."""

from collections.abc import Callable, Iterator
from random import Random

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


_KINDS: dict[str, Callable[[_Draw], Iterator[_Prompt]]] = {
    "chat": _chat,
    "documents": _documents,
    "agents": _agents,
    "strangers": _strangers,
}
SHAPES: dict[str, tuple[str, float]] = {
    **{name: (name, 1.0) for name in _KINDS},
    "agents in bursts": ("agents", 4.0),
    "chat in bursts": ("chat", 4.0),
}
"""By name: what comes, and how unevenly: the deviation of the time between two arrivals over its mean."""


def shape(name: str, count: int) -> Trace:
    """`count` requests of one of `SHAPES`."""
    kind, unevenness = SHAPES[name]
    draw, at, regularity = _Draw(name), 0.0, unevenness**-2
    requests: list[TraceRequest] = []
    for number, (blocks, output_tokens) in zip(range(count), _KINDS[kind](draw), strict=False):
        at += draw.lots.gammavariate(regularity, 1 / regularity)
        tokens = len(blocks) * BLOCK + draw.lots.randrange(1, BLOCK)
        requests.append(TraceRequest(number, at, tokens, output_tokens, tuple(blocks)))
    return Trace(name, BLOCK, requests)
