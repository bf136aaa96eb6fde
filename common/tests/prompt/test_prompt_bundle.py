"""The prompt bundle: what it reads from a checkpoint, and that its digest names its content."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import BundleError
from penstock.prompt.processor import PromptProcessor


def read(path: Path) -> PromptBundle:
    return PromptBundle.from_checkpoint(path, served_names=("m",), block_size=16, hash_seed="s", max_model_len=64)


def test_a_checkpoint_round_trips_through_json(bundle: PromptBundle) -> None:
    assert bundle.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert bundle.chat_template is not None
    again = PromptBundle.from_json(bundle.to_json())
    assert again == bundle
    assert again.digest == bundle.digest


@pytest.mark.parametrize(
    "change",
    [{"served_names": ("b",)}, {"tokenizer": "{}"}, {"chat_template": None}, {"block_size": 8}, {"hash_seed": "x"}],
    ids=lambda change: next(iter(change)),
)
def test_the_digest_changes_with_each_field(bundle: PromptBundle, change: dict) -> None:
    assert msgspec.structs.replace(bundle, **change).digest != bundle.digest


def test_the_template_file_wins_and_named_templates_yield_their_default(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = {"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert "generation" in str(read(tmp_path).chat_template)
    (tmp_path / "chat_template.jinja").unlink()
    assert read(tmp_path).chat_template == "d"
    (tmp_path / "tokenizer_config.json").unlink()
    assert read(tmp_path).chat_template is None


def test_unusable_files_are_named(checkpoint: Path, tmp_path: Path, bundle: PromptBundle) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(BundleError, match=r"tokenizer_config\.json is not a JSON object"):
        read(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be used"):
        PromptProcessor(read(tmp_path))
    with pytest.raises(BundleError, match="does not compile"):
        PromptProcessor(msgspec.structs.replace(bundle, chat_template="{% if %}"))
    with pytest.raises(BundleError, match="not a prompt bundle"):
        PromptBundle.from_json(b"{}")
