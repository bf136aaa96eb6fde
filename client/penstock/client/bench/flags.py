"""The flags of `penstock bench`, named as those of `vllm bench serve` where it has them."""

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.client.bench.report import BOUNDS, METRICS
from penstock.flag_values import above_zero, count, not_negative, number, positive, rate, share

DATASETS = ("random", "prefix_repetition", "sharegpt", "trace")
_FIXED = ("model", "prompt", "messages", "stream", "n", "max_tokens", "max_completion_tokens")


def parser(description: str) -> argparse.ArgumentParser:
    """`penstock bench`, whose one subcommand today is `serve`."""
    top = argparse.ArgumentParser(prog="penstock bench", description=description.partition("\n")[0], allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="serve")
    text = "Sends streamed requests to a running server and measures every token. OPENAI_API_KEY is sent."
    one = commands.add_parser(
        "serve",
        help="online serving",
        description=text,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for add_group in (_server, _load, _dataset, _random, _prefix, _sharegpt, _trace, _sampling, _report):
        add_group(one)
    return top


def _server(one: argparse.ArgumentParser) -> None:
    add = one.add_argument_group("server").add_argument
    add(
        "--base-url",
        help="of any OpenAI-compatible server, with or without /v1 (None: what `penstock up` serves, else http://127.0.0.1:8000)",
    )
    add("--endpoint", type=_endpoint, default="/v1/completions", help="this one, or /v1/chat/completions")
    add("--model", help="(None: the first of /v1/models)")
    add("--tokenizer", metavar="WHERE", help="a folder, a tokenizer.json or a name on Hugging Face (None: /prompt-bundle's)")
    add(
        "--header",
        type=_header,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="sent with each request; may be repeated",
    )
    add("--ready-check-timeout-sec", type=not_negative, default=0.0, metavar="S", help="wait so long for the server to answer")
    add("--metrics-url", nargs="+", metavar="URL", help="of each replica, for the saturation reading (None: BASE_URL/metrics)")


def _load(one: argparse.ArgumentParser) -> None:
    add = one.add_argument_group("load").add_argument
    add("--num-prompts", type=positive, metavar="N", help="requests (None: 1000, or all of a file)")
    add("--request-rate", type=rate, metavar="R", help="a second, whatever the answers do (None: inf, or the trace's times)")
    add("--burstiness", type=above_zero, default=1.0, metavar="B", help="1: Poisson arrivals; below: burstier; above: smoother")
    add("--max-concurrency", type=positive, metavar="N", help="requests at a time; with no rate: a closed loop (None: no limit)")
    add("--num-warmups", type=positive, default=1, metavar="N", help="requests before the clock starts; the first must succeed")
    add("--seed", type=count, default=0, help="of prompts, lengths and arrivals")


def _dataset(one: argparse.ArgumentParser) -> None:
    add = one.add_argument_group("dataset").add_argument
    add("--dataset-name", choices=DATASETS, default="random", help="what to ask")
    add("--dataset-path", type=Path, metavar="FILE", help="of sharegpt (.json) and trace (.jsonl: Mooncake's, .csv: Azure's)")


def _random(one: argparse.ArgumentParser) -> None:
    add = one.add_argument_group("random").add_argument
    add("--random-input-len", type=positive, default=1024, metavar="N", help="prompt tokens")
    add("--random-output-len", type=positive, default=128, metavar="N", help="output tokens")
    add("--random-range-ratio", type=share, default=0.0, metavar="R", help="lengths are uniform from N·(1-R) to N·(1+R)")
    add("--random-prefix-len", type=count, default=0, metavar="N", help="more tokens in front, the same for all")
    add(
        "--random-mm-base-items-per-request",
        type=count,
        default=0,
        metavar="N",
        help="images of noise; they need a chat endpoint",
    )
    add("--random-mm-image-size", type=_size, default="512x512", metavar="WxH", help="their pixels")


def _prefix(one: argparse.ArgumentParser) -> None:
    add = one.add_argument_group("prefix_repetition").add_argument
    add("--prefix-repetition-prefix-len", type=positive, default=256, metavar="N", help="tokens of a shared beginning")
    add("--prefix-repetition-suffix-len", type=positive, default=256, metavar="N", help="tokens of a prompt's own end")
    add("--prefix-repetition-num-prefixes", type=positive, default=10, metavar="N", help="different beginnings")
    add("--prefix-repetition-output-len", type=positive, default=128, metavar="N", help="output tokens")


def _sharegpt(one: argparse.ArgumentParser) -> None:
    add = one.add_argument_group("sharegpt").add_argument
    add("--sharegpt-output-len", type=positive, metavar="N", help="output tokens (None: those of the answer in the file)")


def _trace(one: argparse.ArgumentParser) -> None:
    add = one.add_argument_group("trace").add_argument
    add("--trace-block-size", type=positive, default=512, metavar="N", help="prompt tokens that a hash id stands for")
    add("--trace-speedup", type=above_zero, default=1.0, metavar="F", help="replay so many times faster")
    add("--trace-length-scale", type=above_zero, default=1.0, metavar="F", help="multiply all lengths, for smaller contexts")


def _sampling(one: argparse.ArgumentParser) -> None:
    add = one.add_argument_group("sampling").add_argument
    add("--ignore-eos", action="store_true", help="every answer gets its full length, from servers that know this field")
    add("--temperature", type=not_negative, default=0.0, help="0: greedy")
    add("--extra-body", type=_body, default={}, metavar="JSON", help="more fields of the request")


def _report(one: argparse.ArgumentParser) -> None:
    add = one.add_argument_group("report").add_argument
    add("--percentile-metrics", type=_metrics, default="ttft,tpot,itl", metavar="LIST", help=f"of {','.join(METRICS)}")
    add("--metric-percentiles", type=_percentiles, default="50,90,99", metavar="LIST", help="which percentiles")
    add(
        "--goodput",
        type=_bound,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help=f"bounds that good answers hold: {','.join(BOUNDS)}",
    )
    add("--num-devices", type=positive, default=1, metavar="N", help="accelerators behind the server")
    add("--cost-per-hour", type=above_zero, metavar="PRICE", help="of one device, in any currency")
    add("--save-result", action="store_true", help="write the numbers as JSON")
    add("--save-detailed", action="store_true", help="with each request's own numbers; implies --save-result")
    add("--result-dir", type=Path, default=Path(), metavar="DIR", help="where to")
    add("--result-filename", metavar="NAME", help="(None: dataset, rate, model and time)")


# --- values ---


def _endpoint(text: str) -> str:
    if not text.startswith("/") or not text.endswith("/completions"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither …/completions nor …/chat/completions")
    return text


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT, such as 512x512")
    return int(width), int(height)


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _body(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    if not isinstance(body.get("stream_options", {}), dict):
        raise argparse.ArgumentTypeError("stream_options must be an object")
    if fixed := [name for name in _FIXED if name in body]:
        raise argparse.ArgumentTypeError(f"{', '.join(fixed)} cannot be set here")
    return body


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"no metric {', '.join(map(repr, unknown))}; there are {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    values = [number(part, 0) for part in text.split(",")]
    if any(value > 100 for value in values):
        raise argparse.ArgumentTypeError("a percentile is 0 to 100")
    return values


def _bound(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in BOUNDS:
        raise argparse.ArgumentTypeError(f"{text!r} bounds none of {', '.join(BOUNDS)}")
    return name, number(value, 0)
