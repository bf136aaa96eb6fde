"""What every test shares: torch computes in one thread, as an engine does.

Results are bit-stable for one number of threads only, and on a busy two-core machine a second thread costs more than it gives.
"""

import os

import pytest

# Before anything imports torch; processes that a test starts inherit it.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips by name what needs a CUDA device where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"{item.name} needs a CUDA device"))
