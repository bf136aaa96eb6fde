"""Ranks as processes of their own: forked, so that hundreds of them start in no time."""

import gc
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import torch


class Ranks:
    """So many processes, each running the same function with its rank.

    Args:
        world: How many.
        function: Called in each; what it returns or raises can be pickled.
    """

    def __init__(self, world: int, function: Callable[[int], Any]) -> None:
        self.pids, self._results = list[int](), list[int]()
        for rank in range(world):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                self._live(rank, function, writing)
            os.close(writing)
            self.pids.append(pid)
            self._results.append(reading)

    def results(self) -> list[Any]:
        """What each has returned; None for one that was killed. What a rank raised stands in its place."""
        told: list[Any] = []
        for pid, reading in zip(self.pids, self._results, strict=True):
            with os.fdopen(reading, "rb") as file:
                data = file.read()
            os.waitpid(pid, 0)
            told.append(pickle.loads(data) if data else None)
        return told

    def successes(self) -> list[Any]:
        """The same; raises what the first rank raised that did."""
        found = self.results()
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    @staticmethod
    def _live(rank: int, function: Callable[[int], Any], writing: int) -> None:
        # What other tests have left behind, such as gRPC's event loops, can hang where it is collected in a forked process.
        gc.freeze()
        status = 1
        try:
            torch.set_num_threads(1)
            try:
                result = function(rank)
            except Exception as error:  # noqa: BLE001 - told to the test
                error.add_note(traceback.format_exc())
                result = error
            with os.fdopen(writing, "wb") as file:
                file.write(pickle.dumps(result))
            status = 0
        finally:
            os._exit(status)
