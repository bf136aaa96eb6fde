"""What the flags of CUDA graphs mean together."""

from typing import Any

import pytest

from penstock.engine.config import ConfigError, GraphConfig
from penstock.engine.runner.device.graphs.settings import graph_config
from penstock.engine.runner.device.graphs.sizes import default_capture_sizes


def settings(**changes: Any) -> GraphConfig:
    defaults = {"cuda": True, "enforce_eager": False, "mode": None, "sizes": None, "largest": None}
    return graph_config(**{**defaults, "max_num_seqs": 256, "max_num_batched_tokens": 2048, **changes})


@pytest.mark.req("CG-11")
def test_the_default_is_full_and_piecewise_up_to_512_tokens_or_every_batch_of_decodes() -> None:
    assert settings() == GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=default_capture_sizes(512))
    assert settings(max_num_seqs=1000).capture_sizes[-1] == 1000, "no batch of decodes falls back to single launches"
    assert settings(max_num_seqs=100, max_num_batched_tokens=300).capture_sizes[-1] == 300
    assert settings(mode="FULL").mode == "FULL"


@pytest.mark.req("CG-33")
def test_eager_means_no_graphs() -> None:
    assert settings(enforce_eager=True) == settings(mode="NONE") == settings(cuda=False) == GraphConfig()


@pytest.mark.req("CG-17")
def test_sizes_can_be_chosen() -> None:
    assert settings(sizes=[8, 1, 4, 4]).capture_sizes == (1, 4, 8)
    assert settings(largest=48).capture_sizes == default_capture_sizes(48)
    assert settings(sizes=[1, 48], largest=48).capture_sizes == (1, 48)
    assert settings(largest=10_000).capture_sizes[-1] == 2048, "no step is longer"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"enforce_eager": True, "mode": "FULL"}, "--cudagraph-mode and --enforce-eager: choose one"),
        ({"enforce_eager": True, "sizes": [1]}, "--cudagraph-capture-sizes and --enforce-eager: choose one"),
        ({"mode": "NONE", "largest": 8}, "--max-cudagraph-capture-size and --cudagraph-mode NONE: choose one"),
        ({"cuda": False, "mode": "FULL"}, "--cudagraph-mode and --device cpu has no graphs: choose one"),
        ({"sizes": [1, 8], "largest": 16}, "--max-cudagraph-capture-size 16 is not the largest"),
        ({"sizes": [1, 4096]}, "--cudagraph-capture-sizes 4096 is beyond --max-num-batched-tokens 2048"),
        ({"sizes": []}, "--cudagraph-capture-sizes .*at least 1"),
        ({"sizes": [0, 4]}, "--cudagraph-capture-sizes 0 4: sizes are at least 1"),
    ],
)
def test_contradictions_are_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(**wrong)
