"""The forms under test."""

import os

import pytest
import torch

from penstock.kernels.cpu import build
from penstock.kernels.cpu.build import BuildError
from penstock.kernels.ops import CACHE, REFERENCE, Ops, native_ops


@pytest.fixture(scope="session")
def native():
    """`native(dtype)`: the compiled operations, from where engines keep them: a file's name holds its source."""

    def get(dtype: torch.dtype) -> Ops:
        try:
            return native_ops(dtype, CACHE.expanduser())
        except BuildError as error:
            pytest.skip(f"native operations: {error}")

    return get


@pytest.fixture(scope="session")
def portable():
    """`portable(dtype)`: the same as for a CPU without a dot product of bfloat16 pairs."""

    def get(dtype: torch.dtype) -> Ops:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "FLAGS", (*build.FLAGS, "-mno-avx512bf16"))
            try:
                return native_ops(dtype, CACHE.expanduser())
            except BuildError as error:
                pytest.skip(f"a compiler that does not know this instruction: {error}")

    return get


@pytest.fixture(scope="session", params=["reference", "native"])
def ops_in(request, native):
    """`ops_in(dtype)`: each form."""
    return native if request.param == "native" else lambda dtype: REFERENCE


@pytest.fixture(scope="session")
def triton_device():
    """Where Triton's kernels run: on a GPU where there is one, else in Triton's interpreter on the CPU."""
    return "cuda" if os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
