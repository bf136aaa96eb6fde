"""Arrays of a step in one copy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from late_runtime import LateRuntime

from penstock.engine.runner.device.uploads import upload

ARRAYS = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([np.int32, np.int64, np.float32])), min_size=1, max_size=6)


@given(ARRAYS)
def test_arrays_arrive_and_begin_at_multiples_of_16_bytes(shapes):
    """A kernel that is launched with another alignment is compiled once more, while a request waits."""
    arrays = [np.arange(count).astype(dtype) for count, dtype in shapes]
    runtime = LateRuntime()
    there = upload(runtime, *arrays)
    assert runtime.uploads <= 1
    for tensor, array in zip(there, arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype and tensor.tolist() == array.tolist()
    # Of what is not empty; the first begins where torch has allocated it.
    begins = [tensor.data_ptr() - there[0].data_ptr() for tensor in there if len(tensor) and len(there[0])]
    assert all(begin % 16 == 0 for begin in begins)
