"""What `penstock rollout` does: it reads and writes the resource as its user may, and leaves the rest to the operator."""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from kubernetes.aio.client import ApiException

from penstock.api import labels
from penstock.kube.client import connect, list_all, usual_namespace
from penstock.operator.api import REVISIONS, ServerApi
from penstock.operator.command_line import CommandFailed
from penstock.operator.events import FORMAT, timestamp
from penstock.operator.objects import Object
from penstock.operator.rollout.revisions import NEVER, pod_revisions, sound
from penstock.operator.rollout.undo import chosen, restored

Write = Callable[[str], object]

POLL_S: Final = 0.5
TRIES: Final = 5
_FATAL: Final = ("ProgressDeadlineExceeded", "RolloutBlocked", "Paused")
"""Reasons of Progressing=False that nothing but a person ends."""


async def run(options: argparse.Namespace, write: Write) -> None:
    """Runs one command.

    Raises:
        CommandFailed: it could not be done.
        NoApiServer, ApiException, aiohttp.ClientError, TimeoutError: see `command_line.run`.
    """
    namespace = options.namespace or usual_namespace(options.kubeconfig, options.context)
    client = await connect(options.kubeconfig, options.context)
    try:
        model = Model(ServerApi(client), namespace, options.model)
        if options.command in ("history", "undo", "restart"):
            selector = {"labelSelector": f"{labels.MODEL}={options.model}"}
            model.revisions = (await list_all(client, REVISIONS.path(namespace), selector))[0]
        await _COMMANDS[options.command](model, options, write)
    finally:
        await client.close()


class Model:
    """One InferenceModel, as its user reads and writes it."""

    def __init__(self, api: ServerApi, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self.name = name
        self.revisions: list[Object] = []

    async def get(self) -> Object:
        """The resource. Raises CommandFailed where there is none."""
        found = await self._api.get("InferenceModel", self._namespace, self.name)
        if found is None:
            raise CommandFailed(f"there is no InferenceModel {self._namespace}/{self.name}")
        return found

    async def change(self, change: Callable[[Object], Object]) -> None:
        """Replace the spec by what `change` returns. Try again after a conflict with another writer."""
        for left in reversed(range(TRIES)):
            found = await self.get()
            try:
                await self._api.replace({**found, "spec": change(found["spec"])})
                return
            except ApiException as error:
                if error.status != 409 or not left:
                    raise

    async def change_rollout(self, **fields: Any) -> None:
        """Sets fields of `spec.rollout`."""
        await self.change(lambda spec: {**spec, "rollout": {**spec.get("rollout", {}), **fields}})


async def _status(model: Model, options: argparse.Namespace, write: Write) -> None:
    began, told = time.monotonic(), ""
    while True:
        state, line = _standing(await model.get())
        if line != told:
            write(f"{model.name}: {line}\n")
            told = line
        if state == "done" or not options.wait:
            return
        if state == "failed":
            raise CommandFailed(f"{model.name} does not get any further by itself")
        if options.timeout is not None and time.monotonic() - began > options.timeout:
            raise CommandFailed(f"{model.name} is not done after {options.timeout:g} s")
        await asyncio.sleep(POLL_S)


def _standing(resource: Object) -> tuple[str, str]:
    """`done`, `failed` or `waiting`, and a line that says how it stands."""
    status: Object = resource.get("status", {})
    if status.get("observedGeneration") != resource["metadata"]["generation"]:
        return "waiting", "the operator has not seen this spec yet"
    conditions = {it["type"]: it for it in status["conditions"]}
    ready, progressing = conditions["Ready"], conditions["Progressing"]
    line = f"{status['ready']} ready, revision {status.get('revision', 0)}: {ready['reason']}: {ready['message']}"
    if ready["status"] == "True" and progressing["status"] == "False":
        return "done", line
    fatal = conditions["Accepted"]["status"] == "False" or (progressing["status"] == "False" and progressing["reason"] in _FATAL)
    return "failed" if fatal else "waiting", line


async def _pause(model: Model, options: argparse.Namespace, write: Write) -> None:
    await model.change_rollout(paused=True)
    write(f"{model.name} is paused\n")


async def _resume(model: Model, options: argparse.Namespace, write: Write) -> None:
    await model.change_rollout(paused=False)
    write(f"{model.name} is resumed\n")


async def _restart(model: Model, options: argparse.Namespace, write: Write) -> None:
    await model.change(lambda spec: with_restart(spec, timestamp(), model.revisions))
    write(f"{model.name} is restarted\n")


def with_restart(spec: Object, now: str, revisions: Sequence[Object] = ()) -> Object:
    """`spec` with a restart that is later than every earlier one: replicas stay that were made for a later restart than is asked
    for. An earlier one may be within this second, or from a clock ahead of ours, and an undo takes it out of the spec.

    Args:
        revisions: The model's.

    Raises:
        CommandFailed: no time is later.
    """
    rollout: Object = spec.get("rollout", {})
    pools = [pool for revision in revisions if sound(revision) for pool in revision["data"]["pools"].values()]
    last = max(it.get("restartedAt", NEVER) for it in (rollout, *pools))
    if now <= last:
        try:
            now = (datetime.fromisoformat(last) + timedelta(seconds=1)).strftime(FORMAT)
        except (ValueError, OverflowError):
            raise CommandFailed(f"the last restartedAt is {last}, and nothing is later: write a time of the past") from None
    return {**spec, "rollout": {**rollout, "restartedAt": now}}


async def _undo(model: Model, options: argparse.Namespace, write: Write) -> None:
    revision = chosen(model.revisions, options.to_revision)
    await model.change(lambda spec: restored(spec, revision, model.revisions))
    write(f"{model.name} goes back to revision {revision['revision']}\n")


async def _history(model: Model, options: argparse.Namespace, write: Write) -> None:
    await model.get()
    rows = [("REVISION", "CREATED", "TEMPLATES", "SOURCE", "IMAGES", "PODS")]
    for revision in sorted(model.revisions, key=lambda it: it["revision"]):
        pools = revision["data"]["pools"].values()
        images = {it["image"] for pool in pools for it in pool["template"]["spec"]["containers"] if it["name"] == "engine"}
        versions = {str(pool["templateVersion"]) for pool in pools}
        rows.append(
            (
                str(revision["revision"]),
                revision["metadata"]["creationTimestamp"],
                ",".join(sorted(versions)),
                revision["data"]["spec"]["source"]["uri"],
                ",".join(sorted(images)),
                ",".join(pod_revisions(revision).values()),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


_COMMANDS: Final[dict[str, Callable[[Model, argparse.Namespace, Write], Awaitable[None]]]] = {
    "status": _status,
    "pause": _pause,
    "resume": _resume,
    "restart": _restart,
    "undo": _undo,
    "history": _history,
}
