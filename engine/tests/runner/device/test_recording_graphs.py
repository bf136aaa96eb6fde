"""The stand-in finds what would go wrong on a GPU."""

from dataclasses import dataclass

import pytest
import torch
from recording_graphs import CaptureError, RecordingGraphs


def captured(graphs: RecordingGraphs, function, pool=None):
    """The graph of a function, and what the function returned while it was captured."""
    graphs.begin(graphs.new_pool() if pool is None else pool)
    try:
        result = function()
    except BaseException:
        graphs.abandon()
        raise
    return graphs.end(), result


def test_a_replay_reads_what_is_at_the_addresses_now() -> None:
    graphs, x, weight, y = RecordingGraphs(), torch.ones(3, 4), torch.eye(4), torch.zeros(3, 4)

    def step() -> None:
        hidden = torch.nn.functional.linear(x, weight) * 2
        y[1:].copy_(hidden[1:] + x[:2].view(2, 4))

    graph, _ = captured(graphs, step)
    assert not y.any(), "nothing runs while it is captured"
    graph.replay()
    assert (y[1:] == 3).all() and not y[0].any()
    x.copy_(torch.arange(12.0).view(3, 4))
    graph.replay()
    assert torch.equal(y[1:], 2 * x[1:] + x[:2])
    assert graphs.replays == 2


def test_a_fresh_tensor_is_not_seen_and_one_that_is_gone_is_an_error() -> None:
    graphs, y, inputs = RecordingGraphs(), torch.zeros(4), [torch.ones(4)]
    graph, _ = captured(graphs, lambda: y.copy_(inputs[0] + 1))
    fresh = torch.full((4,), 7.0)
    graph.replay()
    assert torch.equal(y, torch.full((4,), 2.0)), f"{fresh} is another tensor"
    inputs.clear()
    with pytest.raises(CaptureError, match=r"shape \[4\] .* has been freed"):
        graph.replay()


def test_a_number_of_the_host_is_frozen() -> None:
    graphs, y, factor = RecordingGraphs(), torch.zeros(2), [3.0]
    x = torch.ones(2)
    graph, _ = captured(graphs, lambda: y.copy_(x * factor[0]))
    factor[0] = 5.0
    graph.replay()
    assert torch.equal(y, torch.full((2,), 3.0))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: bool(x.any()),
        lambda x: torch.repeat_interleave(x.long()),
        lambda x: x.bernoulli(),
    ],
)
def test_what_would_wait_for_the_device_is_refused(wait) -> None:
    graphs, x = RecordingGraphs(), torch.ones(3)
    with pytest.raises(CaptureError, match=r"waits for the device|generator of the host"):
        captured(graphs, lambda: wait(x))
    graph, _ = captured(graphs, lambda: x.add_(1))
    graph.replay()
    assert torch.equal(x, torch.full((3,), 2.0)), "after an abandoned capture the next one works"


@dataclass(frozen=True)
class Step:
    lengths: torch.Tensor
    launch: int


def test_a_kernel_is_one_call_with_all_that_its_arguments_hold() -> None:
    graphs, lengths, out = RecordingGraphs(), torch.tensor([1, 2]), torch.zeros(2)

    def kernel(target: torch.Tensor, step: Step) -> torch.Tensor:
        for index, length in enumerate(step.lengths.tolist()):  # a kernel may read what it likes
            target[index] = length * step.launch
        return target + 1

    wrapped = graphs.kernel(kernel)
    graph, result = captured(graphs, lambda: wrapped(out, Step(lengths, 10)))
    assert not out.any() and not result.any(), "nothing runs while it is captured"
    assert [call.name for call in graph.calls] == ["kernel"]
    lengths.copy_(torch.tensor([3, 4]))
    graph.replay()
    assert out.tolist() == [30, 40] and result.tolist() == [31, 41]
    assert graphs.kernels == []
    wrapped(out, Step(lengths, 1))
    assert graphs.kernels == ["kernel"] and out.tolist() == [3, 4]


def test_graphs_of_one_pool_spoil_what_an_earlier_one_has_left_there() -> None:
    graphs, x, y = RecordingGraphs(), torch.ones(4), torch.zeros(4)
    pool = graphs.new_pool()

    def first():
        return graphs.weak(x + 1)  # nobody owns it when the next capture begins

    one, left = captured(graphs, first, pool)
    two, _ = captured(graphs, lambda: y.copy_(x * 3), pool)
    one.replay()
    assert torch.equal(left, torch.full((4,), 2.0))
    two.replay()
    assert torch.equal(y, torch.full((4,), 3.0))
    assert not torch.equal(left, torch.full((4,), 2.0)), "the second graph may have the same memory"


def test_what_the_first_graph_leaves_for_the_second_stays() -> None:
    graphs, x, y = RecordingGraphs(), torch.ones(4), torch.zeros(4)
    pool = graphs.new_pool()
    one, between = captured(graphs, lambda: [x + 1], pool)
    two, _ = captured(graphs, lambda: y.copy_(between[0] * 3), pool)
    between.clear()
    for value in (1.0, 5.0):
        x.fill_(value)
        one.replay()
        two.replay()
        assert torch.equal(y, torch.full((4,), (value + 1) * 3))
