"""Everything that a request may ask for, with everything that drafts may come from: no token and no logprob changes.

Of all combinations so many are drawn that each two values of each two dimensions meet.
"""

import itertools
import json
import random
import string
from typing import Any

import msgspec
import pytest
from draft_heads import ReferenceHead, ReferenceMtp, save_head
from lora_adapters import make_adapter
from test_core_with_runner import OUTPUTS, SCHEDULER, VOCAB, requests
from test_draft_heads import HEADS
from test_draft_model import drafts_pay
from test_drafts_in_core import K, Watched
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.engine.commands import LoadAdapter
from penstock.engine.config import LoraConfig, SpeculativeConfig
from penstock.engine.grammar import Grammar
from penstock.engine.messages import AddRequest, Control
from penstock.engine.sampling import SamplingParams

transformers = pytest.importorskip("transformers")

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "method": ("ngram", "suffix", "draft_model", "eagle3", "mtp"),
    "sampling": ("greedy", "random", "drawn"),
    "adjusted": (False, True),
    "lora": (False, True),
    "grammar": (False, True),
    "chunk": (48, 256),
    "depth": (1, 2),
    "room": ("all", "few"),
}
"""`drawn`: random, and the engine draws the drafts of requests without a seed; these here have one."""
CHARACTERS = string.digits + string.ascii_lowercase + '{}[]":,. -_'
GRAMMAR = Grammar("regex", r"(\{\"key\": [0-9]{2}\}, )+", "structured_outputs.regex")
"""It has forced tokens and never ends."""
LORA = LoraConfig(max_loras=2, max_cpu_loras=2, max_lora_rank=8)
Case = dict[str, Any]


def drawn(dimensions: dict[str, tuple[Any, ...]], seed: int = 0) -> list[Case]:
    """Cases in which each two values of two dimensions meet: each time the best of some random ones."""
    rng = random.Random(seed)
    names = list(dimensions)
    left = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(names, 2)
        for a, b in itertools.product(dimensions[one], dimensions[other])
    }
    found: list[Case] = []
    while left:
        some = [{name: rng.choice(dimensions[name]) for name in names} for _ in range(200)]
        best = max(some, key=lambda case: len(left & pairs(case)))
        if left & pairs(best):
            found.append(best)
            left -= pairs(best)
    return found


def pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(case.items(), 2))


CASES = drawn(DIMENSIONS)


class Ground:
    """A target with a tokenizer and an MTP layer, an adapter for it, an EAGLE-3 head, and its answers without drafts."""

    def __init__(self, checkpoint, build_runner, folder) -> None:
        target = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"), attn_implementation="eager").float()
        layer, norm = transformers.models.llama.modeling_llama.LlamaDecoderLayer, type(target.model.norm)
        reference = ReferenceMtp(target, layer, norm, recycles_normed=True)
        self.target = reference.save(checkpoint("llama"), folder / "target")
        config = json.loads((self.target / "config.json").read_text())
        (self.target / "config.json").write_text(json.dumps(config | {"eos_token_id": VOCAB - 1}))
        vocabulary = {character.replace(" ", "Ġ"): at for at, character in enumerate(CHARACTERS)}
        vocabulary |= {f"<{at}>": at for at in range(len(vocabulary), VOCAB)}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
        tokenizer.add_special_tokens([f"<{at}>" for at in range(len(CHARACTERS), VOCAB)])
        tokenizer.save(str(self.target / "tokenizer.json"))
        self.adapter = make_adapter(folder / "adapter", target, scale=0.5)
        made, name, fields = HEADS["eagle3"]
        head = save_head(folder / "head", ReferenceHead(**made).tensors(name), **fields)
        self.drafters = {"draft_model": checkpoint("qwen3"), "eagle3": head}
        self._build, self._known = build_runner, {}

    def answers(self, case: Case):
        """Of each request alone, without drafts."""
        key = tuple((name, case[name]) for name in ("sampling", "adjusted", "lora", "grammar"))
        if key not in self._known:
            runner = self._build(self.target, scheduler=SCHEDULER, lora=LORA if case["lora"] else None)
            tokens, logprobs = {}, {}
            for request in asked(case):
                engine = self.load(Watched(runner, 1, 100), case)
                tokens |= engine.run([request])
                logprobs |= engine.logprobs
            self._known[key] = tokens, logprobs
        return self._known[key]

    def load(self, engine: Watched, case: Case) -> Watched:
        """Its adapter."""
        if case["lora"]:
            engine.core.handle(Control(1, LoadAdapter("own", str(self.adapter))))
            while engine.core.is_reading:
                engine.core.step()
        return engine

    def drafting(self, case: Case) -> Watched:
        """An engine with drafts."""
        lookahead = K if case["method"] in ("draft_model", "eagle3", "mtp") else 0
        scheduler = msgspec.structs.replace(
            SCHEDULER, num_speculative_tokens=K, num_lookahead_tokens=lookahead, max_num_batched_tokens=case["chunk"]
        )
        speculative = SpeculativeConfig(
            method=case["method"],
            num_speculative_tokens=K,
            prompt_lookup_min=1,
            model=self.drafters.get(case["method"]),
            draft_sample_method="probabilistic" if case["sampling"] == "drawn" and lookahead else "greedy",
        )
        runner = self._build(self.target, scheduler=scheduler, speculative=speculative, lora=LORA if case["lora"] else None)
        # The draft model's layers are of another size: they are a group of their own, with blocks of its own.
        few = 34 if case["method"] == "draft_model" else 22
        return self.load(Watched(runner, case["depth"], few if case["room"] == "few" else 120), case)


def asked(case: Case) -> list[AddRequest]:
    """Ten requests, some with a common prefix; what they ask for differs from one to the next."""
    found = []
    for it in requests(False):
        sampling = SamplingParams(
            max_tokens=OUTPUTS,
            temperature=0.0 if case["sampling"] == "greedy" else 0.8,
            top_p=0.95,
            seed=it.index,
            logprobs=2 if it.index % 2 else None,
        )
        if case["adjusted"] and it.index != 3:
            penalties = {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.0 + 0.05 * it.index}
            sampling = msgspec.structs.replace(sampling, **penalties, logit_bias=((7, 2.0), (40, 1.5)))
        guided, adapted = case["grammar"] and it.index % 3 != 1, case["lora"] and it.index % 2 == 0
        found.append(msgspec.structs.replace(it, sampling=sampling, grammar=GRAMMAR if guided else None, lora_id=int(adapted)))
    return found


@pytest.fixture(scope="module")
def ground(checkpoint, build_runner, tmp_path_factory):
    return Ground(checkpoint, build_runner, tmp_path_factory.mktemp("grid"))


def test_each_two_values_meet():
    met = set().union(*map(pairs, CASES))
    for one, other in itertools.combinations(DIMENSIONS, 2):
        for a, b in itertools.product(DIMENSIONS[one], DIMENSIONS[other]):
            assert ((one, a), (other, b)) in met


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
@pytest.mark.req("SD-03", "SD-10", "SD-11", "SD-23", "SPV-10")
def test_drafts_change_nothing_whatever_is_asked_for(ground, monkeypatch, case):
    tokens, logprobs = ground.answers(case)
    drafts_pay(monkeypatch)
    engine = ground.drafting(case)
    try:
        assert engine.run(asked(case)) == tokens
        assert engine.logprobs == logprobs
        assert engine.drafted > 0
        assert (engine.core.stats().preemptions > 0) == (case["room"] == "few")
    finally:
        engine.executor.close()


def test_what_is_asked_for_changes_the_answers(ground):
    """Without that, equal answers would show nothing of it."""
    plain = {"sampling": "greedy", "adjusted": False, "lora": False, "grammar": False}
    known, _ = ground.answers(plain)
    for name, value in (("sampling", "random"), ("adjusted", True), ("lora", True), ("grammar", True)):
        other, _ = ground.answers(plain | {name: value})
        changed = [index for index in known if known[index] != other[index]]
        assert len(changed) >= 3, name
    guided = ground.answers(plain | {"grammar": True})[0][0]
    assert "".join(CHARACTERS[token] for token in guided).startswith('{"key": ')
