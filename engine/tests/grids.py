"""Grids of which `make test` runs a few cases, and `make test-slow` the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The cases as `parametrize` takes them; those that are not quick have the marker `pytest.mark.slow`."""
    cases = list(cases)
    assert set(quick) <= set(cases), "there is no such case"
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
