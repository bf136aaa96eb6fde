"""Embeddings: equal to transformers', and the same bits whoever is beside a request and however its prompt is cut."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from embedding_models import MODES, reference, write_modules
from tiny_models import CONFIGS, MAX_MODEL_LEN

from penstock.engine.config import ConfigError
from penstock.engine.core.plan import StepResult
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.runner.model_runner import ModelRunner

TEXTS = [[(7 * at + 3 * length) % 257 for at in range(length)] for length in (1, 2, 15, 16, 33, 90)]

Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def embedding_checkpoint(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model of CONFIGS as `AutoModel` saves it: without an LM head, and without `model.` before its tensors."""
    transformers = pytest.importorskip("transformers")

    def make(name: str, mode: str = "last") -> Path:
        path = tmp_path_factory.mktemp(f"{name}-{mode}")
        transformers.AutoModel.from_pretrained(checkpoint(name)).save_pretrained(path)
        size = CONFIGS[name][1].get("hidden_size", 64)
        return write_modules(path, MODES[mode], size)

    return make


def pooled(result: StepResult) -> dict[int, Floats]:
    """Plan's row → its vector."""
    assert result.pooled is not None and not result.counts.any()
    return dict(zip(result.pooled.plan_rows.tolist(), result.pooled.vectors, strict=True))


def alone(driver: Any, runner: ModelRunner, tokens: list[int], chunk: int = 10**6) -> Floats:
    """One request by itself, `chunk` tokens a step."""
    one = driver(runner)
    sequence = one.admit(tokens)
    while sequence.computed + chunk < len(tokens):
        assert pooled(one.step([(sequence, chunk)])) == {}
    return pooled(one.step([(sequence, len(tokens) - sequence.computed)]))[0]


@pytest.mark.parametrize(("name", "mode"), [(name, "last") for name in CONFIGS] + [("llama", "mean"), ("llama", "first")])
def test_every_family_gives_what_transformers_gives(
    embedding_checkpoint: Callable[..., Path], build_runner: Any, driver: Any, name: str, mode: str
) -> None:
    transformers = pytest.importorskip("transformers")
    path = embedding_checkpoint(name, mode)
    model, runner = transformers.AutoModel.from_pretrained(path), build_runner(path)
    assert runner.model.lm_head is None
    # LongRoPE is by its long factors where the context is long; transformers goes by each text.
    for tokens in TEXTS[-1:] if name == "phi3-longrope" else TEXTS:
        np.testing.assert_allclose(alone(driver, runner, tokens), reference(model, tokens, mode), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("mode", MODES)
def test_neither_neighbours_nor_chunks_change_a_bit(
    embedding_checkpoint: Callable[..., Path], build_runner: Any, driver: Any, mode: str
) -> None:
    runner = build_runner(embedding_checkpoint("qwen3", mode), dtype="bfloat16")
    due = [alone(driver, runner, tokens) for tokens in TEXTS]
    for chunk in (1, 7, 16):
        for tokens, vector in zip(TEXTS, due, strict=True):
            assert np.array_equal(alone(driver, runner, tokens, chunk), vector)
    together = driver(runner, seed=1)
    sequences = [together.admit(tokens) for tokens in TEXTS]
    # The first step cuts the longest; the others end in it, and in the second one the longest does.
    first = pooled(together.step([(one, min(len(one.tokens), 40)) for one in sequences]))
    second = pooled(together.step([(sequences[-1], 50)]))
    assert list(first) == [0, 1, 2, 3, 4] and list(second) == [0]
    for vector, expected in zip([*first.values(), *second.values()], due, strict=True):
        assert np.array_equal(vector, expected)


def test_a_row_forgets_who_was_there_before(embedding_checkpoint: Callable[..., Path], build_runner: Any, driver: Any) -> None:
    runner = build_runner(embedding_checkpoint("llama", "mean"))
    due = alone(driver, runner, TEXTS[4])
    one = driver(runner)
    gone = one.admit(TEXTS[5])
    one.step([(gone, 20)])
    one.release(gone)
    sequence = one.admit(TEXTS[4])
    assert sequence.row == gone.row
    assert np.array_equal(pooled(one.step([(sequence, 33)]))[0], due)


def test_weights_are_reloaded_from_what_is_pooled_alike(
    embedding_checkpoint: Callable[..., Path], build_runner: Any, driver: Any
) -> None:
    path = embedding_checkpoint("llama")
    runner = build_runner(path)
    due = alone(driver, runner, TEXTS[3])
    runner.reload_weights(str(embedding_checkpoint("llama")))
    assert np.array_equal(alone(driver, runner, TEXTS[3]), due)
    with pytest.raises(ConfigError, match="pooled otherwise"):
        runner.reload_weights(str(embedding_checkpoint("llama", "mean")))
    assert np.array_equal(alone(driver, runner, TEXTS[3]), due)


def test_cached_tokens_change_nothing_for_the_last_one(
    embedding_checkpoint: Callable[..., Path], build_runner: Any, driver: Any
) -> None:
    runner = build_runner(embedding_checkpoint("llama"))
    due = alone(driver, runner, TEXTS[5])
    one = driver(runner)
    first = one.admit(TEXTS[5])
    one.step([(first, 90)])
    again = one.admit(TEXTS[5], cached=first, blocks=5)
    assert np.array_equal(pooled(one.step([(again, 10)]))[0], due)


@pytest.mark.parametrize("mode", MODES)
def test_hidden_states_that_are_not_finite_fail_their_request_alone(
    embedding_checkpoint: Callable[..., Path], build_runner: Any, driver: Any, mode: str
) -> None:
    runner = build_runner(embedding_checkpoint("llama", mode))
    due = alone(driver, runner, TEXTS[4])
    runner.model.embed_tokens.weight[200] = float("nan")
    one = driver(runner)
    result = one.step([(one.admit([200, *TEXTS[3]]), 17), (one.admit([5] * 33), 33), (one.admit(TEXTS[3] + [200]), 9)])
    # The last one's beginning is sound, and it has not come to its end.
    assert list(result.failed) == [0] and list(pooled(result)) == [1] and result.num_not_finite == 1
    assert "hidden states" in result.failed[0] and "embed_tokens" in result.failed[0]
    runner.model.embed_tokens.weight[200] = 0.0
    assert due.shape == (64,)


@pytest.mark.parametrize("runner", ["auto", "pooling"])
def test_a_model_that_generates_embeds_where_that_is_asked_for(
    checkpoint: Callable[[str], Path], embedding_checkpoint: Callable[..., Path], runner: Any
) -> None:
    path = checkpoint("llama")
    pooling = read_model_config(path, served_names=(), runner=runner).pooling
    if runner == "auto":
        assert pooling is None
    else:
        assert pooling is not None and (pooling.tokens, pooling.normalize, pooling.size) == ("last", True, 64)
    embeds = embedding_checkpoint("llama")
    assert read_model_config(embeds, served_names=(), runner=runner).pooling is not None
    (embeds / "modules.json").unlink()
    assert read_model_config(embeds, served_names=(), runner="auto").pooling is not None, "LlamaModel has no LM head"
    with pytest.raises(ConfigError, match="LlamaModel has no LM head"):
        read_model_config(embeds, served_names=(), runner="generate")


def test_an_lm_head_that_is_there_is_not_loaded(
    checkpoint: Callable[[str], Path], build_runner: Any, driver: Any, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "m"
    shutil.copytree(checkpoint("llama"), path)
    write_modules(path, MODES["mean"], 64, normalize=False)
    runner = build_runner(path)
    model = transformers.AutoModel.from_pretrained(path)
    np.testing.assert_allclose(alone(driver, runner, TEXTS[3]), reference(model, TEXTS[3], "mean"), rtol=1e-4, atol=1e-4)
    runner.warm_up()
    assert runner.config.model.pooling is not None and not runner.config.model.pooling.normalize
    assert runner.config.model.max_model_len == MAX_MODEL_LEN
