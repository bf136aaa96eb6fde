"""What `penstock up` shows: replicas, their state and load, the URL and a request to paste."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.api.fleet import PoolsView, ReplicaLoad
from penstock.operator.local.pod import Phase
from penstock.operator.local.runtime import LocalRuntime

_COLOURS = {
    Phase.STARTING: "yellow",
    Phase.READY: "green",
    Phase.NOT_READY: "yellow",
    Phase.TERMINATING: "magenta",
    Phase.CRASHED: "red",
}


def example_request(runtime: LocalRuntime) -> str:
    """A request to paste into a shell."""
    model = runtime.models[0].model.served_names[0]
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "What does json.loads do?"}}]}}'
    return f"curl -N {runtime.endpoints.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"


def render(runtime: LocalRuntime, view: PoolsView | None) -> RenderableType:
    """The whole picture."""
    loads = {replica.uid: replica for pool in (view.pools if view else []) for replica in pool.replicas}
    table = Table("replica", "address", "state", "running", "waiting", "KV", "tokens/s", box=None, pad_edge=False)
    for pool_id, deployment in runtime.deployments.items():
        size = f"{deployment.ready}/{deployment.replicas} ready"
        table.add_row(Text(pool_id, style="bold"), "", size)
        for pod in [*deployment.pods, *deployment.leaving]:
            state = Text(pod.phase.value, style=_COLOURS[pod.phase])
            if pod.message:
                state.append(f"  {pod.message}", style="dim")
            table.add_row(f"  {pod.name}", f"{pod.address}:{pod.port('http')}", state, *_load(loads.get(pod.uid)))
    for service in runtime.services.values():
        if service.message:
            table.add_row(Text(service.name, style="bold"), "", Text(f"restarts  {service.message}", style="red"))
    hints = Text.assemble(
        ("gateway   ", "dim"),
        (runtime.endpoints.url, "bold cyan"),
        ("    why: ", "dim"),
        f"{runtime.endpoints.gateway}/debug/decisions",
        ("    logs: ", "dim"),
        str(runtime.logs),
    )
    return Group(
        hints,
        "",
        table,
        "",
        *(
            Text(f"autoscaler: {pool_id}: {report.constraint}: {report.reason}", style="dim")
            for pool_id, report in runtime.reports.items()
        ),
        Text("try it:", style="dim"),
        Text(example_request(runtime), no_wrap=False),
        "",
        "Ctrl-C stops everything.",
    )


def _load(load: ReplicaLoad | None) -> tuple[str, str, str, str]:
    if load is None or load.report is None:
        return ("–", "–", "–", "–")
    report = load.report
    return (
        str(report.num_requests_running),
        str(report.waiting),
        f"{report.kv_cache_usage_perc:.0%}",
        f"{report.generation_tokens_per_s:.0f}",
    )


def summary(runtime: LocalRuntime) -> str:
    """One line that changes when something has happened, for a terminal that is none."""
    pools = [f"{pool_id} {deployment.ready}/{deployment.replicas}" for pool_id, deployment in runtime.deployments.items()]
    services = [f"{service.name} restarts ({service.message})" for service in runtime.services.values() if service.message]
    return ", ".join(pools + services)
