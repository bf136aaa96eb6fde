"""Attention over a `DeviceBatch` in torch, against dense attention in float64."""

import pytest
import torch
from device_cases import DeviceCase
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.paged_attention.device_reference import paged_attention_device

requests = st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 2, 5, 17])) | st.just((0, 0)), min_size=1, max_size=5)
cases = st.builds(
    DeviceCase,
    group=st.sampled_from([1, 2, 7]),
    kv_heads=st.sampled_from([1, 2]),
    head_size=st.sampled_from([16, 80]),
    lengths=requests,
    block_size=st.sampled_from([8, 16, 24]),
    window=st.none() | st.sampled_from([1, 5, 16, 64]),
    softcap=st.sampled_from([0.0, 0.7, 50.0]),
    sinks=st.booleans(),
    pad_tokens=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**32),
    dtype=st.just(torch.float64),
)


@pytest.mark.req("ATT-26", "ATT-29", "CG-07")
@settings(max_examples=60)
@given(cases)
def test_the_device_reference_equals_dense_attention(case):
    q, cache, batch = case.build()
    out = paged_attention_device(q, cache, batch, case.scale, case.softcap, case.sink)
    torch.testing.assert_close(out, case.dense(), rtol=1e-9, atol=1e-9)
