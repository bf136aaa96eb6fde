"""Grammars in the core over each kind of runner: tokens without a choice come several a step, and the streams stay the same."""

import msgspec
import pytest
from lettered_model import LETTERS, with_letters
from test_core_with_runner import OUTPUTS, requests
from test_guides_in_core import ROOMY, Guided

from penstock.engine.config import GraphConfig
from penstock.engine.core.scheduling.guides import Guides
from penstock.engine.grammar import Grammar

FORM = Grammar("regex", r"(record-[0-9]{2}-of-[a-z]-){9}", "structured_outputs.regex")
GUIDED = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    return with_letters(checkpoint("llama"), tmp_path_factory.mktemp("with-a-tokenizer") / "model")


def asked():
    """A crowd, greedy and random in turn; some of it has a grammar that outlasts the output."""
    return [msgspec.structs.replace(it, grammar=FORM if it.index in GUIDED else None) for it in requests(adjusted=False)]


def run(runner, num_blocks=400):
    """The streams, the steps and the preemptions of the crowd."""
    engine = Guided(runner, {}, runner.config.depth, num_blocks)
    try:
        return engine.run(asked()), engine.core.num_steps, engine.core.stats().preemptions
    finally:
        engine.core._grammars.close()


@pytest.fixture(scope="module")
def one_by_one(path, build_runner):
    """On a CPU, where the grammar forces nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guides, "_force", lambda *_: None)
        return run(build_runner(path, scheduler=ROOMY))


@pytest.fixture(scope="module", params=["cpu", "device-1", "device-2", "device-2-graphs"])
def runner(request, path, build_runner, build_device_runner):
    if request.param == "cpu":
        return build_runner(path, scheduler=ROOMY)
    graphs = GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=(1, 2, 4, 8, 16, 64)) if "graphs" in request.param else None
    return build_device_runner(path, scheduler=ROOMY, depth=int(request.param.split("-")[1]), graphs=graphs)


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [400, 22])
def test_forced_tokens_change_no_stream_and_save_steps(runner, one_by_one, num_blocks, monkeypatch):
    forced, execute = [], runner.execute

    def counted(plan):
        forced.append(int(plan.num_drafts.sum()))
        execute(plan)

    monkeypatch.setattr(runner, "execute", counted)
    streams, steps, preempted = run(runner, num_blocks)
    assert streams == one_by_one[0]
    for index in GUIDED:
        text = "".join(LETTERS[token] for token in streams[index])
        assert len(text) == OUTPUTS and text.startswith("record-") and text[9:13] == "-of-"
    assert any(forced)
    if num_blocks == 400:
        assert steps < one_by_one[1]
    else:
        assert preempted
