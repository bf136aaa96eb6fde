"""Which graph serves a step: pure arithmetic on what has been captured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.config import GraphConfig
from penstock.engine.runner.device.graphs import dispatcher as reasons
from penstock.engine.runner.device.graphs.descriptor import BatchDescriptor, GraphMode, GraphSupport, effective_mode
from penstock.engine.runner.device.graphs.dispatcher import Batch, GraphDispatcher
from penstock.engine.runner.device.graphs.estimate import estimate_graph_bytes
from penstock.engine.runner.device.graphs.sizes import PaddedSizes, default_capture_sizes, first_sizes

SIZES = st.lists(st.integers(1, 600), min_size=1, max_size=40)


def decode(requests: int, **kwargs) -> Batch:
    return Batch(requests, requests, 1, **kwargs)


def mixed(tokens: int, requests: int = 3, **kwargs) -> Batch:
    return Batch(tokens, requests, None, **kwargs)


def captured(mode="FULL_AND_PIECEWISE", sizes=(1, 2, 4, 8, 16), max_num_seqs=16, lora=False, **kwargs) -> GraphDispatcher:
    """A dispatcher all of whose graphs are there."""
    dispatcher = GraphDispatcher(mode, sizes, max_num_seqs, **kwargs)
    for with_lora in {False, lora}:
        for key in dispatcher.full_candidates(with_lora):
            dispatcher.add(GraphMode.FULL, key)
        for key in dispatcher.piecewise_candidates(with_lora):
            dispatcher.add(GraphMode.PIECEWISE, key)
    return dispatcher


# --- sizes ---


@pytest.mark.req("CG-17", "CG-06")
@given(SIZES)
def test_every_number_goes_to_the_next_size_and_never_to_a_smaller_one(sizes: list[int]) -> None:
    table = PaddedSizes(sizes)
    for n in range(max(sizes) + 3):
        assert table.padded(n) == min((size for size in sizes if size >= n), default=None)


@pytest.mark.req("CG-06")
def test_what_padding_adds() -> None:
    by_16 = PaddedSizes(range(16, 513, 16))
    assert [by_16.padded(n) for n in (47, 33, 9)] == [48, 48, 16]


@pytest.mark.req("CG-26")
def test_the_waste_of_each_policy_is_what_arithmetic_says() -> None:
    def percent(sizes) -> float:
        """Share of a padded batch that is padding, averaged over batches of 1 to 512."""
        table = PaddedSizes(list(sizes))
        return round(100 * sum((padded - n) / padded for n in range(1, 513) if (padded := table.padded(n))) / 512, 1)

    assert percent(2**power for power in range(10)) == 24.5
    assert percent(range(16, 513, 16)) == 5.9
    assert percent(range(8, 513, 8)) == 3.2
    assert percent(range(4, 513, 4)) == 1.6
    assert percent([*range(1, 8), *range(8, 513, 8)]) == 2.6
    assert percent([1, 2, 4, *range(8, 513, 8)]) == 2.8
    assert percent(default_capture_sizes(512)) == 5.3


@given(st.integers(1, 2000))
def test_the_default_sizes_are_few_end_at_the_largest_and_waste_little(largest: int) -> None:
    sizes = default_capture_sizes(largest)
    assert sizes[-1] == largest and sizes[0] == 1 and list(sizes) == sorted(set(sizes))
    assert len(default_capture_sizes(512)) == 31
    table = PaddedSizes(sizes)
    assert all(table.padded(n) <= n * 1.5 for n in range(16, largest + 1))


@given(SIZES)
def test_the_first_sizes_serve_every_batch_that_all_of_them_serve(sizes: list[int]) -> None:
    first = first_sizes(sizes)
    assert set(first) <= set(sizes) and list(first) == sorted(first, reverse=True)
    assert max(first) == max(sizes) and min(first) == min(sizes)


# --- descriptors ---


@pytest.mark.req("CG-08")
def test_a_key_is_everything_that_was_decided_on_the_host() -> None:
    key = BatchDescriptor(8, 8, 1, False, "greedy")
    assert key == BatchDescriptor(8, 8, 1, False, "greedy") and hash(key) == hash(BatchDescriptor(8, 8, 1, False, "greedy"))
    others = [(16, 8, 1, False, "greedy"), (8, 4, 1, False, "greedy"), (8, 8, 2, False, "greedy"), (8, 8, None, False, "greedy")]
    others += [(8, 8, 1, True, "greedy"), (8, 8, 1, False, None), (8, None, 1, False, "greedy")]
    assert len({key, *(BatchDescriptor(*other) for other in others)}) == 1 + len(others)


@pytest.mark.req("CG-12")
@pytest.mark.parametrize(
    ("support", "effective"),
    [
        (GraphSupport.NEVER, ["NONE", "PIECEWISE", "PIECEWISE", "PIECEWISE"]),
        (GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"]),
        (GraphSupport.UNIFORM_BATCH, ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"]),
        (GraphSupport.ALWAYS, ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"]),
    ],
)
def test_a_backend_lowers_the_mode_and_says_why(support: GraphSupport, effective: list[str]) -> None:
    asked = ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")
    found = [effective_mode(mode, support) for mode in asked]
    assert [mode for mode, _ in found] == effective
    for wanted, (mode, why) in zip(asked, found, strict=True):
        assert (why is None) is (mode == wanted)
        assert why is None or support.name in why


@pytest.mark.req("CG-12")
def test_verification_needs_uniform_batches() -> None:
    for mode in ("FULL", "FULL_AND_PIECEWISE"):
        assert effective_mode(mode, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, max_query_len=4)[0] == "PIECEWISE"
        assert effective_mode(mode, GraphSupport.UNIFORM_BATCH, max_query_len=4)[0] == "FULL_AND_PIECEWISE"


# --- dispatch ---


@pytest.mark.req("CG-09", "CG-11")
def test_full_for_uniform_piecewise_for_mixed_none_beyond_the_largest() -> None:
    dispatcher = captured()
    assert dispatcher.dispatch(decode(5)) == (GraphMode.FULL, BatchDescriptor(8, 8, 1), reasons.UNIFORM)
    assert dispatcher.dispatch(mixed(5)) == (GraphMode.PIECEWISE, BatchDescriptor(8, None, None), reasons.MIXED)
    assert dispatcher.dispatch(mixed(17)) == (GraphMode.NONE, BatchDescriptor(17, 3, None), reasons.TOO_LARGE)


@pytest.mark.req("CG-10")
def test_a_full_graph_serves_its_own_number_of_requests_alone() -> None:
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE", [8], 8)
    dispatcher.add(GraphMode.FULL, BatchDescriptor(8, 8, 1))
    assert dispatcher.dispatch(mixed(8, 3)).mode is GraphMode.NONE, "as many tokens, of fewer requests"
    dispatcher.add(GraphMode.PIECEWISE, BatchDescriptor(8, None, None))
    assert dispatcher.dispatch(mixed(8, 3)).mode is GraphMode.PIECEWISE
    assert dispatcher.dispatch(mixed(8, 5)).mode is GraphMode.PIECEWISE
    assert dispatcher.dispatch(decode(8)).mode is GraphMode.FULL


@pytest.mark.req("CG-18")
@given(st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_padding_is_never_negative_and_beyond_the_largest_the_numbers_are_the_batchs_own(tokens: int, reqs: int, uniform) -> None:
    dispatcher = captured()
    batch = decode(tokens) if uniform else mixed(tokens, reqs)
    mode, key, reason = dispatcher.dispatch(batch)
    assert key.num_tokens >= batch.num_tokens and (key.num_reqs is None or key.num_reqs >= batch.num_reqs)
    assert (mode is GraphMode.NONE) == (tokens > 16) == (reason == reasons.TOO_LARGE)
    if mode is GraphMode.NONE:
        assert key == BatchDescriptor(batch.num_tokens, batch.num_reqs, batch.uniform_query_len)


@pytest.mark.req("CG-09")
def test_what_has_no_graph_yet_is_padded_to_one_that_is_there() -> None:
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE", (1, 2, 4, 8, 16), 16)
    assert dispatcher.dispatch(decode(3))[::2] == (GraphMode.NONE, reasons.NOT_CAPTURED)
    dispatcher.add(GraphMode.FULL, BatchDescriptor(16, 16, 1))
    assert dispatcher.dispatch(decode(3)).descriptor.num_tokens == 16
    dispatcher.add(GraphMode.FULL, BatchDescriptor(4, 4, 1))
    assert dispatcher.dispatch(decode(3)).descriptor.num_tokens == 4
    dispatcher.clear()
    assert dispatcher.dispatch(decode(3)).mode is GraphMode.NONE


@pytest.mark.req("CG-11")
@pytest.mark.parametrize(
    ("mode", "of_decode", "of_mixed"),
    [
        ("NONE", GraphMode.NONE, GraphMode.NONE),
        ("PIECEWISE", GraphMode.PIECEWISE, GraphMode.PIECEWISE),
        ("FULL", GraphMode.FULL, GraphMode.FULL),
        ("FULL_AND_PIECEWISE", GraphMode.FULL, GraphMode.PIECEWISE),
    ],
)
def test_each_mode_has_its_graphs(mode, of_decode: GraphMode, of_mixed: GraphMode) -> None:
    dispatcher = captured(mode)
    assert dispatcher.dispatch(decode(3)).mode is of_decode
    assert dispatcher.dispatch(mixed(12, 5)).mode is of_mixed
    if mode == "FULL":
        assert dispatcher.dispatch(mixed(12, 5)).descriptor == BatchDescriptor(16, 16, None), "room for 16 requests"
    if mode == "PIECEWISE":
        assert dispatcher.dispatch(decode(3)).reason == reasons.NO_FULL_GRAPH


def test_a_mixed_step_has_the_graph_for_the_fewest_requests_that_hold_its_own() -> None:
    dispatcher = captured("FULL", (4, 16, 32, 128), 100, served_by={None: (None, "few"), "few": ("few",)})

    def found(tokens: int, requests: int) -> tuple[int, int | None, object]:
        key = dispatcher.dispatch(mixed(tokens, requests)).descriptor
        return key.num_tokens, key.num_reqs, key.variant

    assert found(20, 3) == (32, 32, None)
    few = dispatcher.few_candidates(False, "few")
    assert [(key.num_tokens, key.num_reqs) for key in few] == [(128, 16), (128, 64), (32, 16)]
    for key in few:
        dispatcher.add(GraphMode.FULL, key)
    assert found(20, 3) == found(32, 16) == (32, 16, "few"), "another variant that serves it, too"
    assert found(20, 17) == (32, 32, None)
    assert [found(40, requests) for requests in (16, 17, 64, 65)] == [
        (128, 16, "few"),
        (128, 64, "few"),
        (128, 64, "few"),
        (128, 100, None),
    ]
    assert found(3, 2) == (4, 4, None), "padding counts first"
    assert dispatcher.dispatch(mixed(129)).reason == reasons.TOO_LARGE
    assert captured("FULL_AND_PIECEWISE", (4, 16), 100).few_candidates(False, None) == []


def test_steps_that_verify_drafts_have_their_own_graphs() -> None:
    served_by = {"any": ("any",), "verify": ("verify",)}
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE", (1, 2, 4, 8, 16), 16, {"verify": 4}, served_by)
    for key in (*dispatcher.full_candidates(False, "any"), *dispatcher.full_candidates(False, "verify")):
        dispatcher.add(GraphMode.FULL, key)
    for key in dispatcher.piecewise_candidates(False):
        dispatcher.add(GraphMode.PIECEWISE, key)
    assert dispatcher.dispatch(Batch(12, 3, 4, variant="verify")).descriptor == BatchDescriptor(16, 4, 4, False, "verify")
    assert dispatcher.dispatch(decode(5, variant="any")).descriptor == BatchDescriptor(8, 8, 1, False, "any")
    assert dispatcher.dispatch(Batch(9, 3, 3, variant="verify")).mode is GraphMode.PIECEWISE, "drafts that nobody captured for"
    assert dispatcher.dispatch(Batch(20, 5, 4, variant="verify"))[::2] == (GraphMode.NONE, reasons.TOO_LARGE)


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
@given(st.integers(1, 9), st.integers(1, 40), SIZES)
def test_graphs_of_drafts_have_no_more_tokens_than_the_largest_size(mode, length, max_num_seqs, sizes) -> None:
    dispatcher = GraphDispatcher(mode, sizes, max_num_seqs, {"verify": length})
    found = dispatcher.full_candidates(False, "verify")
    assert all(key.num_tokens == key.num_reqs * length <= max(sizes) for key in found)
    assert max((key.num_reqs for key in found), default=0) == min(max_num_seqs, max(sizes) // length)


def test_a_batch_with_adapters_has_its_own_graphs() -> None:
    plain, with_adapters = captured(), captured(lora=True)
    assert plain.dispatch(decode(3, has_lora=True))[::2] == (GraphMode.NONE, reasons.NOT_CAPTURED)
    assert with_adapters.dispatch(decode(3, has_lora=True)).descriptor.has_lora
    assert not with_adapters.dispatch(decode(3)).descriptor.has_lora


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_a_batch_without_adapters_takes_a_graph_with_them_where_there_is_no_other(mode) -> None:
    dispatcher = GraphDispatcher(mode, (4, 8), 8)
    for key in dispatcher.full_candidates(True):
        dispatcher.add(GraphMode.FULL, key)
    for key in dispatcher.piecewise_candidates(True):
        dispatcher.add(GraphMode.PIECEWISE, key)
    found = dispatcher.dispatch(decode(3))
    assert found.mode is not GraphMode.NONE and found.descriptor.has_lora and found.descriptor.num_tokens == 4


def test_a_variant_of_the_step_is_served_by_its_own_full_graph_or_one_that_does_more() -> None:
    served_by = {"greedy": ("greedy", "any"), "any": ("any",)}
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE", (4, 8), 8, served_by=served_by)
    for key in dispatcher.piecewise_candidates(False):
        dispatcher.add(GraphMode.PIECEWISE, key)
    assert dispatcher.dispatch(decode(3, variant="any"))[::2] == (GraphMode.PIECEWISE, reasons.NO_FULL_GRAPH)
    dispatcher.add(GraphMode.FULL, BatchDescriptor(8, 8, 1, False, "greedy"))
    assert dispatcher.dispatch(decode(3, variant="greedy")).descriptor == BatchDescriptor(8, 8, 1, False, "greedy")
    assert dispatcher.dispatch(decode(3, variant="any")).mode is GraphMode.PIECEWISE
    dispatcher.add(GraphMode.FULL, BatchDescriptor(4, 4, 1, False, "any"))
    assert dispatcher.dispatch(decode(3, variant="greedy")).descriptor == BatchDescriptor(4, 4, 1, False, "any"), "less padding"
    dispatcher.add(GraphMode.FULL, BatchDescriptor(4, 4, 1, False, "greedy"))
    assert dispatcher.dispatch(decode(3, variant="greedy")).descriptor.variant == "greedy", "of one size the least to do"
    assert dispatcher.dispatch(decode(3, variant="unheard of")).mode is GraphMode.PIECEWISE


@pytest.mark.req("CG-30")
def test_nothing_runs_in_a_graph_while_memory_is_measured() -> None:
    dispatcher = captured()
    with dispatcher.profile():
        assert dispatcher.dispatch(decode(3)) == (GraphMode.NONE, BatchDescriptor(3, 3, 1), reasons.PROFILING)
    assert dispatcher.dispatch(decode(3)).mode is GraphMode.FULL


def test_a_step_without_a_graph_says_why() -> None:
    assert captured("NONE").dispatch(decode(3)) == (GraphMode.NONE, BatchDescriptor(3, 3, 1), reasons.DISABLED)


# --- memory ---


@pytest.mark.req("CG-25")
def test_the_estimate_is_a_pool_and_the_launches_of_each_graph() -> None:
    def estimate(mode, sizes=(1, 8, 64), step_bytes=1_000_000, tokens=2048, **kinds) -> int:
        return estimate_graph_bytes(GraphConfig(mode=mode, capture_sizes=sizes), 32, step_bytes, tokens, **kinds)

    assert estimate("NONE") == estimate("FULL", sizes=()) == 0
    launches = estimate("PIECEWISE", step_bytes=0)
    assert estimate("PIECEWISE") - launches == 1_000_000 * 64 // 2048, "the largest graph's share of the largest step"
    assert estimate("FULL_AND_PIECEWISE", step_bytes=0, num_variants=2) == 3 * launches
    assert estimate("FULL", step_bytes=0, num_variants=2) == (4 + 2) * launches, "uniform, mixed, and mixed of few requests"
    assert estimate("PIECEWISE", sizes=(1, 8, 16, 64), step_bytes=0) == launches * 4 // 3
    logits = {"step_bytes": 0, "max_num_seqs": 16, "logits_row_bytes": 1000}
    assert estimate("PIECEWISE", **logits) == launches
    assert estimate("FULL_AND_PIECEWISE", **logits) == 2 * launches + 16 * 1000
    assert estimate("FULL_AND_PIECEWISE", **logits, verifies=True) == 3 * launches + 64 * 1000, "of each token"


def test_a_shared_prefix_is_read_apart_where_there_is_a_graph_for_it() -> None:
    """One kind of graph serves steps with adapters and without; without it the step has the graph that it has otherwise."""
    dispatcher = captured(served_by={"greedy": ("greedy", "any"), None: (None,), "any": ("any",)})
    shares = Batch(3, 3, 1, variant="greedy", shares=True)
    dispatcher.add(GraphMode.FULL, BatchDescriptor(4, 4, 1, False, "greedy"))
    assert dispatcher.dispatch(shares)[1:] == (BatchDescriptor(4, 4, 1, False, "greedy"), reasons.UNIFORM)
    found = dispatcher.sharing_candidates(True, "any")
    assert [(key.num_reqs, key.shares) for key in found] == [(16, True), (8, True), (4, True), (2, True)], (
        "a lone request has none"
    )
    for key in found:
        dispatcher.add(GraphMode.FULL, key)
    expected = BatchDescriptor(4, 4, 1, True, "any", shares=True), reasons.SHARED_PREFIX
    assert dispatcher.dispatch(shares)[1:] == dispatcher.dispatch(shares._replace(has_lora=True))[1:] == expected
    assert not dispatcher.dispatch(shares._replace(shares=False)).descriptor.shares
