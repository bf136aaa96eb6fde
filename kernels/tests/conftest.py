"""The forms under test."""

import pytest
import torch

from penstock.kernels.cpu.build import BuildError
from penstock.kernels.ops import REFERENCE, Ops, native_ops


@pytest.fixture(scope="session")
def native(tmp_path_factory):
    """`native(dtype)`: the compiled operations, built in a folder of their own."""
    cache = tmp_path_factory.mktemp("kernels")

    def get(dtype: torch.dtype) -> Ops:
        try:
            return native_ops(dtype, cache)
        except BuildError as error:
            pytest.skip(f"native operations: {error}")

    return get


@pytest.fixture(scope="session", params=["reference", "native"])
def ops_in(request, native):
    """`ops_in(dtype)`: each form."""
    return native if request.param == "native" else lambda dtype: REFERENCE
