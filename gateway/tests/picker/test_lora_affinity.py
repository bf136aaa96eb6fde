"""LoRA adapters: requests go where their adapter is, and each adapter is held by few replicas."""

import random

import msgspec
import numpy as np
import pytest
from picks import NOW, Known, columns_of, report, request

from penstock.api.load_report import LoadReport
from penstock.gateway.picker.choice import Choice, choose
from penstock.gateway.picker.slate import slate_of

pytestmark = pytest.mark.usefixtures("in_python_and_compiled")

SLOTS = 4


def loaded(*adapters: str, busy: int = 1) -> LoadReport:
    free = SLOTS - len(adapters)
    return report(lora_slots=SLOTS, lora_slots_free=free, lora_running=dict.fromkeys(adapters, busy), num_requests_running=1)


def pick(fleet: list[Known], adapter: str | None, ident: str = "r", policy: str = "Cost") -> Choice:
    columns = columns_of(fleet)
    asked = msgspec.structs.replace(request(50, ident), adapter=adapter)
    return choose(slate_of(asked, columns, columns.open, np.zeros(len(fleet)), NOW, 0), policy)


@pytest.mark.req("RT-38")
def test_the_order_is_resident_then_free_slot_then_idle_adapter_then_none() -> None:
    here, free = Known(1, loaded("a", "b", "c", "d")), Known(2, loaded("b"))
    idle, busy = Known(3, loaded("b", "c", "d", "e", busy=0)), Known(4, loaded("b", "c", "d", "e"))
    choice = pick([busy, idle, free, here], "a")
    assert [entry.candidate.name for entry in choice.ranked] == [known.name for known in (here, free, idle, busy)]
    assert "lora_s" in choice.reasons[0]
    assert all(entry.terms["lora_s"] == 0 for entry in pick([busy, idle, free, here], None).ranked)
    silent = [Known(5, report()), Known(6, report())]
    assert all(entry.terms["lora_s"] == 0 for entry in pick(silent, "a").ranked)


@pytest.mark.req("RT-38")
def test_twelve_adapters_over_four_replicas_are_loaded_once_each_while_random_routing_loads_all_the_time() -> None:
    loads = {policy: _loads(policy) for policy in ("Cost", "Random")}
    assert loads["Cost"] <= 12 + 4
    assert loads["Random"] > 100


def _loads(policy: str) -> int:
    """How many times an adapter had to be loaded for 400 requests, one after another."""
    rng = random.Random(3)
    slots: list[list[str]] = [[] for _ in range(4)]  # by replica, least recently used first
    count = 0
    for n in range(400):
        adapter = f"a{rng.randrange(12)}"
        fleet = [Known(at, loaded(*held, busy=0)) for at, held in enumerate(slots)]
        held = slots[int(pick(fleet, adapter, str(n), policy).key.uid.removeprefix("uid-"))]
        if adapter in held:
            held.remove(adapter)
        else:
            count += 1
        held.append(adapter)
        del held[:-SLOTS]
    return count


def test_an_adapter_that_has_left_its_slot_is_forgotten() -> None:
    columns = columns_of([Known(1, loaded("a", "b")), Known(2, loaded("a"))])
    assert columns.adapters == {"a": {0, 1}, "b": {0}}
    columns.report(0, loaded("b"), NOW)
    assert columns.adapters == {"a": {1}, "b": {0}}
    columns.update([Known(1).replica])
    assert columns.adapters == {"b": {0}}
