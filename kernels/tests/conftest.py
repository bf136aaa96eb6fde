"""The forms under test: torch's reference, and the native operations for every instruction set that this CPU has."""

import os
import shutil
from collections.abc import Callable

import pytest
import torch

from penstock.kernels.cpu.build import CACHE, COMPILERS
from penstock.kernels.cpu.isa import Isa, available
from penstock.kernels.ops import REFERENCE, Ops, native_ops


def _native(isa: Isa) -> Callable[[torch.dtype], Ops]:
    """From where engines keep them: a file's name holds its source."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("native operations: no C++ compiler; apt-get install g++")
    return lambda dtype: native_ops(dtype, isa, CACHE.expanduser())


@pytest.fixture(scope="session", params=available(), ids=lambda isa: isa.name)
def native(request):
    """`native(dtype)`: the compiled operations, for one instruction set after the other."""
    return _native(request.param)


@pytest.fixture(scope="session", params=[None, *available()], ids=lambda isa: "reference" if isa is None else isa.name)
def ops_in(request):
    """`ops_in(dtype)`: the reference, then as `native`."""
    return _native(request.param) if request.param else lambda dtype: REFERENCE


@pytest.fixture(scope="session")
def triton_device():
    """Where Triton's kernels run: on a GPU where there is one, else in Triton's interpreter on the CPU."""
    return "cuda" if os.environ.get("TRITON_INTERPRET") != "1" else "cpu"


@pytest.fixture(scope="session")
def interpreted():
    """Skips the test where Triton's kernels are compiled for a device: it looks into what an interpreter does."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled in this run")
