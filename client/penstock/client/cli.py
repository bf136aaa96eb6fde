"""The commands `penstock bench` and `penstock chat`. Light to import: `penstock --help` loads this module."""

import argparse
import sys

BASE_URL = "http://127.0.0.1:8000"
"""Default address of `penstock serve`."""


def bench(argv: list[str]) -> int:
    """Measures a running server, any that speaks OpenAI's API, under load.

    Returns 0 when every request succeeded, 1 when some failed or the server does not answer, 2 on flags that make no sense, 130
    when interrupted.
    """
    from penstock.client.bench.flags import parser

    args = parser(bench.__doc__ or "").parse_args(argv)
    if args.base_url is None:
        args.base_url, source = _found(args.model)
        args.tokenizer = args.tokenizer or source
    import uvloop

    from penstock.client.bench.datasets import DatasetError
    from penstock.client.bench.serve import Interrupted, run
    from penstock.client.server import ServerError

    try:
        return uvloop.run(run(args))
    except DatasetError as error:
        sys.stderr.write(f"penstock bench: {error}\n")
        return 2
    except ServerError as error:
        sys.stderr.write(f"penstock bench: {error}\n")
        return 1
    except (Interrupted, KeyboardInterrupt):
        return 130


def chat(argv: list[str]) -> int:
    """Chats with a running server in the terminal.

    Returns 0 at the end of the input, 1 when the server cannot be reached or, without a terminal, does not answer.
    """
    args = _chat_parser().parse_args(argv)
    args.base_url = args.base_url or _found(args.model)[0]
    from penstock.client.chat import run
    from penstock.client.server import ServerError

    try:
        return run(args.base_url, args.model, args.system, args.max_tokens, args.temperature, args.image)
    except ServerError as error:
        sys.stderr.write(f"penstock chat: {error}\n")
        return 1


def _found(model: str | None) -> tuple[str, str | None]:
    """The address of what `penstock up` serves, or of `penstock serve`, and where the model's tokenizer is, if that is known."""
    from penstock.local_system import running

    try:
        system = running()
    except ValueError as error:
        raise SystemExit(f"penstock: {error}") from None
    if system is None:
        return BASE_URL, None
    source = system.sources.get(model or next(iter(system.sources)))
    return system.url, None if source is None else source.removeprefix("file://").removeprefix("hf://")


def _chat_parser() -> argparse.ArgumentParser:
    from penstock.flag_values import not_negative, positive

    parser = argparse.ArgumentParser(
        prog="penstock chat",
        description="Chats with a running server in the terminal. What is piped in is one question. OPENAI_API_KEY is sent.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--base-url", help=f"address of any OpenAI-compatible server (default: what `penstock up` serves, else {BASE_URL})")
    add("--model", help="name of the model (default: the first in the server's list)")
    add("--system", metavar="TEXT", help="a system message")
    add("--image", action="append", default=[], metavar="FILE", help="image for the first question; may be given several times")
    add("--max-tokens", type=positive, metavar="N", help="largest number of tokens in an answer (default: the server's)")
    add("--temperature", type=not_negative, metavar="T", help="sampling temperature (default: the server's)")
    return parser
