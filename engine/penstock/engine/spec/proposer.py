"""Where drafts come from."""

from typing import Protocol

from penstock.engine.core.plan import Int32
from penstock.engine.core.row_table import RowTable


class Proposer(Protocol):
    """Guesses how rows go on. A guess may be wrong: the model verifies each one."""

    def propose(self, table: RowTable, rows: Int32, most: int) -> Int32:
        """Drafts of the tokens that follow.

        Args:
            table: All rows, with the tokens that are known.
            rows: [m]: of the table.
            most: Drafts of each row that are asked for; more are of no use.

        Returns:
            [m, at least `most`]: the drafts of each row, then -1.
        """
        ...

    def begins(self, row: int, num_computed: int) -> None:
        """Takes in that a request has come to a row, and how many of its tokens the KV cache holds already."""

    def follow(self, table: RowTable, rows: Int32) -> None:
        """Takes in that rows, [r], have been in a step, whether drafts were asked for or not."""

    def ended(self, output: Int32) -> None:
        """Takes in what a request has generated, [n], now that it has left its row."""
