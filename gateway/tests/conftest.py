"""Tests of what a pick needs run twice: in Python, and with the compiled parts, where those are built (`make native`)."""

from collections.abc import Iterator
from functools import partial

import pytest

from penstock.gateway.picker.columns import Columns
from penstock.gateway.picker.compiled import Compiled, index_of, installed
from penstock.gateway.picker.state import FleetState


@pytest.fixture(params=["python", "compiled"])
def compiled(request: pytest.FixtureRequest) -> Compiled | None:
    """What a server or a gateway stands on; None: Python."""
    if request.param == "python":
        return None
    found = installed()
    if found is None:
        pytest.skip("penstock-gateway-native is not built: make native")
    return found


@pytest.fixture(scope="module", params=["python", "compiled"])
def in_python_and_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the module makes without saying how: fleet states, columns and residency indexes."""
    if request.param == "python":
        yield
        return
    compiled = installed()
    if compiled is None:
        pytest.skip("penstock-gateway-native is not built: make native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FleetState.__init__.__kwdefaults__, "compiled", compiled)
        patch.setattr(Columns.__init__, "__defaults__", (compiled,))
        patch.setattr(request.module, "ResidencyIndex", partial(index_of, compiled), raising=False)
        yield
