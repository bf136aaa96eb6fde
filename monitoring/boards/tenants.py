"""The load, budgets and refusals of each tenant."""

from typing import Final

from monitoring.panels import Board, Panel, Query, Row
from monitoring.queries import rate, total
from penstock.api import metrics

_NEEDS: Final = "a gateway with --tenants"
_over_budget = rate(metrics.TENANT_REQUESTS, 'outcome="over_budget"', by="tenant")
_all_tokens, _tokens = (rate(metrics.TENANT_TOKENS, 'kind=~"prompt|output"', by=by) for by in ("", "tenant"))
_cached, _prompt = (rate(metrics.TENANT_TOKENS, f'kind="{kind}"', by="tenant") for kind in ("cached", "prompt"))

_REQUESTS = Row(
    "Requests",
    [
        Panel(
            "Requests by tenant",
            "Requests per second that the gateway sent to a replica.",
            [Query(rate(metrics.TENANT_REQUESTS, 'outcome="routed"', by="tenant"), "{{tenant}}")],
            unit="reqps",
            kind="stacked",
            needs=_NEEDS,
        ),
        Panel(
            "Requests over budget",
            "429 answers per second. Ask the tenant to slow down, or raise its budget in the tenants file.",
            [Query(_over_budget, "{{tenant}}")],
            unit="reqps",
            kind="stacked",
            needs=_NEEDS,
        ),
        Panel(
            "Requests refused",
            "Requests per second that the gateway refused for other reasons: no replica, a full queue, an invalid body.",
            [Query(rate(metrics.TENANT_REQUESTS, 'outcome="refused"', by="tenant"), "{{tenant}}")],
            unit="reqps",
            kind="stacked",
            needs=_NEEDS,
        ),
        Panel(
            "Requests in flight by tenant",
            "Queued and running requests. A flat top shows that the tenant is at its `maxConcurrent`.",
            [Query(total(metrics.TENANT_RUNNING, by="tenant"), "{{tenant}}")],
            kind="stacked",
            needs=_NEEDS,
        ),
    ],
)
_TOKENS = Row(
    "Tokens",
    [
        Panel(
            "Tokens by tenant",
            "Prompt and output tokens per minute. `tokensPerMinute` limits this number.",
            [Query(f"60 * {_tokens}", "{{tenant}}")],
            kind="stacked",
            needs=_NEEDS,
        ),
        Panel(
            "Share of all tokens",
            "Tenants of equal priority that compete get shares in proportion to their weights.",
            [Query(f"{_tokens} / on () group_left {_all_tokens}", "{{tenant}}")],
            unit="percentunit",
            most=1,
            needs=_NEEDS,
        ),
        Panel(
            "Cached share of prompts",
            "Tenants share no cached prefixes. A low share means that the tenant's own prompts have little in common.",
            [Query(f"{_cached} / {_prompt}", "{{tenant}}")],
            unit="percentunit",
            most=1,
            needs=_NEEDS,
        ),
    ],
)

TENANTS: Final = Board("penstock-tenants", "Penstock / Tenants", __doc__ or "", [], [_REQUESTS, _TOKENS])
