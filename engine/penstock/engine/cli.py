"""`penstock serve`. Light to import: `penstock --help` loads it."""

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.engine.frontend.http.settings import ApiSettings
    from penstock.engine.frontend.processes.serve import ServeConfig

API_KEY_VARIABLE = "PENSTOCK_API_KEY"


def serve(argv: list[str]) -> int:
    """Serves a model: one replica with an OpenAI-compatible API.

    Returns 0 after a signal, 1 when the engine failed, 2 when it cannot be started as asked.
    """
    args = _parser().parse_args(argv)
    # Heavy, hence here.
    import uvloop

    from penstock.engine.config import ConfigError
    from penstock.engine.core.ipc.client import CoreError
    from penstock.engine.frontend.processes.serve import serve as run
    from penstock.engine.frontend.processes.supervisor import supervise

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = _config(args)
        return uvloop.run(run(config) if config.api_server_count == 1 else supervise(config))
    except ConfigError as error:
        sys.stderr.write(f"penstock serve: {error}\n")
        return 2
    except CoreError as error:
        sys.stderr.write(f"penstock serve: {error}\n")
        return 1


def _config(args: argparse.Namespace) -> "ServeConfig":
    """The typed tree that the flags are a view of; raises `ConfigError` for a model that cannot be served."""
    from penstock.engine.args import EngineArgs
    from penstock.engine.frontend.processes.serve import ServeConfig

    engine = EngineArgs(**{name: getattr(args, name) for name in EngineArgs.__struct_fields__})
    return ServeConfig(
        engine=engine.config(),
        host=args.host,
        port=args.port,
        events_port=args.events_port,
        replay_port=args.replay_port,
        shutdown_timeout=args.shutdown_timeout,
        metrics_compat=args.metrics_compat,
        log_stats=not args.disable_log_stats,
        enable_control_endpoints=args.enable_control_endpoints,
        stream_interval=args.stream_interval,
        api_server_count=args.api_server_count,
        api=_api_settings(args),
    )


def _api_settings(args: argparse.Namespace) -> "ApiSettings":
    from penstock.engine.config import ConfigError
    from penstock.engine.frontend.http.settings import ApiSettings
    from penstock.engine.frontend.openai.parsing.registry import ParserConfig

    parsers = ParserConfig(args.tool_call_parser, args.reasoning_parser, args.enable_auto_tool_choice)
    if (problem := parsers.problem()) is not None:
        raise ConfigError(problem)
    # The environment keeps a key out of the list of processes.
    keys: list[str] = args.api_key or [os.environ[name] for name in (API_KEY_VARIABLE,) if name in os.environ]
    if not all(keys):
        raise ConfigError(f"--api-key or {API_KEY_VARIABLE} is empty")
    return ApiSettings(parsers=parsers, api_keys=tuple(keys))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock serve",
        description="Serves a model: one replica with an OpenAI-compatible API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder in Hugging Face format, file://… or hf://org/name")
    _add_server_flags(parser)
    _add_engine_flags(parser)
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on, for HTTP and events")
    add("--port", type=_port, default=8000, help="HTTP port")
    add("--events-port", type=_port, default=5557, help="port of the event stream (ZMQ PUB)")
    add("--replay-port", type=_port, default=5558, help="port for the replay of events (ZMQ ROUTER)")
    add(
        "--served-model-name", nargs="+", metavar="NAME", help="names that requests may give (None: MODEL); answers say the first"
    )
    add("--metrics-compat", choices=["vllm"], help="whose names metrics have beside our own")
    add("--disable-log-stats", action="store_true", help="no line every ten seconds about what the engine did")
    add("--stream-interval", type=_positive, default=1, help="tokens in an event of a stream, but for the first and the last one")
    add("--api-server-count", type=_positive, default=1, help="frontend processes that share the port and the core")
    add("--api-key", nargs="+", metavar="KEY", help=f"keys of which a request must have one (None: {API_KEY_VARIABLE}, or open)")
    add("--enable-auto-tool-choice", action="store_true", help="find tool calls in answers; needs --tool-call-parser")
    add("--tool-call-parser", metavar="NAME", help="how the model writes tool calls: docs/engine/api.md lists the names")
    add("--reasoning-parser", metavar="NAME", help="how the model marks its reasoning: docs/engine/api.md lists the names")
    add("--shutdown-timeout", type=_seconds, default=120.0, help="seconds that running requests get after SIGTERM")
    add("--enable-control-endpoints", action="store_true", help="serve /pause, /sleep, /reload_weights …: for a trusted network")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    add("--dtype", choices=["auto", "bfloat16", "float32", "float16"], default="auto", help="auto: the checkpoint's")
    add("--device", choices=["auto", "cpu"], default="auto", help="where the model runs")
    add("--max-model-len", type=_positive, help="tokens of prompt and output together (None: the checkpoint's)")
    add("--max-num-seqs", type=_positive, default=256, help="sequences in a step at most")
    add("--max-num-batched-tokens", type=_positive, default=2048, help="tokens in a step at most")
    add("--long-prefill-token-threshold", type=_count, default=0, help="prompt tokens of one request in a step; 0: no cap")
    add("--enable-chunked-prefill", action=argparse.BooleanOptionalAction, default=True, help="compute prompts in chunks")
    add(
        "--scheduling-policy",
        choices=["fcfs", "priority"],
        default="fcfs",
        help="by arrival, or by priority first",
    )
    add(
        "--max-num-waiting",
        type=_count,
        default=1024,
        help="sequences in the queue at most",
    )
    add(
        "--watermark",
        type=_share,
        default=0.01,
        help="share of the KV blocks that admission leaves free",
    )
    add("--tenant-weights", type=_weights, default={}, metavar="NAME=WEIGHT,…", help="shares of tenants' service; others have 1")
    add("--async-scheduling", action=argparse.BooleanOptionalAction, help="plan the next step while one runs (None: not on CPU)")
    add("--block-size", type=_positive, default=16, help="tokens in a KV block")
    add("--num-gpu-blocks-override", type=_positive, help="KV blocks (None: from memory)")
    add("--kv-cache-memory-bytes", type=_positive, help="memory for the KV cache (None: see the next)")
    add(
        "--gpu-memory-utilization",
        type=_utilization,
        help="share of the device's memory for weights, steps and KV cache together (None: 10 %% for the KV cache alone)",
    )
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="reuse the KV of equal prefixes")
    add("--hash-seed", default="penstock", help="names the hash space of KV blocks; equal in all replicas of a model")
    add("--profile-dir", metavar="FOLDER", help="where /start_profile and /stop_profile leave traces (None: they are refused)")
    add("--watchdog-timeout", type=_positive, default=120, help="seconds without a step after which work counts as hung")
    add("--seed", type=_count, default=0, help="of the seeds drawn for requests that bring none")
    modes = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
    add("--logits-processors", nargs="+", metavar="MODULE:CLASS", help="logits processors of one's own, importable by the engine")
    add("--logprobs-mode", choices=modes, default=modes[0], help="what logprobs are: before or after masks, temperature, filters")


def _integer(text: str, least: int, most: int | None = None) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least or (most is not None and number > most):
        raise argparse.ArgumentTypeError(f"{number} is not {f'{least} to {most}' if most is not None else f'at least {least}'}")
    return number


def _positive(text: str) -> int:
    return _integer(text, 1)


def _count(text: str) -> int:
    return _integer(text, 0)


def _port(text: str) -> int:
    return _integer(text, 1, 65535)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 on")
    return seconds


def _share(text: str) -> float:
    share = _number(text)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to below 1")
    return share


def _utilization(text: str) -> float:
    share = _number(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0, up to 1")
    return share


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for item in text.split(","):
        tenant, _, number = item.rpartition("=")
        try:
            weights[tenant] = float(number)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{item!r} is not NAME=WEIGHT") from None
        if not tenant or not 0 < weights[tenant] < float("inf"):
            raise argparse.ArgumentTypeError(f"{item!r} is not NAME=WEIGHT with a weight above 0")
    return weights
