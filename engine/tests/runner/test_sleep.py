"""What the runner gives back when it sleeps, and that it wakes as it was."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from penstock.engine.config import ConfigError
from penstock.engine.models.layers.rotary import RotaryEmbedding

PROMPT = [5, 9, 200, 31, 77, 8, 3] * 9


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def answer(driver, runner, count: int = 12) -> list[int]:
    play = driver(runner)
    return list(play.generate(play.admit(PROMPT), count, chunk=40))


def tables(thing) -> list[torch.Tensor]:
    """Cosines and sines of every rotary embedding in a model: its buffers."""
    if isinstance(thing, RotaryEmbedding):
        angles = thing(torch.arange(320))
        return [angles.cos, angles.sin]
    ours = type(thing).__module__.startswith("penstock.engine.models")
    parts = thing if isinstance(thing, list) else getattr(thing, "__dict__", {}).values() if ours else ()
    return [table for part in parts for table in tables(part)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A checkpoint whose weights show in a process's memory: about 54 MB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 320}
    path = tmp_path_factory.mktemp("wide")
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None, bos_token_id=None)).save_pretrained(path)
    return path


@pytest.mark.req("MEM-06", "MEM-07", "MEM-09")
def test_memory_falls_by_level_and_rises_by_tag_and_answers_are_the_same(wide, build_runner, driver):
    runner = build_runner(wide)
    runner.initialize_kv_cache(1500)
    expected, kv = answer(driver, runner), 1500 * runner.kv_layout().page_bytes  # the driver writes all of it
    weights = (wide / "model.safetensors").stat().st_size
    awake, before = resident(), tables(runner.model)
    runner.sleep(1)
    at_level_1 = resident()
    assert awake - at_level_1 > 0.9 * kv
    runner.wake_up(["weights", "kv_cache"])
    assert answer(driver, runner) == expected
    runner.sleep(2)
    at_level_2 = resident()
    assert at_level_1 - at_level_2 > 0.9 * weights
    runner.wake_up(["weights"])
    assert before and all(map(torch.equal, tables(runner.model), before)), "buffers come back bit-equal"
    runner.reload_weights(None)
    with_weights = resident()
    assert with_weights - at_level_2 > 0.9 * weights
    runner.wake_up(["kv_cache"])
    assert answer(driver, runner) == expected
    assert resident() - with_weights > 0.9 * kv


def test_reloaded_weights_answer_as_a_runner_that_began_with_them(checkpoint, build_runner, driver, tmp_path):
    runner, other = build_runner(checkpoint("llama")), tmp_path / "other"
    _vary(checkpoint("llama"), other)
    old, new = answer(driver, runner), answer(driver, build_runner(other))
    assert old != new
    runner.reload_weights(str(other))
    assert answer(driver, runner) == new
    runner.sleep(2)
    runner.wake_up(["weights", "kv_cache"])
    runner.reload_weights(None)
    assert answer(driver, runner) == new, "what was read last is read again"
    runner.reload_weights(str(checkpoint("llama")))
    assert answer(driver, runner) == old


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "does not exist"),
        (lambda folder: (folder / "config.json").unlink(), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text('{"architectures": []}'), "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"architectures": 5}'), "cannot be read: TypeError"),
        (lambda folder: _drop_a_tensor(folder), "lacks the tensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 64), "is damaged"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_changes_nothing(checkpoint, loaded, driver, tmp_path, spoil, message):
    runner = loaded("llama")
    expected = answer(driver, runner)
    shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    spoil(tmp_path / "copy")
    with pytest.raises(ConfigError, match=message):
        runner.reload_weights(str(tmp_path / "copy"))
    assert answer(driver, runner) == expected


def test_a_path_that_no_system_takes_changes_nothing(loaded, driver):
    runner = loaded("llama")
    expected = answer(driver, runner)
    with pytest.raises(ConfigError, match="cannot be read: OSError"):
        runner.reload_weights("a" * 5000)
    assert answer(driver, runner) == expected


def test_another_model_is_refused(checkpoint, loaded, driver):
    runner = loaded("llama")
    with pytest.raises(ConfigError, match="another model"):
        runner.reload_weights(str(checkpoint("llama-7to1-llama3-tied")))


def _vary(source: Path, target: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    save_file({name: tensor.roll(1, 0) for name, tensor in tensors.items()}, target / "model.safetensors")


def _drop_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
