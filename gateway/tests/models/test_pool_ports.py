"""Ports of InferencePools: each its own, the same after a restart, and given back when the pool goes."""

import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from penstock.api.fleet import InferencePool
from penstock.gateway.cli import gateway
from penstock.gateway.extproc.exchange import Director
from penstock.gateway.extproc.service import ExtProcService
from penstock.gateway.pool_ports import PoolPorts, assign


def pool(name: str, created: float = 1.0) -> InferencePool:
    return InferencePool(id=f"d/{name}", created=created)


pools = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 3), max_size=12).map(
    lambda made: [pool(name, created) for name, created in made.items()]
)


@given(
    pools=pools,
    seed=st.randoms(use_true_random=False),
    fixed=st.dictionaries(st.sampled_from(["d/a", "d/b"]), st.integers(100, 104)),
)
def test_each_pool_has_a_port_of_its_own_however_they_come(pools: list[InferencePool], seed: Any, fixed: dict[str, int]) -> None:
    if len(set(fixed.values())) < len(fixed):
        fixed = {}
    ports = range(100, 110)
    given_out, left_out = assign(pools, fixed, ports, {})
    assert len(set(given_out.values())) == len(given_out)
    assert given_out.keys() | set(left_out) == {it.id for it in pools} and not given_out.keys() & set(left_out)
    assert all(given_out[it] == fixed[it] for it in given_out.keys() & fixed.keys())
    assert all(port in ports for port in given_out.values())
    assert not left_out or len(set(given_out.values()) | set(fixed.values())) == len(ports)
    seed.shuffle(pools)
    assert assign(pools, fixed, ports, {}) == (given_out, left_out)  # a restart, another process
    newcomer = pool("zz", created=9.0)
    assert assign([*pools, newcomer], fixed, ports, {})[0].items() >= given_out.items()  # nobody older is moved
    kept = pools[1:]
    stayed = assign(kept, fixed, ports, given_out)[0]
    assert all(stayed[it.id] == given_out[it.id] for it in kept if it.id in given_out)


class Listeners:
    """Stands in for gRPC servers."""

    def __init__(self) -> None:
        self.open: dict[int, ExtProcService] = {}
        self.refused: set[int] = set()

    async def listen(self, service: ExtProcService, port: int) -> Any:
        if port in self.refused:
            raise OSError("address in use")
        self.open[port] = service
        listeners = self

        class Server:
            async def stop(self, grace: float) -> None:
                listeners.open.pop(port, None)

        return Server()


async def test_servers_come_and_go_with_their_pools() -> None:
    listeners = Listeners()
    ports = PoolPorts(cast(Director, None), listeners.listen, fixed={"d/a": 50}, ports=range(100, 102))
    await ports.update([pool("a"), pool("b"), pool("c"), pool("d", created=2.0)])
    assert ports.ports["d/a"] == 50 and {ports.ports["d/b"], ports.ports["d/c"]} == {100, 101}
    assert "d/d" not in ports.ports  # none left
    service = listeners.open[ports.ports["d/b"]]
    rest = [pool("b"), pool("d", created=2.0)]
    await ports.update(rest)
    assert "d/d" not in ports.ports  # the port that became free is still being closed
    await asyncio.sleep(0.01)
    await ports.update(rest)
    assert set(listeners.open) == set(ports.ports.values()) == {100, 101}
    assert listeners.open[ports.ports["d/b"]] is service  # untouched
    listeners.refused.add(50)
    await ports.update([pool("a"), pool("b")])
    assert set(ports.ports) == {"d/b"}
    listeners.refused.clear()
    await ports.update([pool("a"), pool("b")])
    assert ports.ports["d/a"] == 50
    await ports.close(0.0)
    assert listeners.open == {}


def test_flags_that_are_none_are_refused_by_name(capsys: Any) -> None:
    for flags, says in (
        (["--pool-port", "d=1"], "'d=1' is not NAMESPACE/NAME=PORT"),
        (["--pool-port", "d/a/b=1"], "is not NAMESPACE/NAME=PORT"),
        (["--pool-port", "d/a=x"], "is not NAMESPACE/NAME=PORT"),
        (["--pool-port", "d/a=1", "--pool-port", "d/b=1"], "no two have the same"),
        (["--pool-port-range", "9-8"], "'9-8' is not FIRST-LAST"),
    ):
        try:
            gateway(flags)
        except SystemExit as stopped:
            assert stopped.code == 2 and says in capsys.readouterr().err
