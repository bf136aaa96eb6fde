"""What a scheduler counts from its start on."""

from penstock.engine.core.scheduling.waits import Waits


class Totals:
    """Counters that only rise."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.preempted_tokens = 0
        """Computed tokens of requests at the moment when they were preempted."""
        self.resumed_cached_tokens = 0
        """Tokens of those that the prefix cache supplied when the requests ran again. Only the rest is computed twice."""
        self.prefix_queries = 0
        """Prompt tokens that requests looked up when they first ran."""
        self.prefix_hits = 0
        """Tokens of those that were found."""
        self.waits = Waits()
        """Waiting times of requests that have run."""
