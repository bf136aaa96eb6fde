"""Token streams do not depend on anything but the request: not on neighbours, chunks, preemption, cache hits, aborts or depth.

Every example also passes the machine's invariants at every step.
"""

from collections.abc import Sequence

import pytest
from fake_runner import FAILING_TOKEN, VOCAB, image_value, reference
from harness import Machine, make_config, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.cache.layout import KVGroup, full_attention, max_blocks
from penstock.engine.core.measure.copies import CopyPace
from penstock.engine.messages import ExtendPrompt, FinishReason
from penstock.engine.sampling import RepetitionDetection
from penstock.prompt.hashing import PromptItem

BLOCK, MAX_LEN = 4, 48
LARGEST = 9
"""Tokens of an image."""
PLACEHOLDER = 7

configs = st.fixed_dictionaries(
    {
        # Beyond the null block and one sequence of full length: the tightest pool there is.
        "spare": st.sampled_from([0, 1, 5, 12, 47, 187]),
        "max_num_seqs": st.integers(1, 6),
        "budget": st.sampled_from([1, 3, 7, 16, 64]),
        "threshold": st.sampled_from([0, 0, 1, 5]),
        "caching": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.1]),
        "depth": st.integers(1, 3),
        "drafts": st.sampled_from([0, 0, 1, 3, 6]),
        "host_pages": st.sampled_from([0, 0, 1, 7, 200]),
        "paced": st.booleans(),
        # Runs may be longer than a step's budget; an image fits into the cache.
        "images": st.tuples(st.sampled_from([2, LARGEST, 16, 64]), st.sampled_from([LARGEST, 12, 20, 64])),
        "whole_images": st.booleans(),
        "image_lookahead": st.integers(0, 1),
    }
)
layouts = st.sampled_from(
    [
        full_attention(BLOCK),
        (KVGroup((0,), BLOCK, 7),),
        (KVGroup((0,), BLOCK, None), KVGroup((1,), BLOCK, 6), KVGroup((2,), BLOCK, 6)),
        (KVGroup((0,), BLOCK, None), KVGroup((1,), 2 * BLOCK, 1), KVGroup((2,), 3 * BLOCK, 14)),
        (KVGroup((0,), 2 * BLOCK, None), KVGroup((1,), BLOCK, 6)),
    ]
)
# Few distinct prefixes, so that prompts share blocks.
prompts = st.builds(
    lambda root, shared, tail: ([root] * shared + tail) or [root],
    st.integers(0, 2),
    st.integers(0, 24),
    st.lists(st.integers(0, VOCAB - 1), max_size=20),
)
requests = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": prompts,
            "max_tokens": st.integers(1, 24),
            "stop": st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple),
            "repetition": st.none() | st.builds(RepetitionDetection, st.integers(1, 8), st.just(2)),
            "priority": st.sampled_from([0, 0, 0, 1, 2]),
            "arrives": st.integers(0, 12),
            "aborted": st.none() | st.none() | st.integers(0, 30),
            "fails": st.sampled_from([False] * 9 + [True]),
            "tenant": st.sampled_from(["", "", "a", "b"]),
            "in_parts": st.none() | st.none() | st.integers(0, 20),
            "parked": st.sampled_from([False] * 4 + [True]),
            # Which, and tokens before it.
            "images": st.just([]) | st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=3),
        }
    ),
    min_size=1,
    max_size=10,
)


def make_machine(config: dict, layout: Sequence[KVGroup]) -> Machine:
    """Of one of `configs` and one of `layouts`."""
    if config["whole_images"]:  # as the engine demands: an image, and a token and drafts of every other request
        most = LARGEST + (config["max_num_seqs"] - 1) * (1 + config["drafts"])
        config |= {"budget": max(config["budget"], most), "threshold": config["threshold"] and LARGEST}
    spare, host_pages, paced = config.pop("spare"), config.pop("host_pages") * config["caching"], config.pop("paced")
    num_blocks = 1 + max_blocks(layout, MAX_LEN, make_config(**config).max_in_flight) + spare
    machine = Machine(
        make_config(num_blocks=num_blocks, block_size=BLOCK, max_model_len=MAX_LEN, policy="priority", **config),
        layout,
        host_pages,
    )
    if paced and machine.scheduler._offload is not None:  # beside rows pages come one in a step
        machine.scheduler._offload._pace = lambda prefill_tokens, decodes: CopyPace(1e-12 * (prefill_tokens + decodes), 0.5)
    return machine


def place_images(one: dict) -> list[PromptItem]:
    """Puts placeholders into a prompt as far as there is room; where the images lie."""
    items: list[PromptItem] = []
    at = 0
    for kind, gap in one["images"]:
        at, length = min(at + gap, len(one["prompt"])), 1 + 2 * kind
        if len(one["prompt"]) + length > MAX_LEN - 2:
            break
        one["prompt"][at:at] = [PLACEHOLDER] * length
        items.append(PromptItem(f"image {kind}", at, length))
        at += length
    return items


def live(machine: Machine, wanted: list[dict]) -> None:
    """Has requests come, wait, arrive in parts and be aborted as they say, and runs those that are left to their end."""
    for one in wanted:
        one["prompt"] = one["prompt"][: MAX_LEN - 2] + ([FAILING_TOKEN] if one["fails"] else [])
        one["items"] = items = place_images(one) if one["in_parts"] is None else []
        one["sees"] = list(one["prompt"])
        for item in items:
            values = [image_value(item.identifier, offset) for offset in range(item.length)]
            one["sees"][item.start : item.start + item.length] = values
    for step in range(31):
        for index, one in enumerate(wanted):
            first = one["prompt"][: one["in_parts"]]
            if one["arrives"] == step:
                terms = {name: one[name] for name in ("stop", "priority", "tenant", "repetition")}
                machine.add(
                    make_request(index, first, one["max_tokens"], complete=one["in_parts"] is None, images=one["items"], **terms)
                )
                if one["parked"] and one["in_parts"] is None:
                    machine.scheduler.park(index, "remote_kv", machine.now)
            if one["arrives"] + 2 == step and one["in_parts"] is not None:
                machine.scheduler.extend(ExtendPrompt(index, one["prompt"][len(first) :], last=True), machine.now)
            if one["arrives"] + 3 == step:
                machine.scheduler.unpark(index, machine.now)
        machine.abort(*[index for index, one in enumerate(wanted) if one["aborted"] == step])
        machine.step()
    machine.run()


@pytest.mark.req(
    "RL-04", "RL-07", "RL-10", "RL-17", "SCH-02", "SCH-03", "SCH-05", "SCH-07", "SCH-22", "SCH-24", "CHK-01", "CHK-05"
)
@pytest.mark.req("KV-01", "KV-08", "KV-09", "KV-14", "KV-29", "PC-10", "PC-12", "PC-15", "PC-17", "PC-19", "PC-24")
@pytest.mark.req("PRE-06", "PRE-08", "PRE-14", "PRE-16", "AS-05", "AS-10", "AS-11", "AS-12", "AS-15", "AS-17")
@pytest.mark.req("KV-12", "KV-22", "KV-23", "KV-25", "PC-31")
@settings(max_examples=60)
@given(configs, layouts, requests)
def test_every_stream_is_that_of_the_request_alone(config, layout, wanted):
    machine = make_machine(config, layout)
    live(machine, wanted)
    machine.check_no_leak()
    for index, one in enumerate(wanted):
        stream, finished = machine.streams.get(index, []), machine.finished[index]
        expected = reference(one["sees"], one["max_tokens"], one["stop"], MAX_LEN, repetition=one["repetition"])
        assert machine.ended[f"r{index}"].output_tokens == len(stream)
        assert machine.logprobs.get(index, []) == [-float(token) for token in stream]
        if one["fails"] and finished.reason is not FinishReason.ABORT:
            assert finished.reason is FinishReason.ERROR and stream == []
        elif finished.reason is FinishReason.ABORT:
            assert one["aborted"] is not None and stream == expected[: len(stream)]
        else:
            assert stream == expected
            stopped = expected[-1] in one["stop"]
            capped = len(expected) == min(one["max_tokens"], MAX_LEN - len(one["prompt"]))
            other = FinishReason.LENGTH if capped else FinishReason.REPETITION
            assert finished.reason is (FinishReason.STOP if stopped else other)
            assert finished.stop_token_id == (expected[-1] if stopped else None)


@pytest.mark.req("PRE-14", "SCH-33")
@settings(max_examples=25)
@given(st.integers(1, 3), st.lists(st.integers(20, MAX_LEN - 1), min_size=2, max_size=6))
def test_requests_that_do_not_fit_together_all_finish(depth, lengths):
    """Each may take the whole pool, so that they preempt one another until one is done; and never for ever."""
    machine = Machine(make_config(num_blocks=13, block_size=BLOCK, max_model_len=MAX_LEN, budget=16, depth=depth, caching=False))
    machine.add(*[make_request(index, [index], length) for index, length in enumerate(lengths)])
    machine.run(limit=2_000)
    machine.check_no_leak()
    for index, length in enumerate(lengths):
        assert machine.streams[index] == reference([index], length, (), MAX_LEN)
