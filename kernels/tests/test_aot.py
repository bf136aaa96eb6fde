"""What Triton's kernels compile to for an H200, without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.compile_only import ARCHITECTURES, compile_only

pytestmark = pytest.mark.slow

REGISTERS = {
    "_rms_norm_kernel": 64,
    "_gated_mul_kernel": 64,
    "_embedding_kernel": 64,
    "_prepare_kv_kernel": 64,
    "_grouped_linear_kernel": 128,
    "_grouped_packed_kernel": 128,
    "_float8_numbers_kernel": 64,
    "_quantized_linear_kernel": 255,  # of 128 threads: two programs a multiprocessor, where groups have zero points
    "_few_rows_kernel": 128,  # of 128 threads: four programs a multiprocessor, of which memory holds three
    "_lora_shrink_kernel": 224,
    "_lora_expand_kernel": 224,
    "scan_kernel": 128,  # of 256 threads: two programs a multiprocessor
    "choose_kernel": 128,  # of 256 threads: two programs a multiprocessor
    "wide_kernel": 128,
    "logprobs_kernel": 80,
    "count_kernel": 64,
    "penalise_kernel": 80,
    "paged_attention_short": 168,  # of 128 threads: three programs a multiprocessor
    "paged_attention_short_split": 255,
    "paged_attention_long": 255,  # of 256 threads: one
    "paged_attention_long_split": 255,
    "_gluon_attention_kernel": 168,  # of 384 threads, one program a multiprocessor; 24 to 240 after it has begun
    "_prefix_attention_kernel": 255,  # of 256 threads: one
    "latent_attention_16_heads": 128,  # of 256 threads: two
    "latent_attention_64_heads": 255,  # of 256 threads: one
    "_apply_changes_kernel": 40,
    "_prepare_inputs_kernel": 32,
    "_commit_step_kernel": 32,
}
"""At most, by kernel: what keeps the occupancy that its launch counts on. Every kernel is named."""


SPILLS = {
    ("Gemma 3 27B, decodes within a window", "paged_attention_short"): 8,
    ("8 billion parameters, a prefix of many decodes", "paged_attention_short"): 8,
}
"""Bytes of stack a thread that are known and kept: a load and a store a program, outside of the loops over keys."""


ONE_AFTER_ANOTHER = {"_gluon_attention_kernel", "_apply_changes_kernel", "logprobs_kernel", "count_kernel", "penalise_kernel"}
"""Kernels that begin when all before them has ended: they stand behind copies, or in few steps."""


SINGLE = 32
"""Numbers that may be widened one by one: masks and sinks, outside of loops. A tile has 64 a thread at the least."""


def gates(folder: Path, *arguments: str) -> list[dict]:
    """What variants take, compiled anew."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, str(Path(__file__).with_name("aot_gates.py")), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return gates(tmp_path_factory.mktemp("triton"))


def test_every_kernel_fits_into_its_registers(compiled):
    assert {kernel["name"] for kernel in compiled} == set(REGISTERS)
    for kernel in compiled:
        assert kernel["stack"] == 0, f"{kernel} spills"
        assert kernel["registers"] <= REGISTERS[kernel["name"]], kernel
        assert kernel["shared"] <= ARCHITECTURES["sm_90"], kernel


def test_prompts_attend_by_hoppers_own_matrix_products(compiled):
    of = [kernel["wgmma"] for kernel in compiled if kernel["name"].startswith(("paged_attention_long", "latent_attention_64"))]
    assert of
    assert all(of)


def test_attention_multiplies_while_further_tiles_are_on_their_way(compiled):
    """`DEPBAR.LE SB0, 0x3`: two tiles of keys and values, and block numbers. With 0x0 a loop waits for what it just asked for."""
    of = [kernel["depth"] for kernel in compiled if kernel["name"].startswith(("paged", "_prefix", "latent"))]
    assert len(of) >= 5 and min(of) >= 3


def test_gluon_prompts_are_copied_by_one_warp_beside_two_warpgroups_that_multiply(compiled):
    """Both products are asynchronous, one still under way beside the softmax; slots are freed by all warps together."""
    of = [kernel for kernel in compiled if kernel["name"] == "_gluon_attention_kernel"]
    assert len(of) == 2
    for kernel in of:
        assert kernel["HGMMA"] >= 48 and kernel["UTMALDG"] >= 4 and kernel["USETMAXREG"] >= 4, kernel
        assert kernel["together"] and kernel["beside"] == 2, kernel


def test_linear_layers_of_few_rows_have_three_tiles_of_weights_on_their_way(compiled):
    of = [kernel["depth"] for kernel in compiled if kernel["name"] == "_few_rows_kernel"]
    assert len(of) >= 4 and min(of) >= 6


def test_a_row_that_is_read_again_is_asked_for_ahead(compiled):
    of = [kernel["ahead"] for kernel in compiled if kernel["name"] == "wide_kernel"]
    assert len(of) >= 2 and min(of) >= 1


def test_numbers_of_eight_bits_are_widened_several_at_a_time(compiled):
    of = [kernel["single"] for kernel in compiled if kernel["name"].startswith("paged")]
    assert len(of) >= 9 and max(of) < SINGLE


def test_kernels_wait_for_those_before_them_before_they_touch_memory(compiled):
    """Without exception, or a kernel could read what is not written yet, or end before one that it has overtaken."""
    for kernel in compiled:
        assert kernel["waits"] == (kernel["name"] not in ONE_AFTER_ANOTHER), kernel
        assert kernel.get("first", "ACQBULK") == "ACQBULK", kernel


def test_weights_are_asked_for_before_their_inputs_are_there(compiled):
    of = [kernel["prefetches"] for kernel in compiled if kernel["name"] in ("_few_rows_kernel", "_rms_norm_kernel")]
    assert len(of) >= 7 and min(of) >= 1


@pytest.mark.production
def test_attention_of_other_families_and_steps_is_as_good(tmp_path):
    for kernel in gates(tmp_path, "families"):
        assert kernel["shared"] <= ARCHITECTURES["sm_90"], kernel
        if not kernel["wide"]:
            assert kernel["stack"] == SPILLS.get((kernel["case"], kernel["name"]), 0), kernel
            assert kernel.get("depth", 3) >= 3 and kernel.get("single", 0) < SINGLE, kernel


def test_another_number_of_tokens_is_no_other_variant(compiled):
    """Or it would be compiled in the middle of a request."""
    assert not [kernel["name"] for kernel in compiled if kernel["late"]]


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="unknown architecture 'sm_1'"), compile_only("sm_1"):
        pass
