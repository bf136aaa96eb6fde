"""`penstock crds --check`: whether the CRDs of a cluster, or of a file, may be replaced by ours."""

import asyncio
from pathlib import Path

import yaml

from penstock.api import resources
from penstock.api.resources.compat import breaking
from penstock.kube.client import connect
from penstock.operator.api import ServerApi
from penstock.operator.objects import Object

CRD = "CustomResourceDefinition"


def check(path: Path | None, kubeconfig: str | None) -> list[str]:
    """A line for each thing that stands against it.

    Args:
        path: YAML with the older CRDs; None: those of the cluster.
        kubeconfig: For the cluster; None: the pod's ServiceAccount, else kubectl's file.

    Raises:
        NoApiServer: there is no cluster to ask.
        ApiException: it refuses to answer.
        ValueError: the file is no YAML with CRDs.
    """
    ours = {crd["metadata"]["name"]: crd for crd in resources.crds()}
    theirs = asyncio.run(_of_cluster(list(ours), kubeconfig)) if path is None else _of_file(path)
    return [f"{crd['metadata']['name']}: {line}" for crd in theirs for line in breaking(crd, ours[crd["metadata"]["name"]])]


async def _of_cluster(names: list[str], kubeconfig: str | None) -> list[Object]:
    client = await connect(kubeconfig)
    try:
        found = [await ServerApi(client).get(CRD, None, name) for name in names]
    finally:
        await client.close()
    return [crd for crd in found if crd is not None]


def _of_file(path: Path) -> list[Object]:
    ours = {crd["metadata"]["name"] for crd in resources.crds()}
    try:
        found = [it for it in yaml.safe_load_all(path.read_text()) if it and it["kind"] == CRD and it["metadata"]["name"] in ours]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no YAML with CRDs: {error!r}") from None
    if not found:
        raise ValueError(f"{path} holds none of {', '.join(sorted(ours))}")
    return found
