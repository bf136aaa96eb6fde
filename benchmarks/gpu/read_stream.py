"""The speed at which a kernel that does nothing else reads memory: what attention over a cache is compared with."""

# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

_BLOCK, _TIMES = 8192, 8


@triton.jit
def _read_kernel(x, out, size, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK * TIMES
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for time in range(TIMES):
        index = first + time * BLOCK + at
        total ^= tl.load(x + index, index < size, 0)
    tl.store(out + tl.program_id(0), tl.xor_sum(total))


def read_stream(x: torch.Tensor, block: int = _BLOCK) -> torch.Tensor:
    """The exclusive or of all elements, in parts: nothing can be left out, and next to nothing is written.

    Args:
        x: [n], int32.
        block: Elements that a program reads at once.
    """
    programs = triton.cdiv(x.numel(), block * _TIMES)
    out = torch.empty(programs, dtype=torch.int32, device=x.device)
    _read_kernel[(programs,)](x, out, x.numel(), BLOCK=block, TIMES=_TIMES, num_warps=8)
    return out
