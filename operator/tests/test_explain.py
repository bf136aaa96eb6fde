"""`penstock explain` against an API server that answers from a script."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock import local_system
from penstock.api.fleet import PoolLoad, PoolsView, ReplicaLoad
from penstock.api.load_report import LoadReport
from penstock.operator import explain
from penstock.operator.autoscale.bounds import Decision
from penstock.operator.autoscale.learned import Learned
from penstock.operator.autoscale.loop import Record
from penstock.operator.command_line import CommandFailed
from penstock.operator.local.models import load_models
from penstock.operator.local.runtime import LocalRuntime
from penstock.operator.rollout import cli as rollout
from penstock.operator.rollout import commands

LEARNED = {"coldStartSeconds": 77, "prefillTokensPerSecond": 4000}


def gateway_view() -> PoolsView:
    report = LoadReport(1, 1, num_requests_running=6, max_num_seqs=8)
    replicas = [
        ReplicaLoad(
            uid=uid, name=uid, port=8000, ready=True, cordoned=False, report=report, report_age_s=0.1, pending=0, in_flight=6
        )
        for uid in ("uid-a", "uid-b")
    ]
    return PoolsView(
        gateway="g", version=1, pools=[PoolLoad(id="default/tiny/main", model="default/tiny", held=0, replicas=replicas)]
    )


@pytest.fixture
async def kubeconfig(make: Any, tmp_path: Path) -> AsyncIterator[str]:
    resource = make.resource(pools=[{"name": "main", "scaling": {"min": 1, "max": 8}}])
    decision = {"pool": "main", "current": 2, "desired": 2, "constraint": "Demand", "reason": "so", "learned": LEARNED}
    resource["status"] = {"scaling": [decision]}
    answers = {
        "/apis/penstock.dev/v1alpha1/namespaces/default/inferencemodels/tiny": resource,
        "/apis/penstock.dev/v1alpha1/namespaces/default/inferencemodels/fixed": make.resource("fixed"),
        "/apis/apps/v1/namespaces/default/deployments/tiny-main": {"spec": {"replicas": 2}},
        "/api/v1/namespaces/default/pods": {"items": [make.ready_pod("a"), make.ready_pod("b")]},
        "/api/v1/namespaces/penstock-system/services/penstock-gateway:http/proxy/pools": msgspec.to_builtins(gateway_view()),
    }

    async def answer(request: web.Request) -> web.Response:
        found = answers.get(request.path)
        return web.json_response(found if found else {"message": "not found"}, status=200 if found else 404)

    app = web.Application()
    app.router.add_route("GET", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    yield str(path)
    await runner.cleanup()


async def story(kubeconfig: str, *argv: str) -> dict[str, Any]:
    return await explain.story_of(explain.parser().parse_args(["--kubeconfig", kubeconfig, *argv]))


async def test_it_says_what_there_is_what_was_learned_and_where_it_settles(kubeconfig: str) -> None:
    told = await story(kubeconfig, "tiny")
    (pool,) = told["pools"]
    assert told["gateway"] and (pool["replicas"], pool["settles"]["replicas"]) == (2, 2)
    assert "12 requests" in pool["next"]["reason"]
    assert (pool["learned"]["cold_start_s"], pool["learned"]["prefill_tokens_per_s"]) == (77, 4000)
    assert "3 from 1.10 times this load on, 1 below 0.50 times" in pool["would_change"]


async def test_what_if_runs_the_same_policy(kubeconfig: str) -> None:
    (pool,) = (await story(kubeconfig, "tiny", "--load", "2x"))["pools"]
    assert pool["settles"]["replicas"] == 4
    assert pool["replicas"] == 2


async def test_without_a_gateway_it_says_so_and_invents_nothing(kubeconfig: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = await story(kubeconfig, "tiny", "--system-namespace", "elsewhere")
    assert not told["gateway"] and told["pools"][0]["next"]["constraint"] == "NoData"
    assert "no gateway answers" in capsys.readouterr().err


async def test_what_has_no_scaling_is_not_explained(kubeconfig: str) -> None:
    with pytest.raises(CommandFailed, match="no pool has scaling"):
        await story(kubeconfig, "fixed")
    with pytest.raises(CommandFailed, match="there is no InferenceModel default/other"):
        await story(kubeconfig, "other")


async def test_the_namespace_is_the_contexts_for_rollout_and_explain(kubeconfig: str) -> None:
    file = Path(kubeconfig)
    config = json.loads(file.read_text())
    config["contexts"][0]["context"]["namespace"] = "team-a"
    file.write_text(json.dumps(config))
    with pytest.raises(CommandFailed, match="there is no InferenceModel team-a/tiny"):
        await story(kubeconfig, "tiny")
    assert (await story(kubeconfig, "tiny", "-n", "default"))["model"] == "default/tiny"
    options = rollout.parser().parse_args(["status", "tiny", "--kubeconfig", kubeconfig])
    with pytest.raises(CommandFailed, match="there is no InferenceModel team-a/tiny"):
        await commands.run(options, print)


def test_without_an_api_server_to_go_to_it_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["tiny", "--kubeconfig", str(tmp_path / "none")]) == 2
    assert "no API server to go to" in capsys.readouterr().err


EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny.yaml"


@pytest.fixture
async def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalRuntime]:
    """The parts of `penstock up` that the command asks, with a gateway that answers from a script."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "models.yaml"
    fixed = EXAMPLE.read_text().replace("name: tiny", "name: fixed").partition("      scaling:")[0]
    file.write_text(f"{EXAMPLE.read_text()}\n---\n{fixed}")
    runtime = LocalRuntime(load_models(file), tmp_path / "run", 1)
    view = gateway_view()
    view = msgspec.structs.replace(view, pools=[msgspec.structs.replace(view.pools[0], id="default/tiny/cpu")])

    async def pools(_: web.Request) -> web.Response:
        return web.json_response(msgspec.to_builtins(view))

    app = web.Application()
    app.add_routes([web.get("/models", runtime.tell), web.get("/pools", pools)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    here = f"http://127.0.0.1:{runner.addresses[0][1]}"
    local_system.announce("http://127.0.0.1:1", here, here, {})
    yield runtime
    await runner.cleanup()


async def here(*argv: str) -> dict[str, Any]:
    return await explain.story_of(explain.parser().parse_args(["--local", *argv]))


async def test_a_local_system_is_explained_as_a_cluster_is(local: LocalRuntime) -> None:
    learned = Learned(prefill_tokens_per_s=4000, cold_start_s=77)
    decision = Decision(3, "Demand", "3 are needed", {})
    await local.record(Record("default/tiny/cpu", 2, decision, learned, acted=True, dry_run=False))
    told = await here("tiny")
    assert (told["model"], told["gateway"]) == ("default/tiny", True)
    (pool,) = told["pools"]
    assert (pool["pool"], pool["min"], pool["max"], pool["replicas"]) == ("cpu", 2, 4, 2)
    assert "12 requests" in pool["next"]["reason"]
    assert (pool["learned"]["cold_start_s"], pool["learned"]["prefill_tokens_per_s"]) == (77, 4000)
    assert (pool["autoscaler"]["desired"], pool["autoscaler"]["constraint"]) == (3, "Demand")
    assert pool["autoscaler"]["decisions"][0].endswith("2 to 3 (Demand): 3 are needed")
    (twice,) = (await here("tiny", "--load", "2x"))["pools"]
    assert twice["settles"]["replicas"] == 4


async def test_a_local_model_that_is_not_scaled_or_not_there_says_so(local: LocalRuntime) -> None:
    with pytest.raises(CommandFailed, match="no pool has scaling"):
        await here("fixed")
    with pytest.raises(CommandFailed, match="there is no model other here; there is default/fixed, default/tiny"):
        await here("other")


async def test_a_local_gateway_that_is_silent_leaves_demand_unknown(
    local: LocalRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    system = local_system.running()
    assert system is not None
    local_system.announce(system.url, "http://127.0.0.1:1", system.own, {})
    told = await here("tiny")
    assert not told["gateway"] and told["pools"][0]["next"]["constraint"] == "NoData"
    assert "no gateway answers" in capsys.readouterr().err


def test_flags_for_a_cluster_are_refused_beside_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for flags in (["-n", "a"], ["--gateway", "http://g"]):
        with pytest.raises(SystemExit):
            explain.main(["tiny", "--local", *flags])
    assert "--gateway is for clusters" in capsys.readouterr().err
    assert explain.main(["tiny", "--local"]) == 1
    assert capsys.readouterr().err == "penstock explain: no system of penstock up runs on this machine\n"
