"""What the cases share. Each group of engines is started once for the module that asks for it."""

from collections.abc import Iterator

import pytest

from e2e.neighbours.programs import Programs, programs


@pytest.fixture(scope="module", name="programs")
def programs_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """What the tests of a module start, ended with it."""
    with programs(tmp_path_factory.mktemp("neighbours")) as started:
        yield started
