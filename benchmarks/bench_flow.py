"""What flow control and tenants cost a request: CPU time without pressure, beside that of one that waits.

Run with `make bench-flow`; the result is a table, and JSON under benchmarks/results.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from itertools import count

from report import write_results

from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.extproc.call import Call
from penstock.gateway.extproc.stages.identify import Identify
from penstock.gateway.flow.control import FlowControl, FlowLimits
from penstock.gateway.flow.gate import FlowGate
from penstock.gateway.flow.ticket import Ticket
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.state import FleetState
from penstock.gateway.tenants.account import Account
from penstock.gateway.tenants.document import parse
from penstock.gateway.tenants.registry import Registry
from penstock.gateway.tenants.tenant import Limits

REPEATS = 20
CALLS = 1_000
REPLICAS = 100
TENANTS = 1_000
WAITING = 4_000


def cpu_us(work: Callable[[], object]) -> float:
    """The median CPU time of a call, microseconds."""
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            work()
        times.append((time.thread_time_ns() - start) / 1e3 / CALLS)
    return statistics.median(times)


def gate_of() -> tuple[FlowGate, Model]:
    """A gate before so many idle replicas."""
    state = FleetState()
    model = Model(id="ns/m", served_names=["m"])
    replicas = [
        Replica(
            uid=f"u{n}", name=f"r{n}", pool="ns/m/p", host="", port=n + 1, events_port=1, replay_port=1, ready=True,
        )
        for n in range(REPLICAS)
    ]  # fmt: skip
    state.update(Fleet(models=[model], pools=[Pool(id="ns/m/p", model=model.id)], replicas=replicas))
    now = time.monotonic()
    for replica in replicas:
        state.reported(key_of(replica), LoadReport(epoch=1, seq=1, max_num_seqs=10_000), now)
    return FlowGate(FleetFollower(state), FlowLimits()), model


def without_pressure() -> tuple[float, float, int]:
    """Enter and leave; counting all places, which happens at most every 50 ms; and how many queues that made."""
    gate, model = gate_of()

    def once() -> None:
        assert gate.enter(model, 100, time.monotonic())
        gate.leave(model)

    def counted() -> None:
        gate.leave(model, in_vain=True)  # what was counted is not believed any more
        assert gate.enter(model, 100, time.monotonic())

    free = cpu_us(once)
    assert gate.enter(model, 100, time.monotonic())
    return free, cpu_us(counted), gate.control.made


def identified() -> float:
    """From a key to a tenant, with its budgets charged."""
    names = [f"tenant-{n}" for n in range(TENANTS)]
    entries = "\n".join(f"  - {{name: {name}, keys: [sk-{name}], tokensPerMinute: 1000000000}}" for name in names)
    identify = Identify(Registry(parse(f"tenants:\n{entries}\n")))
    call = Call(headers={"authorization": "Bearer sk-tenant-500"})
    account = Account(Limits(tokens_per_minute=10**9, requests_per_minute=10**9), 0.0)

    def once() -> None:
        identify.tenant(call)
        account.open(10, time.monotonic())
        account.close(0.1)

    return cpu_us(once)


def waited() -> float:
    """Into a long queue of many tenants, and out of it."""
    control, ordinals = FlowControl(FlowLimits()), count()

    def push() -> None:
        number = next(ordinals)
        control.offer(Ticket(model="m", tenant=f"t{number % 100}", tokens=100, size=400, until=1e9, ordinal=number))

    for _ in range(WAITING):
        push()

    def once() -> None:
        control.take("m")
        push()

    return cpu_us(once)


async def main() -> None:
    """Prints and writes what was measured."""
    free, counting, made = without_pressure()
    results = {"flow_us": free, "counting_us": counting, "queues_made": made, "tenant_us": identified(), "waited_us": waited()}
    print(f"| one request | CPU, µs |\n| --- | --- |\n| flow control without pressure, {REPLICAS} replicas | {free:.1f} |")
    print(f"| the same, when places are counted anew (every 50 ms at most) | {counting:.1f} |")
    print(f"| key, tenant and budgets, {TENANTS} tenants | {results['tenant_us']:.1f} |")
    print(f"| into and out of a queue of {WAITING}, 100 tenants | {results['waited_us']:.1f} |")
    print(f"\nqueues made without pressure: {made}")
    path = write_results("flow", results)
    print(f"written to {path}")


if __name__ == "__main__":
    asyncio.run(main())
