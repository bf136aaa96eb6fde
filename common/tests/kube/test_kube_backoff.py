"""Back-off: doubling, bounded, jittered, and forgotten after a success."""

from random import Random

from penstock.kube.backoff import Backoff


def test_delays_double_within_their_half_and_stay_bounded() -> None:
    backoff = Backoff(first=1.0, longest=8.0, random=Random(1))
    delays = [backoff.next() for _ in range(6)]
    for delay, step in zip(delays, [1, 2, 4, 8, 8, 8], strict=True):
        assert step / 2 <= delay <= step
    assert len(set(delays)) == 6
    backoff.reset()
    assert backoff.next() <= 1.0
