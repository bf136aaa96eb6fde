"""`penstock capacity`: the rows that it makes of InferenceModels, and their sums."""

import io
from typing import Any

from rich.console import Console

from penstock.operator.kubectl.capacity import rows, table


def model(name: str, pools: list[Any], status: Any) -> Any:
    spec = {"served": {"name": name}, "source": {"uri": "/m"}, "pools": pools}
    meta = {"name": name, "namespace": "team"}
    return {"apiVersion": "penstock.dev/v1alpha1", "kind": "InferenceModel", "metadata": meta, "spec": spec, "status": status}


GPU = {"name": "gpu", "cost": 300, "accelerator": {"resource": "nvidia.com/gpu"}, "scaling": {"max": 4}}
BIG = model(
    "big",
    [GPU, {"name": "cpu", "cost": 20}],
    {
        "pools": [
            {"name": "gpu", "ready": "2/4", "updated": 2, "warming": 1, "draining": 1, "cost": 1200},
            {"name": "cpu", "ready": "1/1", "updated": 1, "warming": 0, "draining": 0, "cost": 20},
        ],
        "scaling": [{"pool": "gpu", "current": 3, "desired": 4, "constraint": "Budget", "reason": "…"}],
    },
)
STUCK = model(
    "stuck",
    [{"name": "main"}],
    {
        "pools": [{"name": "main", "ready": "1/1", "updated": 0}],
        "conditions": [{"type": "Progressing", "reason": "RolloutBlocked"}],
    },
)


def shown(found: Any) -> list[str]:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(table(found))
    return [" ".join(line.split()) for line in captured.get().splitlines()]


def test_a_pool_has_its_devices_its_cost_and_what_holds_it_back() -> None:
    assert shown(rows([STUCK, BIG])) == [
        "POOL READY WARMING DRAINING MAX DEVICES COST HELD BACK BY",
        "team/big/cpu 1/1 0 0 – – 20",
        "team/big/gpu 2/4 1 1 4 4 nvidia.com/gpu 1200 Budget",
        "team/stuck/main 1/1 0 0 – – 0 RolloutBlocked",
        "all 4/6 1 1 4 nvidia.com/gpu 1220",
    ]


def test_a_model_that_no_operator_has_seen_yet_has_nothing_and_one_that_cannot_be_read_is_left_out() -> None:
    assert [(row.place, row.ready, row.cost) for row in rows([model("new", [GPU], {}), model("bad", [{"nam": "a"}], {})])] == [
        ("team/new/gpu", 0, 0)
    ]
