"""Makes this folder's helpers importable, and the scheduler's."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "core")]


@pytest.fixture(scope="session")
def build_device_runner():
    """Make device runners, as `device_runners.make_device_runner` does."""
    from device_runners import make_device_runner

    return make_device_runner


@pytest.fixture(scope="session")
def interpreted():
    """Skips the test where Triton's kernels are compiled for a device, which has tests of its own."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled in this run")
