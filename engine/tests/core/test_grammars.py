"""Grammars in the core: compiled beside the steps, one guide a request, from the first token to the last."""

import json
import string
import threading
import time

import msgspec
import numpy as np
import pytest
from fake_runner import VOCAB
from harness import make_config, make_request
from test_scheduler_hand_cranked import Bench, HandCrankedDevice
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.engine.core.core import EngineCore
from penstock.engine.core.grammar.compiler import Compiler
from penstock.engine.grammar import Grammar
from penstock.engine.messages import GRAMMAR_OPEN, GRAMMAR_REFUSED, FinishReason

CHARACTERS = string.digits + string.ascii_lowercase + '{}[]":,. -_'
EOS = VOCAB - 1
PAIRS = Grammar("regex", r"(\d\d,){5}\d\d", "structured_outputs.regex")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of the fake runner's size: each character a token, and one at the end that ends."""
    vocabulary = {character.replace(" ", "Ġ"): at for at, character in enumerate(CHARACTERS)}
    vocabulary |= {f"<{at}>": at for at in range(len(vocabulary), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{at}>" for at in range(len(CHARACTERS), VOCAB)])
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def compiler(folder):
    """For several engines: the process of xgrammar takes seconds to start."""
    compiler = Compiler(msgspec.structs.replace(make_config().model, path=folder, eos_token_ids=(EOS,), vocab_size=VOCAB))
    yield compiler
    compiler.close()


@pytest.fixture(params=["guidance", "xgrammar"])
def library(request, compiler):
    """Has a bench's grammars enforced by each library."""
    return {"backend": request.param, "compiler": compiler}


class GrammarBench(Bench):
    def __init__(self, folder, depth: int = 1, *, backend="guidance", compiler: Compiler | None = None, **config) -> None:
        made = make_config(depth=depth, **config)
        model = msgspec.structs.replace(made.model, path=folder, eos_token_ids=(EOS,), vocab_size=VOCAB)
        self.config = msgspec.structs.replace(made, model=model)
        self.device = HandCrankedDevice(self.config)
        self.core = EngineCore(self.config, self.device, made.cache.num_blocks or 0, epoch=1)
        self.backend = backend
        if compiler is not None:
            self.core._grammars._compiler = compiler
        self.streams: dict[int, list[int]] = {}
        self.finished = {}

    def ask(self, index: int, grammar: Grammar | None, max_tokens: int = 40, stop=(EOS,), **fields) -> None:
        request = make_request(index, [index % 40 + 1] * 9, max_tokens, stop=stop, **fields)
        if grammar is not None:
            grammar = msgspec.structs.replace(grammar, backend=self.backend)
        self.core.handle(msgspec.structs.replace(request, grammar=grammar))

    def run(self) -> "GrammarBench":
        while self.core.has_work or self.core.is_reading:
            self.crank()
        return self

    def text(self, index: int) -> str:
        return "".join(CHARACTERS[token] for token in self.streams[index] if token < len(CHARACTERS))


class SlowCompiler(Compiler):
    """Waits for a sign."""

    def __init__(self, config) -> None:
        super().__init__(config.model)
        self.may_go, self.begun, self.count = threading.Event(), threading.Event(), 0

    def compile(self, grammar):
        self.count += 1
        self.begun.set()
        assert self.may_go.wait(10)
        return super().compile(grammar)


def slow(bench: GrammarBench) -> SlowCompiler:
    compiler = SlowCompiler(bench.config)
    bench.core._grammars._compiler = compiler
    return compiler


@pytest.mark.req("SO-01", "SO-08", "SO-16", "SO-27")
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_stream_is_what_its_grammar_makes_of_it_alone(folder, depth, library):
    grammars = {0: PAIRS, 1: None, 2: Grammar("choice", '["yes", "no"]', "c"), 3: PAIRS}
    streams = []
    # Room for all; so little that some are preempted; prompts in chunks.
    for config in ({}, {"num_blocks": 17, "budget": 64}, {"budget": 5}):
        bench = GrammarBench(folder, depth, **library, **config)
        for index, grammar in grammars.items():
            bench.ask(index, grammar)
        bench.run()
        streams.append(bench.streams)
        assert bench.text(2) in ("yes", "no")
        for index in (0, 3):
            assert len(bench.text(index)) == 17 and all(len(pair) == 2 for pair in bench.text(index).split(","))
            assert bench.finished[index].reason is FinishReason.STOP and bench.finished[index].stop_token_id is None
        pool = bench.core.scheduler.kv.pool
        assert pool.num_used == 0 and not any(pool.ref_counts)
    assert streams[0] == streams[1] == streams[2]
    alone = GrammarBench(folder, depth)
    alone.ask(1, None)
    assert alone.run().streams[1] == streams[0][1]


def test_grammars_and_preemption_meet(folder, library):
    bench = GrammarBench(folder, 2, **library, num_blocks=17, budget=64)
    for index in range(6):
        bench.ask(index, PAIRS)
    bench.run()
    assert bench.core.scheduler.totals.num_preemptions
    assert all(len(bench.text(index)) == 17 and bench.finished[index].reason is FinishReason.STOP for index in range(6))


@pytest.mark.req("SO-06", "SO-07", "SO-08", "SO-28")
def test_a_request_waits_for_its_grammar_and_holds_up_nobody(folder):
    bench = GrammarBench(folder, max_num_seqs=1)
    compiler = slow(bench)
    bench.ask(0, PAIRS)
    bench.ask(1, None, 5)
    assert compiler.begun.wait(10)
    while 1 not in bench.finished:
        bench.crank()
    assert 0 not in bench.streams and bench.core.scheduler.waiting() == {"grammar": 1}
    assert not bench.core.has_work and bench.core.is_reading
    bench.ask(2, None, 5)
    compiler.may_go.set()
    bench.core._grammars._compiling[PAIRS.source][0].result()
    bench.run()
    assert len(bench.text(0)) == 17
    assert list(bench.finished) == [1, 0, 2], "it came first, and keeps its place"
    assert bench.core.stats().waits["grammar"].total > 0


@pytest.mark.req("SO-03")
def test_equal_grammars_are_compiled_once(folder):
    bench = GrammarBench(folder)
    compiler = slow(bench)
    for index in range(3):
        bench.ask(index, msgspec.structs.replace(PAIRS, param=str(index)))
    compiler.may_go.set()
    bench.run()
    bench.ask(3, PAIRS)
    assert not bench.core.is_reading, "what is compiled is there at once"
    bench.run()
    assert compiler.count == 1 and all(len(bench.text(index)) == 17 for index in range(4))
    bench.ask(4, Grammar("choice", '["a"]', "c"))
    bench.run()
    assert compiler.count == 2 and bench.text(4) == "a"


def test_the_oldest_of_too_many_grammars_is_forgotten(folder, monkeypatch):
    monkeypatch.setattr("penstock.engine.core.grammar.grammars.CACHED", 2)
    bench = GrammarBench(folder)
    compiler = slow(bench)
    compiler.may_go.set()
    for at, word in enumerate("abacaba"):
        bench.ask(at, Grammar("choice", json.dumps([word]), "c"))
        bench.run()
    assert compiler.count == 4, "a, b, c, and b again"


@pytest.mark.req("SO-10")
def test_a_grammar_that_cannot_be_enforced_fails_its_requests_alone(folder):
    bench = GrammarBench(folder)
    bad = Grammar("json_schema", '{"not": {}}', "response_format.json_schema.schema")
    bench.ask(0, bad)
    bench.ask(1, PAIRS)
    bench.ask(2, bad)
    bench.run()
    for index in (0, 2):
        end = bench.finished[index]
        assert (end.reason, end.code, end.param) == (FinishReason.ERROR, GRAMMAR_REFUSED, bad.param)
        assert end.error is not None and end.error.startswith(bad.param) and "$.not" in end.error
    assert bench.finished[1].reason is FinishReason.STOP and 0 not in bench.streams


def test_an_engine_without_the_library_is_at_fault_itself(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    bench = GrammarBench(folder)
    bench.ask(0, PAIRS)
    bench.run()
    assert bench.finished[0].code is None and "install penstock[engine]" in (bench.finished[0].error or "")


def test_clients_that_leave_while_their_grammar_is_compiled_are_forgotten(folder):
    bench = GrammarBench(folder)
    compiler = slow(bench)
    bench.ask(0, PAIRS)
    bench.ask(1, PAIRS)
    bench.core.scheduler.abort([0])
    compiler.may_go.set()
    bench.run()
    assert bench.finished[0].reason is FinishReason.ABORT and len(bench.text(1)) == 17
    bench.core.close()


def test_a_refused_request_has_nothing_compiled(folder):
    bench = GrammarBench(folder)
    compiler = slow(bench)
    bench.ask(0, PAIRS, priority=3)
    bench.ask(1, PAIRS, complete=False)
    bench.crank()
    assert bench.finished[0].reason is FinishReason.ERROR and "priority" in (bench.finished[0].error or "")
    assert "whole prompt" in (bench.finished[1].error or "")
    assert not bench.core.is_reading and not compiler.count


@pytest.mark.parametrize("depth", [1, 2])
def test_a_limit_inside_the_grammar_says_that_it_was_open(folder, depth, library):
    bench = GrammarBench(folder, depth, **library)
    bench.ask(0, PAIRS, max_tokens=7)
    bench.ask(1, Grammar("regex", "a{3}b*", "r"), max_tokens=4)
    bench.ask(2, PAIRS, max_tokens=17)
    bench.run()
    ends = {index: (end.reason, end.stop_reason) for index, end in bench.finished.items()}
    assert ends[0] == (FinishReason.LENGTH, GRAMMAR_OPEN)
    assert ends[1] == (FinishReason.LENGTH, None) or bench.text(1) == "aaa"
    assert ends[2] == (FinishReason.STOP, None), "complete with its last token"


def test_a_request_that_leaves_inside_its_grammar_disturbs_no_other(folder, library):
    bench = GrammarBench(folder, 2, **library)
    for index in range(3):
        bench.ask(index, PAIRS)
    while len(bench.streams.get(1, ())) < 3:
        bench.crank()
    bench.core.scheduler.abort([1])
    bench.run()
    assert bench.finished[1].reason is FinishReason.ABORT and len(bench.streams[1]) < 17
    assert all(len(bench.text(index)) == 17 for index in (0, 2))
    pool = bench.core.scheduler.kv.pool
    assert pool.num_used == 0 and not any(pool.ref_counts)


@pytest.mark.req("SO-17")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_token_against_the_grammar_fails_its_request_alone(folder, depth, library):
    bench = GrammarBench(folder, depth, **library)
    bench.ask(0, PAIRS)
    bench.ask(1, PAIRS)
    bench.ask(2, None)
    while len(bench.streams.get(0, ())) < 3:
        bench.crank()
    guides = bench.core.scheduler._tenancy.guides._guides
    guide = guides[next(row for row in guides if bench.core.scheduler._tenancy.indexes[row] == 0)]
    guide.batcher, guide.fill = None, lambda masks, drafts: None  # every token is allowed
    bench.core.scheduler._tenancy.guides._groups.clear()
    bench.run()
    assert bench.finished[0].reason is FinishReason.ERROR and "does not allow" in (bench.finished[0].error or "")
    assert bench.finished[1].reason is FinishReason.STOP and len(bench.text(1)) == 17
    assert bench.finished[2].reason is not FinishReason.ERROR


def test_compiling_takes_no_time_from_steps(folder):
    bench = GrammarBench(folder)
    compiler = slow(bench)
    bench.ask(0, None, 30)
    bench.ask(1, PAIRS)
    begin = time.perf_counter()
    while 0 not in bench.finished:
        bench.crank()
    assert not compiler.may_go.is_set() and time.perf_counter() - begin < 5
    compiler.may_go.set()
    bench.run()
    assert len(bench.text(1)) == 17


def test_tokens_without_a_choice_come_several_in_a_step(folder, library):
    bench = GrammarBench(folder, **library)
    bench.ask(0, Grammar("regex", r"abcdefghij\d", "structured_outputs.regex"))
    bench.run()
    assert bench.text(0)[:-1] == "abcdefghij" and bench.text(0)[-1].isdigit()
    assert bench.core.num_steps < len(bench.streams[0])


@pytest.mark.req("SO-11", "SO-13")
def test_masks_are_sent_for_rows_with_a_grammar_alone_as_one_array(folder):
    bench = GrammarBench(folder)
    bench.ask(9, PAIRS)
    bench.run()  # compiled now: those that follow wait for nothing, and run beside the others
    submitted, sent = [], []
    for verb, seen in (("submit", submitted), ("sample", sent)):
        call = getattr(bench.device, verb)
        setattr(bench.device, verb, lambda given, *more, call=call, seen=seen: (seen.append(given), call(given, *more)))
    for index, grammar in enumerate((None, PAIRS, None, PAIRS, None)):
        bench.ask(index, grammar)
    bench.run()
    some = 0
    for plan, inputs in zip(submitted, sent, strict=True):
        rows = [row for row in inputs.masked_rows if plan.samples[row]]
        assert rows == sorted(rows) == list(inputs.masked_rows) and len(rows) <= 2 < 5
        drafts = plan.num_drafts[rows].sum() if len(plan.num_drafts) else 0
        if len(rows):
            assert isinstance(inputs.bitmask, np.ndarray) and inputs.bitmask.dtype == np.int32
            assert len(inputs.bitmask) == len(rows) + drafts
            some += len(rows) < np.count_nonzero(plan.samples)
    assert some, "no step had rows of both kinds"


def test_what_came_of_grammars_is_told(folder):
    bench = GrammarBench(folder)
    assert bench.core.stats().grammars is None
    bench.ask(0, PAIRS)
    bench.run()
    bench.ask(1, PAIRS)
    bench.ask(2, Grammar("regex", "(", "structured_outputs.regex"))
    bench.run()
    told = bench.core.stats().grammars
    assert told is not None and (told.compiled, told.failed, told.cached) == (1, 1, 1) and told.compile_s > 0
