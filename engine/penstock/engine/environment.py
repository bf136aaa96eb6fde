"""The environment of processes that compute: OpenMP, torch and oneDNN read it alone, when torch is loaded."""

import os

from penstock.engine.config import EngineConfig
from penstock.kernels.cpu.isa import choose


def computing(config: EngineConfig) -> dict[str, str]:
    """This process's environment with what the configuration says about threads and instruction sets."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(config.threads)}
    return environment if config.cpu_isa is None else environment | dict(choose(config.cpu_isa).environment)
