"""What is measured, what each figure is held to, and the arithmetic between a measurement and a figure. Pure, no torch."""

import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.engine.core.measure.step_cost import step_cost
from penstock.engine.cost import ModelCost
from penstock.engine.roofline import H200, Ceilings, binding, max_sequences

Row = dict[str, Any]


class Gate(NamedTuple):
    """What a figure is held to on one H200."""

    value: float
    stretch: float
    unit: str
    better: Literal["less", "more"]

    def judge(self, value: float) -> Row:
        """Whether it was met, and by how much it was missed or not."""
        ratio = self.value / value if self.better == "less" else value / self.value
        met = ratio >= 1
        told = "met" if met else f"missed by {100 * (1 / ratio - 1):.0f} %"
        return {"value": value, "unit": self.unit, "gate": self.value, "stretch": self.stretch, "met": met, "told": told}


class Figure(NamedTuple):
    """One line of the table."""

    what: str
    module: str
    arguments: tuple[str, ...]
    gate: Gate
    limit_s: int
    """After which it is given up."""


FIGURES = {
    "itl_8b": Figure("8B, batch 1, time between tokens at 1k", "itl", ("llama-3.1-8b",), Gate(4.6, 4.2, "ms", "less"), 75),
    "itl_0.6b": Figure("0.6B, batch 1, time between tokens at 1k", "itl", ("qwen3-0.6b",), Gate(0.8, 0.55, "ms", "less"), 60),
    "nano_0.6b": Figure("256 requests, 0.6B", "nano", ("qwen3-0.6b",), Gate(24_000, 26_000, "tok/s", "more"), 90),
    "nano_14b": Figure("256 requests, 14B", "nano", ("qwen3-14b",), Gate(6_200, 7_000, "tok/s", "more"), 120),
    "decode_attention": Figure("decode attention, share of a read stream", "decode_attention", (), Gate(90, 95, "%", "more"), 75),
    "prefill_attention": Figure("prefill attention, causal, 8k", "prefill_attention", (), Gate(420, 560, "TFLOP/s", "more"), 90),
    "gluon_prefill": Figure(
        "prefill attention in Gluon, 8k, times as fast as in Triton", "gluon_prefill", (), Gate(1.0, 1.3, "times", "more"), 30
    ),
    "latent_attention": Figure(
        "decode attention over latents, share of a read stream", "latent_attention", (), Gate(90, 95, "%", "more"), 45
    ),
    "sampling": Figure("filtered sampling, 256 rows of 151,936", "sampling", (), Gate(100, 48, "us", "less"), 45),
    "host_time": Figure("host's time a step at 256 running", "host_time", ("qwen3-0.6b",), Gate(0.3, 0.15, "ms", "less"), 60),
    "dependent_launch": Figure(
        "0.6B, batch 1, with dependent launches against without",
        "dependent_launch",
        ("qwen3-0.6b",),
        Gate(1.0, 1.2, "times", "more"),
        75,
    ),
    "mixed_graphs": Figure(
        "0.6B, 8 decodes beside a prompt of 120, as one graph against graphs of parts",
        "mixed_graphs",
        ("qwen3-0.6b",),
        Gate(1.0, 1.5, "times", "more"),
        60,
    ),
    "roofline": Figure("own roofline share off the profiler's", "roofline", ("llama-3.1-8b",), Gate(5, 2, "%", "less"), 75),
    "transformers": Figure(
        "0.6B, transformers' continuous batching", "transformers_batching", ("qwen3-0.6b",), Gate(0, 0, "tok/s", "more"), 75
    ),
    "start": Figure("8B, warm start to first token", "start", ("llama-3.1-8b",), Gate(10, 5, "s", "less"), 150),
}
"""By name, in the order of their running."""


class Load(NamedTuple):
    """A step of equal rows."""

    rows: int
    new: int
    """Tokens that each computes."""
    context: int
    """Tokens of each after that."""


LOADS = {"one decode at 1k": Load(1, 1, 1024), "a prompt of 8k": Load(1, 8192, 8192), "256 decodes at 8k": Load(256, 1, 8192)}
"""A small batch, a long prompt and many long contexts."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so great a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def nano_requests() -> list[tuple[int, int]]:
    """Lengths of prompt and output of the benchmark that small engines compare themselves by: 256 requests, both uniform in 100
    to 1,024, drawn as nano-vllm's `bench.py` draws them: each prompt's length, then its tokens, and the outputs after them."""
    draw = random.Random(0)
    prompts = [len([draw.randint(0, 10_000) for _ in range(draw.randint(100, 1024))]) for _ in range(256)]
    return [(prompt, draw.randint(100, 1024)) for prompt in prompts]


def nano_floor_s(model: ModelCost, requests: Sequence[tuple[int, int]], ceilings: Ceilings) -> float:
    """Seconds that the requests take at least, all running from the start: every prompt at the processor's ceiling, then each
    decode step at the ceiling that it meets, until the longest output ends."""
    [group] = model.windows
    flops = sum(
        prompt * model.linear_flops_per_token + prompt * (prompt + 1) // 2 * group.flops_per_pair for prompt, _ in requests
    )
    seconds = flops / ceilings.flops_per_s
    weights = model.layer_weight_bytes + model.lm_head_bytes
    for step in range(1, max(output for _, output in requests)):
        contexts = [prompt + step for prompt, output in requests if output > step]
        tokens, keys = len(contexts), sum(contexts)
        size = weights + keys * group.kv_bytes_per_token
        work = tokens * (model.linear_flops_per_token + model.lm_head_flops_per_row) + keys * group.flops_per_pair
        seconds += max(size / ceilings.bytes_per_s, work / ceilings.flops_per_s)
    return seconds


def bound_of_step(step_s: float, floor_s: float, busy_s: float) -> str:
    """What a step's time goes to beyond its floor: kernels that are slower than the roofline, or a device that waits."""
    slow, idle = max(0.0, busy_s - floor_s), max(0.0, step_s - busy_s)
    shares = f"floor {1e3 * floor_s:.3f} ms, kernels beyond it {1e3 * slow:.3f}, device idle {1e3 * idle:.3f}"
    if floor_s >= max(slow, idle):
        return f"the roofline ({shares})"
    return f"kernels below the roofline ({shares})" if slow >= idle else f"launches and the host ({shares})"


def ceiling_of(load: Load, model: ModelCost, ceilings: Ceilings, kv_bytes: int) -> str:
    """Which ceiling a load meets first: the capacity, where not all of its rows fit, or else what its step is bound by."""
    if (room := max_sequences(model, load.context, kv_bytes)) < load.rows:
        return f"capacity ({room} fit)"
    ends = np.full(load.rows, load.context, np.int32)
    return binding(step_cost(model, np.full(load.rows, load.new, np.int32), ends, load.rows), ceilings)


def ceilings_told(model: ModelCost, ceilings: Ceilings, kv_bytes: int) -> list[str]:
    """The balance point, as measured and by the datasheet, and which ceiling each of `LOADS` meets."""
    points = f"{ceilings.balance_point:.0f} operations a byte as measured, {H200.balance_point:.0f} by an H200's datasheet"
    met = {name: ceiling_of(load, model, ceilings, kv_bytes) for name, load in LOADS.items()}
    return [f"{name}: {told}" for name, told in {"balance point": points, **met}.items()]


def attention_bytes(lengths: Sequence[int], kv_heads: int, head_size: int, element: int) -> int:
    """Keys and values that a decode step of one layer reads."""
    return 2 * sum(lengths) * kv_heads * head_size * element


def causal_flops(length: int, heads: int, head_size: int) -> int:
    """Multiply-adds, counted twice, of causal attention over a prompt of one layer: half of the square."""
    return 4 * heads * head_size * length * length // 2


def mixed_lengths(count: int, total: int, seed: int = 0) -> list[int]:
    """Lengths of very different size that add up: each drawn with equal chance from every power of two up to an eighth."""
    draw = random.Random(seed)
    drawn = [2 ** draw.uniform(0, 7) for _ in range(count)]
    lengths = [max(1, int(total * part / sum(drawn))) for part in drawn]
    lengths[-1] += total - sum(lengths)
    return lengths
