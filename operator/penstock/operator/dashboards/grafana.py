"""A Grafana, by its HTTP API."""

import httpx

from penstock.operator.dashboards.files import Dashboard

TIMEOUT_S = 30.0


class GrafanaRefused(Exception):
    """Grafana does not answer, or refuses a dashboard. The message holds Grafana's words."""


def import_into(grafana: str, token: str | None, folder: str | None, made: list[Dashboard]) -> list[str]:
    """Puts the dashboards there, in place of older ones of the same uids; returns their addresses.

    Args:
        grafana: Its URL, a path below a domain included.
        token: Of a service account that may edit dashboards; None: it asks for none.
        folder: The uid of a folder; None: the general one.
        made: The dashboards.
    """
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    with httpx.Client(base_url=grafana.rstrip("/"), headers=headers, timeout=TIMEOUT_S) as client:
        for it in made:
            body = {"dashboard": {**it.content, "id": None}, "overwrite": True, "message": "penstock dashboards"}
            _post(client, it, body if folder is None else {**body, "folderUid": folder})
    return [it.link(grafana) for it in made]


def _post(client: httpx.Client, it: Dashboard, body: dict[str, object]) -> None:
    try:
        answer = client.post("/api/dashboards/db", json=body)
    except httpx.HTTPError as error:
        raise GrafanaRefused(f"{client.base_url} does not answer: {error}") from error
    if not answer.is_success:
        raise GrafanaRefused(f"{it.title}: {answer.status_code} {_words(answer)}")


def _words(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):  # a proxy's page
        return answer.text[:200]
