"""`penstock up` and `penstock demo`: the whole system on one machine."""

import argparse
import asyncio
import contextlib
import logging
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live

from penstock.flag_values import port
from penstock.local_system import announce
from penstock.operator.local.demo import ask
from penstock.operator.local.models import LocalModel, ModelFileError, load_models, one_model
from penstock.operator.local.network import NetworkError
from penstock.operator.local.runtime import LocalError, LocalRuntime, run_folder
from penstock.operator.local.view import example_request, render, summary

REFRESH_S = 0.5

Job = Callable[[LocalRuntime, Console], Awaitable[None]]
"""What to do once the system serves."""


def up(argv: list[str]) -> int:
    """Runs a model, or the models of a file, on this machine, in the foreground, until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="penstock up", description=up.__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("model", nargs="?", metavar="MODEL", help="a folder with a checkpoint, or a name on the Hugging Face Hub")
    _add_filename(what, required=False)
    _add_port(parser)
    arguments = parser.parse_args(argv)
    if arguments.model is not None:
        return _run(lambda: [one_model(arguments.model)], arguments.port, watch)
    return _run(lambda: load_models(arguments.filename), arguments.port, watch)


def demo(argv: list[str]) -> int:
    """Starts the models of a file, asks one question through the gateway, prints the answer, and stops everything."""
    parser = argparse.ArgumentParser(prog="penstock demo", description=demo.__doc__)
    _add_filename(parser, required=True)
    _add_port(parser)
    parser.add_argument("--question", default="What does json.loads do?", help="(default: %(default)s)")
    arguments = parser.parse_args(argv)

    async def job(runtime: LocalRuntime, out: Console) -> None:
        await ask(runtime, arguments.question, out)

    return _run(lambda: load_models(arguments.filename), arguments.port, job)


def _add_filename(parser: Any, *, required: bool) -> None:
    parser.add_argument("-f", "--filename", type=Path, required=required, help="YAML file with InferenceModels")


def _add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=port, default=8080, help="where the gateway listens on 127.0.0.1 (default: %(default)s)")


def _run(load: Callable[[], list[LocalModel]], port: int, job: Job) -> int:
    out = Console(stderr=True)  # progress; standard output is for the answer alone
    try:
        models = load()
    except ModelFileError as error:
        out.print(f"[red]penstock: {error}[/red]", soft_wrap=True, highlight=False)
        return 2
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    folder = run_folder()
    try:
        asyncio.run(_serve(models, port, folder, job, out))
    except (LocalError, NetworkError) as error:
        out.print(f"[red]penstock: {error}[/red]", soft_wrap=True, highlight=False)
        if any((folder / "logs").glob("*")):
            out.print(f"[dim]logs are kept in {folder}[/dim]", soft_wrap=True, highlight=False)
        else:  # nothing was started
            shutil.rmtree(folder)
        return 1
    shutil.rmtree(folder)
    return 0


async def _serve(models: list[LocalModel], port: int, folder: Path, job: Job, out: Console) -> None:
    """Starts everything, waits until it serves, does the job, stops everything; Ctrl-C or SIGTERM ends it early, and
    once more at once."""
    loop, main_task = asyncio.get_running_loop(), asyncio.current_task()
    assert main_task is not None
    interrupted = asyncio.Event()
    runtime = LocalRuntime(models, folder, port)

    def interrupt() -> None:
        if interrupted.is_set():
            runtime.hurry()
            return
        interrupted.set()
        main_task.cancel()
        out.print("stopping: running requests may finish; once more ends them at once", style="dim")

    # Explicitly, since a shell starts background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    began = time.monotonic()
    try:
        async with runtime.running():
            with out.status("starting engines, gateway and Envoy"):
                await runtime.wait_ready()
            at = runtime.endpoints
            state = announce(at.url, at.gateway, at.own, {it.model.name: it.source for it in models})
            out.print(f"[green]ready[/green] in {time.monotonic() - began:.1f} s: {summary(runtime)}", highlight=False)
            try:
                await job(runtime, out)
            finally:
                state.unlink(missing_ok=True)
    except asyncio.CancelledError:
        if not interrupted.is_set():
            raise
        out.print("stopped", style="dim")


async def watch(runtime: LocalRuntime, out: Console) -> None:
    """Shows the live view until cancelled; on something that is no terminal, a line whenever something has changed."""
    async with httpx.AsyncClient(timeout=5.0) as client:
        if not out.is_terminal:
            out.print(f"gateway {runtime.endpoints.url}\ntry it: {example_request(runtime)}", soft_wrap=True, highlight=False)
        shown = summary(runtime)
        with Live(console=out, auto_refresh=False) if out.is_terminal else contextlib.nullcontext() as live:
            while True:
                runtime.check()
                if live is not None:
                    live.update(render(runtime, await runtime.view(client)), refresh=True)
                elif shown != summary(runtime):
                    shown = summary(runtime)
                    out.print(shown, highlight=False)
                await asyncio.sleep(REFRESH_S)
