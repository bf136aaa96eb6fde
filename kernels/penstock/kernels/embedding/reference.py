"""Rows of a table by their numbers: tokens to vectors, positions to rotary angles."""

import torch


def embedding(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gathers rows.

    Args:
        table: [rows, d].
        ids: [n], int32 or int64, each a row of the table; a GPU, where nobody could be told, gives zeros for any other.

    Returns:
        [n, d] in the table's dtype.

    Raises:
        IndexError: An id outside the table, on the CPU.
    """
    return table.index_select(0, ids)
