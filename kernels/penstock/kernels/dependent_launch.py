"""Programmatic dependent launch: a kernel's programs begin while the kernel before it ends, which hides what a launch takes.

    kernel n      wait │ begin │ work ················ │ end
    kernel n + 1         starts │ asks for weights │ wait ··· │ begin │ work

Every kernel that is launched so waits as the first thing that it does, on all paths, and only then lets the next one begin.
Before the wait it may ask for constants to be brought into the second cache, and do nothing else: it neither reads what another
kernel writes, nor writes what another kernel may still read. So results are those of launches one after another.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_CAPABILITY = 90
"""Compute capability, ten times, from which on GPUs launch so."""
LINE = 128
"""Bytes that come into the second cache at a time."""


@lru_cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on a device begin before those in front of them have ended. Triton's interpreter has no such thing."""
    if knobs.runtime.interpret:
        return False
    driver: Any = triton.runtime.driver.active  # which Triton types as None
    return driver.get_current_target().arch >= _CAPABILITY


def early(device: torch.device, overlaps_last: bool = True) -> dict[str, bool]:
    """Options of a launch on a device: how it is launched, and the kernel's constant EARLY, which says so to `wait`.

    Args:
        device: Where it is launched.
        overlaps_last: Whether it may begin before the kernel in front of it has ended. A kernel behind a copy may not: it lets
            the next one begin early, and that is all.
    """
    if overlaps(device):
        return {"EARLY": True, "launch_pdl": overlaps_last}
    return {"EARLY": False}


@triton.jit
def wait(EARLY: tl.constexpr):
    """Waits until all that the kernels before have written can be read; then lets the next kernel's programs begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, EARLY: tl.constexpr):
    """Asks for the lines at some places, which must exist, to be brought into the second cache, and does not wait for them."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
