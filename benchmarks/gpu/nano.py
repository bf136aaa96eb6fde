"""Output tokens a second over 256 requests that come at once: the benchmark that small engines compare themselves by."""

from collections.abc import Sequence
from pathlib import Path

from gpu.engine import SHAPES, Engine
from gpu.figures import Row, nano_floor_s, nano_requests
from penstock.engine.roofline import Ceilings

MAX_MODEL_LEN, BUDGET = 4096, 16_384


def measure(
    shape: str,
    device: str = "cuda",
    *,
    folder: Path = SHAPES,
    requests: Sequence[tuple[int, int]] | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    budget: int = BUDGET,
    ceilings: Ceilings | None = None,
) -> Row:
    """The figure's value is output tokens a second, from the first request's arrival to the last one's end."""
    work = nano_requests() if requests is None else list(requests)
    engine = Engine(
        folder / shape,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=len(work),
        max_num_batched_tokens=budget,
        ceilings=ceilings,
    )
    engine.add(64, 8)
    engine.drain()
    for prompt, output in work:
        engine.add(prompt, output)
    before, steps = engine.roofline_s(), engine.core.num_steps
    seconds, tokens = engine.drain()
    steps = engine.core.num_steps - steps
    model = engine.config.model.cost
    assert model is not None
    floor, own = nano_floor_s(model, work, engine.ceilings), engine.roofline_s() - before
    expected = sum(output for _, output in work)
    if tokens != expected:
        raise RuntimeError(f"{tokens} tokens were generated instead of {expected}")
    engine.close()
    return {
        "value": tokens / seconds,
        "bound_by": f"{steps} steps of {1e3 * seconds / steps:.2f} ms against {1e3 * own / steps:.2f} ms at the roofline",
        "seconds": seconds,
        "prompt_tokens": sum(prompt for prompt, _ in work),
        "output_tokens": tokens,
        "steps": steps,
        "preemptions": engine.core.scheduler.totals.num_preemptions,
        "floor_tok_per_s": tokens / floor,
        "share_of_floor": floor / seconds,
        "share_of_steps_roofline": own / seconds,
    }
