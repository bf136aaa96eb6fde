"""A prefill and a decode core with real models and real connections: equal answers, and nothing held after any abort."""

import socket
import sys
import threading
import time

import msgspec
import numpy as np
import pytest
from stages_here import NUM_BLOCKS, Stages
from test_core_with_runner import SCHEDULER, requests
from test_draft_model import drafts_pay
from test_drafts_in_core import K

from penstock.engine.config import ConfigError, ParallelConfig, SpeculativeConfig, TransferConfig
from penstock.engine.connectors.transfer import reader as reader_module
from penstock.engine.core.executor import RUNNERS
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.core.memory import offload_size
from penstock.engine.messages import AbortRequests, FinishReason, RemotePrefix
from penstock.engine.models.layers.shard import Stage
from penstock.engine.parallel.headless import HeadlessNode
from penstock.engine.sampling import SamplingParams
from testing.ports import free_ports

NGRAM = {
    "scheduler": msgspec.structs.replace(SCHEDULER, num_speculative_tokens=3),
    "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
}


class Side:
    """One core, turned by hand."""

    def __init__(self, config, role, secret, transports, lease_s):
        [port] = free_ports(1)
        self.transfer = TransferConfig(
            role=role, engine_id=f"{role}-{port}", secret=secret, port=port, lease_s=lease_s, transports=transports
        )
        executor, blocks = built(msgspec.structs.replace(config, transfer=self.transfer))
        self.core = build_core(msgspec.structs.replace(config, transfer=self.transfer), executor, blocks, 1)
        self.tokens, self.finished, self.computed = {}, {}, 0
        submit = executor.submit

        def counted(plan, masked):
            self.computed += int((plan.num_new_tokens[: len(plan.rows)]).sum()) - int(plan.num_drafts.sum())
            submit(plan, masked)

        executor.submit = counted

    def add(self, request):
        self.tokens[request.index] = []
        self.core.handle(request)

    def step(self):
        if (frame := self.core.step()) is not None:
            offsets, ids = np.frombuffer(frame.offsets, np.int32), np.frombuffer(frame.token_ids, np.int32)
            for at, index in enumerate(np.frombuffer(frame.indexes, np.int64).tolist()):
                self.tokens[index] += ids[offsets[at] : offsets[at + 1]].tolist()
            self.finished |= {it.index: it for it in frame.finished}

    def run(self, *indexes):
        deadline = time.monotonic() + 120
        while not set(indexes) <= set(self.finished):
            assert time.monotonic() < deadline
            self.step()

    def lend(self, request):
        """What a prefill request's answer says."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        self.add(msgspec.structs.replace(request, sampling=sampling, lends=True))
        self.run(request.index)
        lent = self.finished.pop(request.index).lent
        while self.core._offload.transfer.leases.is_due:
            self.step()  # the pages are written and granted
        return None if lent is None else self.remote(lent)

    def remote(self, lent):
        blocks = [len(blocks) for blocks in lent.blocks]
        where = lent.engine_id, lent.hosts, lent.port
        return RemotePrefix(lent.lease, *where, lent.fingerprint, lent.num_tokens, blocks)

    def told(self):
        return self.core.stats().offload

    def settle(self):
        """Nothing is held any more: no block, no lease, no slot of the host's memory, no request."""
        offload, deadline = self.core._offload, time.monotonic() + 60
        while True:
            self.step()
            pinned = len(offload.tier._readers) + len(offload.tier._writing)
            told, scheduler = self.told().transfer, self.core.scheduler
            held = told.leases, pinned, scheduler.kv.pool.num_used, scheduler.num_running, sum(scheduler.waiting().values())
            if not any(held) and not offload.transfer.pulls.is_moving:
                return
            assert time.monotonic() < deadline, held
            time.sleep(0.005)


def in_ranks(config, ranks, nodes):
    [port] = free_ports(1)
    where = {"nnodes": nodes, "master_addr": "127.0.0.1", "master_port": port}
    return msgspec.structs.replace(config, parallel=ParallelConfig(tensor_parallel_size=ranks, **where))


def in_stages(config, stages):
    scheduler = msgspec.structs.replace(config.scheduler, pipeline_stages=stages)
    parallel = ParallelConfig(pipeline_parallel_size=stages)
    return msgspec.structs.replace(config, parallel=parallel, scheduler=scheduler, depth=stages)


def built(config):
    """What runs the plans: stages are in this process, where tests can reach them."""
    if config.parallel.nnodes == 2:
        threading.Thread(target=other_node, args=[config], daemon=True).start()
    if config.parallel.pipeline_parallel_size == 1:
        return build_executor(config)
    stages = Stages(config)
    largest = max(stages.call("kv_layout"), key=lambda layout: layout.page_bytes)
    stages.call("initialize_offload", offload_size(config, largest, stages.call("page_keeper")).pages)
    stages.call("warm_up")
    return stages, NUM_BLOCKS


def other_node(config):
    """The second of two nodes: it has an address, an engine id and a file with the secret of its own."""
    secret = config.transfer.secret.with_name("the same secret")
    secret.write_bytes(config.transfer.secret.read_bytes())
    transfer = msgspec.structs.replace(config.transfer, host="127.0.0.2", engine_id="node-1", secret=secret)
    parallel = msgspec.structs.replace(config.parallel, node_rank=1)
    HeadlessNode(msgspec.structs.replace(config, transfer=transfer, parallel=parallel), RUNNERS["cpu"]).run()


@pytest.fixture
def pair(checkpoint, build_runner, tmp_path):
    """Makes both sides, and one that is alone."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of many bytes")
    sides = []

    def make(family="llama", transports=("tcp",), lease_s=30.0, stages=(1, 1, 1), ranks=(1, 1, 1), nodes=(1, 1, 1), **how):
        runner = build_runner(checkpoint(family), **{"scheduler": SCHEDULER, **how})
        config, page = runner.config, runner.kv_layout().page_bytes
        cache = msgspec.structs.replace(config.cache, num_blocks=120, offload_bytes=400 * page)
        config = msgspec.structs.replace(config, cache=cache)
        roles = ("kv_producer", "kv_consumer", "kv_both")
        for role, count, number, places in zip(roles, stages, ranks, nodes, strict=True):
            of_side = in_stages(config, count) if count > 1 else in_ranks(config, number, places)
            sides.append(Side(of_side, role, secret, transports, lease_s))
        return sides[-3:]

    yield make
    for side in sides:
        side.core.close()


def poison(lender, monkeypatch):
    """Has the lender send other bytes than it holds sums of."""
    [outlet] = lender._outlets.values()
    send = outlet.send

    def poisoned(stream, slots):
        lender._slots[slots] ^= 1
        send(stream, slots)

    monkeypatch.setattr(outlet, "send", poisoned)


def goes_on_from(decode, alone, request, remote) -> None:
    """The replica answers as one that has computed all of it, and computes no token that was sent."""
    decode.computed = 0
    decode.add(msgspec.structs.replace(request, remote=remote))
    decode.run(request.index)
    assert decode.tokens[request.index] == alone.tokens[request.index]
    rest = len(request.prompt_token_ids) - remote.num_tokens
    assert decode.computed == rest + len(decode.tokens[request.index]) - 1, "a token that was sent has been computed"


def several(number=4):
    """Greedy and random ones with prompts of their own, which fill a block at least."""
    found = [it for it in requests(adjusted=False) if len(it.prompt_token_ids) > 40]
    return [msgspec.structs.replace(it, prompt_token_ids=[it.index, *it.prompt_token_ids]) for it in found[:number]]


@pytest.mark.req("PD-04", "PD-09", "PD-10", "PD-15")
@pytest.mark.parametrize(
    ("family", "transport", "how"),
    [
        pytest.param("llama", "shm", {}, id="full attention"),
        pytest.param("gemma2", "tcp", {}, id="windows"),
        pytest.param("llama", "shm", NGRAM, id="drafts"),
        pytest.param("llama", "tcp", {"kv_dtype": "fp8_e4m3"}, id="fp8 cache"),
    ],
)
def test_a_pair_answers_as_one_core_and_computes_no_token_that_it_was_sent(pair, family, transport, how):
    prefill, decode, alone = pair(family, (transport,), **how)
    block = prefill.core.scheduler.kv.block_size
    for request in several():
        alone.add(request)
        alone.run(request.index)
        remote = prefill.lend(request)
        assert remote.num_tokens == (len(request.prompt_token_ids) - 1) // block * block
        assert prefill.core.scheduler.kv.pool.num_used == 0, "a lease holds no block of the cache"
        decode.computed, before = 0, decode.told().transfer.pulled_bytes
        decode.add(msgspec.structs.replace(request, remote=remote))
        decode.run(request.index)
        assert decode.tokens[request.index] == alone.tokens[request.index]
        rest = len(request.prompt_token_ids) - remote.num_tokens
        assert decode.computed == rest + len(decode.tokens[request.index]) - 1 or how, "the ledger of computed tokens"
        assert decode.told().transfer.pulled_bytes > before
    assert decode.told().transfer.failed_pages == 0
    report = decode.core.stats().report
    assert 0 < report.transfer_s + report.transfer_s_per_token < 10
    lent = prefill.core.stats().report
    assert lent.transfer_s == lent.transfer_s_per_token == 0, "it has fetched nothing"
    prefill.settle()
    decode.settle()


@pytest.mark.req("PD-04", "PD-13", "PD-14")
def test_only_what_is_missing_is_read_and_a_full_local_hit_releases_the_lease_at_once(pair):
    prefill, decode, _ = pair()
    request = several(1)[0]
    block = prefill.core.scheduler.kv.block_size
    half = msgspec.structs.replace(request, index=90, prompt_token_ids=request.prompt_token_ids[: 2 * block])
    decode.add(half)
    decode.run(90)
    remote = prefill.lend(request)
    decode.add(msgspec.structs.replace(request, remote=remote))
    decode.run(request.index)
    pages = decode.told().transfer.pulled_bytes // decode.core._offload._page_bytes
    assert pages == remote.num_tokens // block - 2, "two blocks were there"
    again = prefill.lend(msgspec.structs.replace(request, index=91))
    began = time.monotonic()
    decode.add(msgspec.structs.replace(request, index=92, remote=again))
    decode.run(92)
    prefill.settle()
    assert time.monotonic() - began < 20 and prefill.told().transfer.expired_leases == 0, "long before the lease's end"
    assert decode.told().transfer.pulls == 1 and decode.tokens[92] == decode.tokens[request.index]
    decode.settle()


@pytest.mark.req("PD-16", "PD-17", "PD-18", "PD-24")
def test_a_hundred_pairs_that_are_aborted_anywhere_hold_nothing_afterwards(pair):
    """At the prefill side while it waits or computes; between the two; at the decode side while it waits, reads, loads or
    generates. Every fifth is not aborted, and its answer is that of one core."""
    prefill, decode, alone = pair(lease_s=5.0, transports=("shm", "tcp"))
    rng, batch = np.random.default_rng(0), several()
    expected = {}
    for request in batch:
        alone.add(request)
        alone.run(request.index)
        expected[request.index] = alone.tokens[request.index]
    whole = 0
    for number in range(100):
        request = msgspec.structs.replace(batch[number % len(batch)], index=1000 + number, cache_salt=str(number // 8))
        phase = int(rng.integers(0, 4)) if number % 5 else 4
        if phase == 0:  # the prefill side
            prefill.add(msgspec.structs.replace(request, lends=True))
            for _ in range(int(rng.integers(0, 3))):
                prefill.step()
            prefill.core.handle(AbortRequests([request.index]))
            continue
        remote = prefill.lend(request)
        if phase == 1:  # nobody comes for the pages
            continue
        decode.add(msgspec.structs.replace(request, remote=remote))
        if phase == 4:
            decode.run(request.index)
            assert decode.tokens[request.index] == expected[batch[number % len(batch)].index]
            whole += 1
            continue
        for _ in range(int(rng.integers(0, 12))):
            decode.step()
        decode.core.handle(AbortRequests([request.index]))
    decode.settle()
    prefill.settle()
    assert whole == 20 and decode.told().transfer.pulls > whole // 2
    assert prefill.told().transfer.expired_leases > 0, "those that nobody came for"


@pytest.mark.req("PD-03", "PD-06", "PD-20", "PD-21", "PD-23", "PD-34")
@pytest.mark.parametrize("fault", ["gone", "expired", "stopped", "poisoned"])
def test_pages_that_do_not_come_are_computed_and_counted(pair, monkeypatch, fault):
    prefill, decode, alone = pair(lease_s=0.2 if fault == "expired" else 30.0)
    request, other = several(2)
    alone.add(request)
    alone.run(request.index)
    remote = prefill.lend(request)
    lender = prefill.core._executor._runner._agent._lender
    match fault:
        case "gone":
            lender.close()
        case "expired":
            # The clocks of both hosts differ by hours: only durations count.
            monkeypatch.setattr(decode.core._offload.transfer.pulls, "_renewed_at", time.time() + 7200)
            while prefill.told().transfer.leases:
                prefill.step()
                time.sleep(0.01)
        case "stopped":  # it takes connections and says nothing
            monkeypatch.setattr(reader_module, "PULL_S", 0.5)
            monkeypatch.setattr(lender, "_serve", lambda sock: time.sleep(5))
        case _:
            poison(lender, monkeypatch)
    decode.computed = 0
    decode.add(msgspec.structs.replace(request, remote=remote))
    if fault == "stopped":
        decode.add(other)
        decode.run(other.index)
        assert not decode.tokens[request.index], "steps go on, however long the transfer takes"
        decode.computed = 0
    decode.run(request.index)
    assert decode.tokens[request.index] == alone.tokens[request.index]
    assert decode.computed == len(request.prompt_token_ids) + len(decode.tokens[request.index]) - 1, "nothing has landed"
    assert decode.told().transfer.failed_pages > 0 and decode.finished[request.index].error is None
    decode.settle()


@pytest.mark.req("PD-19")
def test_a_decode_replica_that_dies_holds_the_pages_until_the_lease_ends_and_no_longer(pair):
    """A dead process renews nothing and releases nothing: here the decode side is not turned any more."""
    prefill, decode, _ = pair(lease_s=1.0)
    request = several(1)[0]
    decode.add(msgspec.structs.replace(request, remote=prefill.lend(request)))
    assert prefill.told().transfer.leases == 1
    prefill.settle()
    assert prefill.told().transfer.expired_leases == 1


@pytest.mark.req("PD-22")
def test_a_request_that_is_preempted_after_its_pages_came_computes_and_does_not_ask_again(pair, checkpoint, build_runner):
    prefill, decode, alone = pair()
    request = several(1)[0]
    remote = prefill.lend(request)
    decode.add(msgspec.structs.replace(request, remote=remote))
    while not decode.tokens[request.index]:
        decode.step()
    scheduler = decode.core.scheduler
    scheduler.preempt_all(time.time())
    assert scheduler.kv.reset()
    decode.run(request.index)
    alone.add(request)
    alone.run(request.index)
    assert decode.tokens[request.index] == alone.tokens[request.index] and decode.told().transfer.pulls == 1
    decode.settle()
    prefill.settle()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fingerprint": "0" * 32}, "remote_fingerprint"),
        ({"num_tokens": 16}, "remote_block_ids has"),
        ({"num_tokens": 10_000}, "remote_num_tokens is 10000"),
        ({"num_tokens": 7}, "remote_num_tokens is 7"),
        ({"num_blocks": [1]}, "remote_block_ids has"),
    ],
)
def test_params_that_do_not_fit_are_refused_or_where_they_are_optional_ignored(pair, change, words, caplog):
    prefill, decode, alone = pair()
    request = several(1)[0]
    remote = msgspec.structs.replace(prefill.lend(request), **change)
    decode.add(msgspec.structs.replace(request, remote=remote))
    decode.run(request.index)
    ended = decode.finished[request.index]
    assert ended.reason is FinishReason.ERROR and ended.param == "kv_transfer_params" and words in ended.error
    decode.add(msgspec.structs.replace(request, index=77, remote=msgspec.structs.replace(remote, optional=True)))
    decode.run(77)
    alone.add(request)
    alone.run(request.index)
    assert decode.tokens[77] == alone.tokens[request.index] and words in caplog.text
    decode.settle()
    prefill.settle()  # the lease was released, and has not run out
    assert prefill.told().transfer.expired_leases == 0


def test_a_restarted_replica_under_the_same_address_is_another_one(pair):
    prefill, decode, _ = pair()
    request = several(1)[0]
    remote = msgspec.structs.replace(prefill.lend(request), engine_id="kv_producer-of-before", optional=True)
    decode.add(msgspec.structs.replace(request, remote=remote))
    decode.run(request.index)
    assert decode.told().transfer.failed_pages > 0 and decode.told().transfer.pulled_bytes == 0
    decode.settle()


@pytest.mark.req("PD-04", "PD-15", "DX-09")
@pytest.mark.parametrize(("family", "stages", "transport"), [("llama", 2, "shm"), ("qwen3-windows", 3, "tcp")])
def test_each_stage_reads_the_pages_of_its_own_layers(pair, family, stages, transport):
    prefill, decode, alone = pair(family, (transport,), stages=(stages, stages, 1))
    for request in several(3):
        alone.add(request)
        alone.run(request.index)
        remote = prefill.lend(request)
        goes_on_from(decode, alone, request, remote)
    assert decode.told().transfer.pulls == 3 and decode.told().transfer.failed_pages == 0
    ports = [runner._agent._lender.port for runner in prefill.core._executor.runners]
    assert ports == [prefill.transfer.port + rank for rank in range(stages)]
    prefill.settle()
    decode.settle()
    assert prefill.told().transfer.expired_leases == 0, "all ranks have released"


@pytest.mark.req("PD-04", "DX-09")
def test_what_a_draft_model_in_the_last_stage_knows_of_a_prompt_is_sent_too(pair, checkpoint, monkeypatch):
    """Its keys and values are in that stage's pages: the decode replica's drafts are those of a replica that is alone."""
    drafts_pay(monkeypatch)
    scheduler = msgspec.structs.replace(SCHEDULER, num_speculative_tokens=K, num_lookahead_tokens=K)
    speculative = SpeculativeConfig(method="draft_model", num_speculative_tokens=K, model=checkpoint("llama"))
    prefill, decode, alone = pair(stages=(2, 2, 1), scheduler=scheduler, speculative=speculative)
    for request in several():
        alone.add(request)
        alone.run(request.index)
        decode.add(msgspec.structs.replace(request, remote=prefill.lend(request)))
        decode.run(request.index)
        assert decode.tokens[request.index] == alone.tokens[request.index]
    told, expected = (side.core.stats().step.drafts for side in (decode, alone))
    assert (told.drafted, told.accepted) == (expected.drafted, expected.accepted) and sum(told.accepted) > 20
    assert decode.told().transfer.pulls == 4 and decode.told().transfer.failed_pages == 0


@pytest.mark.req("PD-20", "PD-21", "PD-23")
@pytest.mark.parametrize("fault", ["gone", "revoked", "poisoned", "lacking"])
def test_a_page_that_one_stage_lacks_is_computed_by_all(pair, monkeypatch, fault):
    prefill, decode, alone = pair(stages=(2, 2, 1), lease_s=1.0 if fault in ("gone", "revoked") else 30.0)
    [request] = several(1)
    alone.add(request)
    alone.run(request.index)
    remote = prefill.lend(request)
    lender = prefill.core._executor.runners[1]._agent._lender
    block, come = prefill.core.scheduler.kv.block_size, 0
    match fault:
        case "gone":
            lender.close()
        case "revoked":
            lender.revoke(remote.lease)
        case "poisoned":
            poison(lender, monkeypatch)
        case _:  # the last page
            lender._leases[remote.lease].popitem()
            come = remote.num_tokens // block - 1
    decode.computed = 0
    decode.add(msgspec.structs.replace(request, remote=remote))
    decode.run(request.index)
    assert decode.tokens[request.index] == alone.tokens[request.index]
    rest = len(request.prompt_token_ids) - come * block
    assert decode.computed == rest + len(decode.tokens[request.index]) - 1, "pages that one stage has are of no use"
    assert decode.told().transfer.failed_pages == remote.num_tokens // block - come
    decode.settle()
    prefill.settle()


@pytest.mark.parametrize("other", ["stages", "layers"])
def test_replicas_with_other_stages_read_nothing_of_each_other(pair, monkeypatch, other):
    """Another number of stages, or other layers in as many."""
    if other == "layers":
        divided = Stage.layers
        monkeypatch.setattr(Stage, "layers", lambda stage, sizes: divided(stage, [sum(sizes), *sizes[1:]]))
    prefill, _, alone = pair("qwen3-windows", stages=(2, 1, 1), lease_s=1.0)
    monkeypatch.undo()
    decode = alone if other == "stages" else pair("qwen3-windows", stages=(1, 2, 1))[1]
    [request] = several(1)
    remote = prefill.lend(request)
    decode.add(msgspec.structs.replace(request, remote=remote))
    decode.run(request.index)
    ended = decode.finished[request.index]
    assert ended.reason is FinishReason.ERROR and "remote_fingerprint" in ended.error and "stages" in ended.error
    decode.add(msgspec.structs.replace(request, index=77, remote=msgspec.structs.replace(remote, optional=True)))
    decode.run(77)
    alone.add(msgspec.structs.replace(request, index=78))
    alone.run(78)
    assert decode.tokens[77] == alone.tokens[78] and decode.told().transfer.pulls == 0
    decode.settle()
    prefill.settle()


@pytest.mark.req("DX-04", "PD-04")
@pytest.mark.parametrize("ranks", [(1, 2, 1), (2, 1, 1)], ids=["from one to two", "from two to one"])
def test_a_latent_goes_from_one_rank_to_one_however_many_have_it(pair, ranks):
    """All ranks load what one of them has read; another one lends nothing, and has no port for that."""
    prefill, decode, alone = pair("deepseek-v2", ("shm",), ranks=ranks)
    for request in several(2):
        alone.add(request)
        alone.run(request.index)
        decode.computed, remote = 0, prefill.lend(request)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((remote.hosts[0], remote.port + 1))
        decode.add(msgspec.structs.replace(request, remote=remote))
        decode.run(request.index)
        assert decode.tokens[request.index] == alone.tokens[request.index]
        rest = len(request.prompt_token_ids) - remote.num_tokens
        assert decode.computed == rest + len(decode.tokens[request.index]) - 1
    told = decode.told().transfer
    assert told.failed_pages == 0 < told.pulled_bytes
    prefill.settle()
    decode.settle()


@pytest.mark.req("DX-04", "PD-04")
@pytest.mark.parametrize(
    ("family", "ranks", "transport", "ports"),
    [
        pytest.param("llama", (2, 1, 1), "tcp", 2, id="two parts become one"),
        pytest.param("gemma2", (1, 2, 1), "shm", 1, id="one part becomes two, with windows"),
    ],
)
def test_heads_that_are_cut_among_other_numbers_of_ranks_are_put_together(pair, family, ranks, transport, ports):
    """In float32 the tokens are the same, too."""
    prefill, decode, alone = pair(family, (transport,), ranks=ranks)
    for request in several(2):
        alone.add(request)
        alone.run(request.index)
        remote = prefill.lend(request)
        assert len(remote.hosts) == ports
        goes_on_from(decode, alone, request, remote)
    assert decode.told().transfer.failed_pages == 0 < decode.told().transfer.pulled_bytes
    prefill.settle()
    decode.settle()
    assert prefill.told().transfer.expired_leases == 0, "each rank has released at each that it has read from"


@pytest.mark.req("DX-04", "PD-04")
@pytest.mark.parametrize(
    ("family", "ranks", "nodes", "hosts"),
    [
        pytest.param("llama", (2, 2, 1), (2, 1, 1), ["127.0.0.1", "127.0.0.2"], id="a part on each node"),
        pytest.param("deepseek-v2", (2, 1, 1), (2, 1, 1), ["127.0.0.1"], id="a latent from one of two nodes"),
        pytest.param("deepseek-v2", (1, 2, 1), (1, 2, 1), ["127.0.0.1"], id="a latent to both of two nodes"),
    ],
)
def test_ranks_of_several_nodes_lend_and_read_pages_each_at_its_own_address(pair, family, ranks, nodes, hosts):
    """A rank cannot map the memory of another node. So a node that has the same pages as another keeps them, too."""
    prefill, decode, alone = pair(family, ranks=ranks, nodes=nodes)
    [request] = several(1)
    alone.add(request)
    alone.run(request.index)
    remote = prefill.lend(request)
    assert remote.hosts == hosts and remote.engine_id == prefill.transfer.engine_id
    for other in {"127.0.0.1", "127.0.0.2"} - set(hosts):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, remote.port))
    goes_on_from(decode, alone, request, remote)
    prefill.settle()
    assert prefill.told().transfer.expired_leases == 0, "all ranks that read have released"
    decode.settle()
    assert decode.told().transfer.failed_pages == 0


def test_an_address_that_one_rank_cannot_lend_at_is_bad_input(pair, monkeypatch):
    [port] = free_ports(1)
    monkeypatch.setattr(sys.modules[__name__], "free_ports", lambda count: [port])
    told = f"rank 1 alone has refused open_transfer: --kv-transfer-config: 127.0.0.1:{port + 1} cannot be listened on: Address al"
    with socket.create_server(("127.0.0.1", port + 1)), pytest.raises(ConfigError, match=told):
        pair(ranks=(2, 1, 1))
