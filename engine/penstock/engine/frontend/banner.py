"""What `penstock serve` says on a terminal when it is ready: what runs, and one request to try."""

import json
import shlex
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.prompt.processor import CHAT_PATH, EMBEDDINGS_PATH

if TYPE_CHECKING:
    from penstock.engine.frontend.processes.serve import ServeConfig


def show(config: "ServeConfig", kernels: str, num_blocks: int) -> None:
    """Writes the banner to standard error where that is a terminal.

    Args:
        config: Of the server.
        kernels: Which form of the model's operations runs.
        num_blocks: Of the KV cache.
    """
    if not sys.stderr.isatty():
        return
    console = Console(stderr=True)
    table = Table.grid(padding=(0, 2))
    for name, value in facts(config, kernels, num_blocks):
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    console.print()
    console.print(table)
    console.print()
    # Not in the table, and never wrapped: it is there to be copied.
    console.print(Text(try_it(config), style="green"), soft_wrap=True)
    console.print()


def facts(config: "ServeConfig", kernels: str, num_blocks: int) -> list[tuple[str, str]]:
    """Names and values; see `show`."""
    engine = config.engine
    tokens = num_blocks * engine.cache.block_size
    cpu = f"cpu, {engine.threads} thread{'' if engine.threads == 1 else 's'}"
    return [
        ("Model", f"{engine.model.served_names[0]} ({engine.model.dtype}, {engine.model.max_model_len:,} tokens of context)"),
        ("Device", cpu if engine.device == "cpu" else engine.device),
        ("Kernels", kernels or "unnamed"),
        ("KV cache", f"{tokens:,} tokens"),
        ("API", f"{config.url}/v1"),
        ("Docs", f"{config.url}/docs"),
    ]


def try_it(config: "ServeConfig") -> str:
    """A command for a shell that gets an answer."""
    model = config.engine.model
    if model.pooling is not None:
        path, body = EMBEDDINGS_PATH, {"model": model.served_names[0], "input": "Hello"}
    else:
        path, body = CHAT_PATH, {"model": model.served_names[0], "messages": [{"role": "user", "content": "Hello"}]}
    words = ["curl", f"{config.url}{path}", "-H", "content-type: application/json"]
    if config.api.api_keys:
        words += ["-H", "authorization: Bearer KEY"]
    return " ".join(shlex.quote(word) for word in [*words, "-d", json.dumps(body, ensure_ascii=False)])
