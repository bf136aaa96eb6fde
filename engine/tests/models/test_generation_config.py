"""What a checkpoint's generation_config.json, and who starts the engine, make the default of requests."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import ConfigError, GenerationDefaults
from penstock.engine.loading.generation_config import read_defaults, read_eos_token_ids

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True, "eos_token_id": [2, 7]}


def write(folder: Path, fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_the_authors_sampling_is_the_default_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    write(tmp_path, QWEN | {"min_p": None, "max_new_tokens": 100})
    found = read_defaults(tmp_path, "auto", {"temperature": 0})
    assert found == GenerationDefaults(temperature=0, top_p=0.8, top_k=20, repetition_penalty=1.05, max_tokens=100)
    [line] = caplog.messages
    assert "temperature 0 (--override-generation-config)" in line
    assert f"top_k 20 ({tmp_path}/generation_config.json)" in line and "do_sample" not in line


@pytest.mark.parametrize(
    "fields", [None, {}, {"eos_token_id": 2, "top_k": None}], ids=["no file", "empty", "nothing of sampling"]
)
def test_a_checkpoint_that_says_nothing_has_openais(tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: Any) -> None:
    caplog.set_level(logging.INFO)
    if fields is not None:
        write(tmp_path, fields)
    assert read_defaults(tmp_path, "auto", {}) == GenerationDefaults() and not caplog.messages


def test_vllm_means_openais_but_for_what_is_overridden(tmp_path: Path) -> None:
    write(tmp_path, QWEN | {"temperature": "hot"})  # nobody wants to know
    assert read_defaults(tmp_path, "vllm", {}) == GenerationDefaults()
    assert read_defaults(tmp_path, "vllm", {"top_k": 5}) == GenerationDefaults(top_k=5)
    assert read_eos_token_ids(tmp_path, "vllm", {"eos_token_id": 2}) == (2, 7), "what ends an answer is no sampling"


def test_null_takes_a_default_away(tmp_path: Path) -> None:
    write(tmp_path, {"top_k": 20, "top_p": 0.8})
    assert read_defaults(tmp_path, "auto", {"top_k": None}) == GenerationDefaults(top_p=0.8)


def test_a_folder_stands_in_for_the_checkpoint(tmp_path: Path) -> None:
    model, other = write(tmp_path / "model", QWEN), write(tmp_path / "other", {"top_k": 3, "max_new_tokens": 50})
    assert read_defaults(model, str(other), {}) == GenerationDefaults(top_k=3, max_tokens=50, max_tokens_limit=50)
    assert read_eos_token_ids(model, str(other), {"eos_token_id": 9}) == (2, 7), "it says nothing of that"
    write(other, {"eos_token_id": 5})
    assert read_eos_token_ids(model, str(other), {"eos_token_id": 9}) == (5,)
    with pytest.raises(ConfigError, match=f"--generation-config {tmp_path}/none: there is no .*expected is auto, vllm"):
        read_defaults(model, str(tmp_path / "none"), {})


def test_whoever_starts_the_engine_sets_a_limit_of_tokens_too(tmp_path: Path) -> None:
    write(tmp_path, {"max_new_tokens": 100})
    assert read_defaults(tmp_path, "auto", {}) == GenerationDefaults(max_tokens=100)
    assert read_defaults(tmp_path, "auto", {"max_new_tokens": 9}) == GenerationDefaults(max_tokens=9, max_tokens_limit=9)
    assert read_defaults(tmp_path, "vllm", {"max_new_tokens": 9}) == GenerationDefaults(max_tokens=9, max_tokens_limit=9)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": "hot"}, "temperature: must be a number, not a string"),
        ({"temperature": -1}, "temperature: must be at least 0"),
        ({"top_p": 0}, "top_p: must be above 0"),
        ({"top_k": -2}, "top_k: must be at least -1"),
        ({"min_p": True}, "min_p: must be a number, not true or false"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be at least 0.001"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be at least 1"),
    ],
    ids=str,
)
def test_what_no_request_could_have_is_refused_by_file_and_field(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    write(tmp_path, fields)
    for source, override, place in (
        ("auto", {}, f"{tmp_path}/generation_config.json: "),
        ("vllm", fields, "--override-generation-config: "),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)) as caught:
            read_defaults(tmp_path, source, override)
        assert str(caught.value).startswith(place)


def test_an_override_of_nothing_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--override-generation-config: there is no 'temprature'.*temperature, top_p"):
        read_defaults(tmp_path, "auto", {"temprature": 1})


@pytest.mark.parametrize("text", ["[]", "{", '{"eos_token_id": "x"}'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/generation_config.json: ")):
        read_eos_token_ids(tmp_path, "auto", {})
