"""When experts move: all ranks count the same loads, and decide alike after the same step."""

import logging
from collections.abc import Sequence

import numpy as np

from penstock.engine.config import EplbConfig
from penstock.engine.models.layers.expert_ranks import ExpertLayer
from penstock.engine.models.layers.placement import Int64
from penstock.engine.parallel.eplb import LoadMeter
from penstock.engine.parallel.expert_mover import ExpertMover
from penstock.engine.stats import ExpertStats

log = logging.getLogger(__name__)


class ExpertBalancer:
    """One rank's; every rank's state is the same after the same step, but for how far its weights have come.

    The first rebalancing comes after a quarter of the interval.

    Args:
        config: See EplbConfig.
        mover: Of the rank.
    """

    def __init__(self, config: EplbConfig, mover: ExpertMover) -> None:
        self._config, self._mover = config, mover
        self._layers: Sequence[ExpertLayer] = ()
        self._numbers = dict[int, int]()
        self._meter: LoadMeter | None = None
        self._before = list[int]()
        """What ranks had served when there were layers last."""
        self._left = max(1, config.step_interval // 4)

    @property
    def num_ready(self) -> int:
        """How far this rank has come; see ExpertMover."""
        return self._mover.num_ready

    def adopt(self, layers: Sequence[ExpertLayer]) -> None:
        """Has other layers, whose experts are where they are at first. What moves ends; the loads of other weights say nothing of
        these."""
        self._mover.stop()
        self._layers, self._numbers = layers, {id(layer): number for number, layer in enumerate(layers)}
        if self._meter is not None:
            self._before = self._meter.served.tolist()
        self._meter, self._left = None, max(1, self._config.step_interval // 4)
        if layers:
            placement, window = layers[0].placement, self._config.window_size
            self._meter = LoadMeter(len(layers), len(placement.copies), len(placement.starts) - 1, window)
            if self._before:
                self._meter.served += np.array(self._before)

    def count(self, layer: ExpertLayer, chosen: Int64, served: Int64) -> None:
        """Counts a layer of a step; see `LoadMeter`."""
        assert self._meter is not None, "a step without layers"
        self._meter.count(self._numbers[id(layer)], chosen, served)

    def begin_step(self, ready: int, *, some: bool) -> None:
        """A step begins.

        Args:
            ready: The least `num_ready` of all ranks.
            some: Whether it has tokens.
        """
        mover, meter = self._mover, self._meter
        mover.serve(ready)
        if not some or meter is None:
            return
        meter.end_step()  # the one before; at first of none
        self._left -= 1
        if self._left:
            return
        self._left = self._config.step_interval
        if mover.is_moving:
            log.warning("experts have not come to their places within %d steps; they go on moving", self._left)
        else:
            mover.begin(self._layers, meter.loads())

    def stats(self) -> ExpertStats:
        """What has been counted."""
        meter, mover = self._meter, self._mover
        served, balancedness = (self._before, 0.0) if meter is None else (meter.served.tolist(), meter.balancedness)
        return ExpertStats(served, balancedness, mover.num_rebalances, mover.moved_bytes)
