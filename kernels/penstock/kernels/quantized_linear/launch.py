"""How Triton's kernels over weights of few bits are launched, by the rows of a step. No torch."""

from typing import NamedTuple

LEAST_BLOCK = 32
"""Inputs that a product takes at least: 16 pairs, where a byte holds two numbers."""


class Launch(NamedTuple):
    """A program's tile of the result, and how it goes through the inputs."""

    rows: int
    outputs: int
    block: int
    """Inputs at a time, at most: no more than share a scale."""
    warps: int


FEW, SOME, MANY = Launch(16, 32, 128, 4), Launch(64, 64, 64, 4), Launch(128, 64, 64, 8)


def launch_of(rows: int, wide: bool) -> Launch:
    """Return the launch for so many rows. Few rows wait for the weights, so that narrow tiles keep more multiprocessors at it.

    Args:
        rows: Of the step.
        wide: Whether activations are float32, of which larger tiles would not fit into the registers.
    """
    if rows <= FEW.rows:
        return FEW
    return SOME if rows <= 4 * SOME.rows or wide else MANY


def block_of(launch: Launch, group: int) -> int:
    """Return the inputs that a product takes at a time: a power of two, and none of another group as far as that goes."""
    return max(min(launch.block, 1 << (group - 1).bit_length()), LEAST_BLOCK)
