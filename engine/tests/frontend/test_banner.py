"""What a terminal shows when the engine is ready."""

import io
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine.args import EngineArgs
from penstock.engine.config import PoolingConfig
from penstock.engine.frontend import banner
from penstock.engine.frontend.http.settings import ApiSettings
from penstock.engine.frontend.processes.serve import ServeConfig

MODEL = Path(__file__).parents[3] / "examples/models/penstock-tiny"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def config(**fields: Any) -> ServeConfig:
    engine = EngineArgs(model=str(MODEL), served_model_name=["it's tiny"], device="cpu").config()
    return ServeConfig(**{"engine": engine, "host": "127.0.0.1", "port": 8001, "shutdown_timeout": 1.0, **fields})


def test_a_terminal_is_told_what_runs_and_a_command_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "60")  # narrower than the command, which has to stay on one line
    banner.show(config(), "native (avx2)", 100)
    said = sys.stderr.getvalue()
    for words in ("it's tiny", "cpu, 1 thread", "native (avx2)", "1,600 tokens", "http://127.0.0.1:8001/v1", "/docs"):
        assert words in said
    assert banner.try_it(config()) in said


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    banner.show(config(), "native", 100)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://localhost:8001"), ("::1", "http://[::1]:8001")])
def test_the_command_is_one_that_a_shell_takes_apart_as_it_is_meant(host: str, url: str) -> None:
    words = shlex.split(banner.try_it(config(host=host, api=ApiSettings(api_keys=("k",)))))
    assert words[:2] == ["curl", f"{url}/v1/chat/completions"]
    assert "authorization: Bearer KEY" in words, "the key itself is not for a screen"
    body = json.loads(words[-1])
    assert (body["model"], body["messages"][0]["role"]) == ("it's tiny", "user")


def test_a_model_that_embeds_is_tried_with_a_text() -> None:
    made = config()
    pooling = PoolingConfig(tokens="last", normalize=True, size=4)
    model = msgspec.structs.replace(made.engine.model, pooling=pooling)
    made = msgspec.structs.replace(made, engine=msgspec.structs.replace(made.engine, model=model))
    assert "/v1/embeddings" in banner.try_it(made) and json.loads(shlex.split(banner.try_it(made))[-1])["input"]
