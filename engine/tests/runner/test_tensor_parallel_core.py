"""A whole core over two ranks: crowds, preemption, plans ahead, sleep and reload change no token."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from test_core_with_runner import SCHEDULER, Engine, requests

from penstock.engine.config import CacheConfig, EngineConfig, ParallelConfig
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import Executor
from penstock.engine.core.ipc.process import build_executor
from penstock.engine.loading.checkpoint import read_model_config

NUM_BLOCKS = 100


class DividedEngine(Engine):
    """A new core on ranks that are there already."""

    def __init__(self, config: EngineConfig, executor: Executor, num_blocks: int) -> None:
        executor.call("warm_up")  # nobody is in any row
        self.depth, self.executor = config.depth, executor
        self.scores, self.logprobs = {}, {}
        [layout, _] = executor.call("kv_layout")
        self.core = EngineCore(config, executor, num_blocks, epoch=1, groups=layout.groups)

    def _check_mirror(self) -> None:
        """The rows are in other processes."""


@pytest.fixture(scope="module")
def config(checkpoint) -> EngineConfig:
    path: Path = checkpoint("llama")
    return EngineConfig(
        model=read_model_config(path, served_names=(), dtype="float32", max_model_len=320),
        cache=CacheConfig(block_size=16, num_blocks=NUM_BLOCKS),
        scheduler=SCHEDULER,
        parallel=ParallelConfig(tensor_parallel_size=2),
    )


@pytest.fixture(scope="module")
def executor(config) -> Iterator[Executor]:
    executor, blocks = build_executor(config)
    assert blocks == NUM_BLOCKS
    yield executor
    executor.close()


@pytest.mark.parametrize("adjusted", [False, True], ids=["plain", "adjusted"])
def test_a_crowd_gets_what_each_gets_alone(config, executor, adjusted):
    alone: dict[int, list[int]] = {}
    for request in requests(adjusted):
        alone |= DividedEngine(config, executor, NUM_BLOCKS).run([request])
    for depth, num_blocks in ((1, 100), (2, 100), (1, 22), (2, 22)):
        engine = DividedEngine(msgspec.structs.replace(config, depth=depth), executor, num_blocks)
        assert engine.run(requests(adjusted)) == alone
        stats = engine.core.stats()
        assert stats.prefix_hits > 0 and (stats.preemptions > 0) == (num_blocks == 22)


def test_sleep_and_reload_reach_every_rank(config, executor):
    def answers() -> dict[int, list[int]]:
        return DividedEngine(config, executor, NUM_BLOCKS).run(requests(adjusted=False)[:3])

    expected = answers()
    for level in (1, 2):
        executor.call("sleep", level)
        executor.call("wake_up", ["weights", "kv_cache"])
        if level == 2:
            executor.call("reload_weights", None)
        assert answers() == expected


@pytest.mark.slow
def test_a_profile_has_a_file_of_each_rank(config, executor, tmp_path):
    executor.call("start_profile")
    DividedEngine(config, executor, NUM_BLOCKS).run(requests(adjusted=False)[:1])
    files = executor.call("stop_profile", tmp_path)
    assert len(set(files)) == 2 and files[1].endswith("-rank1.json.gz")
    assert all(Path(file).stat().st_size > 1000 for file in files)
