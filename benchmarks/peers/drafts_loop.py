"""Answers prompts on command, so many at a time, and counts CPU time. Imports the standard library alone: it runs in the peers'
environments too."""

import json
import sys
import time
from collections.abc import Callable

Answers = list[list[int]]
Answer = Callable[[Answers, int, int], Answers]
"""Prompts, how many at a time, and tokens of each answer → the answers, greedy."""


def serve(answer: Answer) -> None:
    """Reads a line of JSON for each measurement, and answers with another."""
    for line in sys.stdin:
        asked = json.loads(line)
        cpu, wall = time.process_time(), time.perf_counter()
        found = answer(asked["prompts"], asked["streams"], asked["output"])
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(json.dumps({"answers": found, "cpu_s": cpu, "wall_s": wall}), flush=True)
