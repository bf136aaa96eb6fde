"""Where drafts come from."""

from typing import Protocol

from penstock.engine.core.plan import Bool, Int32
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.input_batch import Placed


class Proposer(Protocol):
    """Guesses how rows go on. A guess may be wrong: the model verifies each one."""

    looks_up: bool = False
    """Whether it looks at text alone, so that to ask it costs no more than to find out whether its drafts would pay."""

    def propose(self, table: RowTable, rows: Int32, known: Int32, most: int) -> Int32:
        """Drafts of the tokens that follow.

        Args:
            table: All rows, with the tokens that are known.
            rows: [m]: of the table.
            known: [m]: tokens of each that are known. Where a plan is in flight, the table counts more.
            most: Drafts of each row that are asked for; more are of no use.

        Returns:
            [m, at least `most`]: the drafts of each row, then -1.
        """
        ...

    def begins(self, row: int, num_computed: int) -> None:
        """Takes in that a request has come to a row, and how many of its tokens the KV cache holds already."""

    def follow(self, table: RowTable, rows: Int32, step: Placed, asked: Bool) -> None:
        """Takes in a step, before drafts are asked for. Who looks at text alone may not be told of it.

        Args:
            table: All rows; rejected drafts are no longer counted.
            rows: [r]: the step's.
            step: Where the tokens stand that the target model has read.
            asked: [r]: for which of them drafts will be asked for.
        """

    def skipped(self, table: RowTable, rows: Int32) -> None:
        """Takes in that it will not be told of a step, nor asked any more for the requests that these rows, [r], have."""

    def ended(self, output: Int32) -> None:
        """Takes in what a request has generated, [n], now that it has left its row."""
