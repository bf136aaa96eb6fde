"""Find, token by token, where an output's reasoning ends and its answer begins."""

from enum import Enum
from typing import NamedTuple

from penstock.engine.grammar import ReasoningMarkers


class Phase(Enum):
    """Phase of an output."""

    OPENING = 0
    """The first token decides whether there is reasoning."""
    REASONING = 1
    ANSWER = 2


class Gate(NamedTuple):
    """How far an output has come. A value: drafts are walked without changing it."""

    phase: Phase
    markers: ReasoningMarkers | None
    tail: tuple[int, ...] = ()
    """The last tokens of the reasoning, no more than its end marker has."""

    def take(self, token: int) -> tuple["Gate", bool]:
        """The gate after a token, and whether that token belongs to the answer."""
        if self.phase is Phase.ANSWER or self.markers is None:
            return self, True
        if self.phase is Phase.OPENING and token != self.markers.begin:
            return self._replace(phase=Phase.ANSWER), True
        tail = (*self.tail, token)[-len(self.markers.end) :]
        phase = Phase.ANSWER if tail == self.markers.end else Phase.REASONING
        return self._replace(phase=phase, tail=tail), False


def gate_of(markers: ReasoningMarkers | None) -> Gate:
    """The gate before the first token."""
    if markers is None:
        return Gate(Phase.ANSWER, None)
    return Gate(Phase.REASONING if markers.begin is None else Phase.OPENING, markers)
