"""What Triton's kernels compile to for an H200, without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.compile_only import ARCHITECTURES, compile_only

REGISTERS = {
    "_rms_norm_kernel": 64,
    "_gated_mul_kernel": 64,
    "_embedding_kernel": 64,
    "_prepare_kv_kernel": 64,
    "_grouped_linear_kernel": 128,
    "_grouped_packed_kernel": 128,
    "_quantized_linear_kernel": 255,  # of 128 threads: two programs a multiprocessor, where groups have zero points
    "_lora_shrink_kernel": 224,
    "_lora_expand_kernel": 224,
    "scan_kernel": 104,
    "choose_kernel": 168,
    "wide_kernel": 128,
    "logprobs_kernel": 80,
    "count_kernel": 64,
    "penalise_kernel": 80,
    "_merge_splits_kernel": 64,
    "paged_attention_short": 168,  # of 128 threads: three programs a multiprocessor
    "paged_attention_short_split": 255,
    "paged_attention_long": 255,  # of 256 threads: one
    "paged_attention_long_split": 255,
    "_latent_attention_kernel": 128,  # of 256 threads: two
    "_apply_changes_kernel": 40,
    "_prepare_inputs_kernel": 32,
    "_commit_step_kernel": 32,
}
"""At most, by kernel: what keeps the occupancy that its launch counts on. Every kernel is named."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What the shipped variants take, compiled anew."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(Path(__file__).with_name("aot_gates.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_fits_into_its_registers(compiled):
    assert {kernel["name"] for kernel in compiled} == set(REGISTERS)
    for kernel in compiled:
        if not kernel["wide"]:
            assert kernel["stack"] == 0, f"{kernel} spills"
            assert kernel["registers"] <= REGISTERS[kernel["name"]], kernel
        assert kernel["shared"] <= ARCHITECTURES["sm_90"], kernel


def test_prompts_attend_by_hoppers_own_matrix_products(compiled):
    of = [kernel["wgmma"] for kernel in compiled if "wgmma" in kernel and not kernel["wide"]]
    assert of
    assert all(of)


def test_another_number_of_tokens_is_no_other_variant(compiled):
    """Or it would be compiled in the middle of a request."""
    assert not [kernel["name"] for kernel in compiled if kernel["late"]]


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="unknown architecture 'sm_1'"), compile_only("sm_1"):
        pass
