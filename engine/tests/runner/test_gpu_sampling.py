"""What the sampler promises on a GPU: the same random numbers and the same choices as on the CPU."""

import pytest
import torch

from penstock.kernels.sampling.philox import Purpose, uniform

pytestmark = pytest.mark.gpu


def test_random_numbers_are_those_of_the_cpu():
    seeds = torch.randint(-(2**63), 2**63 - 1, (4096,))
    positions = torch.arange(4096) * 2**20
    there = uniform(seeds.cuda(), positions.cuda(), Purpose.SAMPLE)
    assert torch.equal(there.cpu(), uniform(seeds, positions, Purpose.SAMPLE))
