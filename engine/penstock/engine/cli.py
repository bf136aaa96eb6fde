"""`penstock serve`. Light to import: `penstock --help` loads it."""

import argparse
import json
import logging
import os
import re
import sys
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from penstock.engine.config import AttentionBackendName, CudagraphMode, LoadFormat, LogprobsMode, RunnerType, SchedulingPolicy
from penstock.engine.connectors.eviction import PolicyName
from penstock.engine.foreign_flags import FlagParser
from penstock.engine.quant.scheme import QuantizationName, StoredMethod
from penstock.flag_values import count, not_negative, number, port, positive, share
from penstock.kernels.cpu.isa import IsaName

if TYPE_CHECKING:
    from penstock.engine.args import EngineArgs
    from penstock.engine.frontend.http.settings import ApiSettings
    from penstock.engine.frontend.http.tls import TlsFiles
    from penstock.engine.frontend.processes.serve import ServeConfig

_T = TypeVar("_T")
API_KEY_VARIABLE = "PENSTOCK_API_KEY"


def serve(argv: list[str]) -> int:
    """Serves a model: one replica with an OpenAI-compatible API.

    Returns 0 after a signal, 1 when the engine failed, 2 when it cannot be started as asked.
    """
    args = _parser().parse_args(argv)
    if args.headless:
        return _serve_headless(args)
    # Here, because the import is slow.
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
        return _failed(args.model, error, 2)
    except CoreError as error:
        return _failed(args.model, error, 1)


def _serve_headless(args: argparse.Namespace) -> int:
    """Runs a node without a frontend."""
    from penstock.engine.config import ConfigError
    from penstock.engine.kv_events_config import kv_events_config
    from penstock.engine.parallel.errors import GroupFailed
    from penstock.engine.parallel.headless import serve as run

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = _engine_args(args).config()
        if config.parallel.is_first_node:
            raise ConfigError(
                "--headless is for nodes after the first: it needs --nnodes and --node-rank above 0, or "
                "--data-parallel-size-local and --data-parallel-start-rank above 0"
            )
        return run(config, kv_events=kv_events_config(args.kv_events_config))
    except ConfigError as error:
        return _failed(args.model, error, 2)
    except GroupFailed as error:
        return _failed(args.model, error, 1)


def _failed(model: str, error: Exception, status: int) -> int:
    """Writes the last line of the output, which people and the operator's conditions quote: the cause, and the model."""
    cause = " ".join(str(error).split())
    sys.stderr.write(f"penstock serve: {cause if model in cause else f'{model}: {cause}'}\n")
    return status


def _config(args: argparse.Namespace) -> "ServeConfig":
    """The typed tree that the flags are a view of; raises `ConfigError` for a model that cannot be served."""
    from penstock.engine.config import ConfigError
    from penstock.engine.frontend.processes.serve import ServeConfig
    from penstock.engine.kv_events_config import kv_events_config

    engine = _engine_args(args)
    for flag in ("port", "events_port", "replay_port"):
        if args.admin_port is not None and args.admin_port == getattr(args, flag):
            raise ConfigError(f"--admin-port {args.admin_port} is the --{flag.replace('_', '-')} too")
    if engine.kv_transfer_config is not None and args.ssl_certfile is not None:
        raise ConfigError("--kv-transfer-config: replicas ask each other by plain HTTP; it does not go with --ssl-certfile")
    config = engine.config()
    if not (parallel := config.parallel).is_first_node:
        rank, start = parallel.node_rank, parallel.data_parallel_start_rank
        flag = f"--node-rank {rank}" if rank else f"--data-parallel-start-rank {start}"
        raise ConfigError(f"{flag} has no frontend: it needs --headless")
    return ServeConfig(
        engine=config,
        host=args.host,
        port=args.port,
        admin_port=args.admin_port,
        events_port=args.events_port,
        replay_port=args.replay_port,
        kv_events=kv_events_config(args.kv_events_config),
        shutdown_timeout=args.shutdown_timeout,
        metrics_compat=args.metrics_compat,
        log_stats=not args.disable_log_stats,
        enable_control_endpoints=args.enable_control_endpoints,
        stream_interval=args.stream_interval,
        api_server_count=args.api_server_count,
        api=_api_settings(args),
    )


def _engine_args(args: argparse.Namespace) -> "EngineArgs":
    from penstock.engine.args import EngineArgs

    return EngineArgs(**{name: getattr(args, name) for name in EngineArgs.__struct_fields__})


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
    if args.allow_runtime_lora_updating and not args.enable_lora:
        raise ConfigError("--allow-runtime-lora-updating needs --enable-lora")
    updating: bool = args.allow_runtime_lora_updating
    return ApiSettings(
        parsers=parsers,
        api_keys=tuple(keys),
        allowed_origins=tuple(args.allowed_origins),
        tls=_tls(args),
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        runtime_lora_updating=updating,
    )


def _tls(args: argparse.Namespace) -> "TlsFiles | None":
    from penstock.engine.config import ConfigError
    from penstock.engine.frontend.http.tls import TlsFiles

    if args.ssl_certfile is None or args.ssl_keyfile is None:
        if args.ssl_certfile or args.ssl_keyfile or args.ssl_ca_certs:
            raise ConfigError("--ssl-certfile and --ssl-keyfile come together, and --ssl-ca-certs with them")
        return None
    files = TlsFiles(certificates=args.ssl_certfile, key=args.ssl_keyfile, clients=args.ssl_ca_certs)
    files.context()  # what cannot be used is said now, not when a model has been loaded
    return files


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="penstock serve",
        description="Serves a model: one replica with an OpenAI-compatible API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder in Hugging Face format, org/name on the Hugging Face Hub, file://…, hf://… or s3://…",
    )
    _add_server_flags(parser)
    add_engine_flags(parser)
    add_lora_flags(parser)
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on, for HTTP and events")
    add("--port", type=port, default=8000, help="HTTP port")
    add("--admin-port", type=port, help="HTTP port for endpoints that change the engine: adapters, /sleep … (None: --port)")
    add("--events-port", type=port, help="port of the event stream, ZMQ PUB (None: 5557, or a free port if that is taken)")
    add("--replay-port", type=port, help="port for the replay of events, ZMQ ROUTER (None: 5558, or a free port)")
    what = "also publish KV events in vLLM's form, with vLLM's keys (None: no)"
    add("--kv-events-config", type=_object, metavar="JSON", help=what)
    add("--served-model-name", nargs="+", metavar="NAME", help="names that requests can use (None: MODEL); answers use the first")
    add("--metrics-compat", choices=["vllm"], help="also publish the metrics under the names of this engine")
    add("--disable-log-stats", action="store_true", help="do not log a summary every ten seconds")
    add("--stream-interval", type=positive, default=1, help="tokens in each event of a stream, except the first and the last")
    add("--api-server-count", type=positive, default=1, help="frontend processes that share the port and the core")
    add(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help=f"a request must carry one of these keys (None: {API_KEY_VARIABLE}, or no key needed)",
    )
    whose = "origins of web pages that may call the API: '[\"https://ui.example\"]', or '[\"*\"]' for all"
    add("--allowed-origins", type=_origins, default=[], metavar="JSON", help=whose)
    add("--ssl-certfile", metavar="FILE", help="HTTPS: the server's certificates, PEM; reread on change (None: plain HTTP)")
    add("--ssl-keyfile", metavar="FILE", help="private key of --ssl-certfile, PEM without a password")
    add("--ssl-ca-certs", metavar="FILE", help="clients, except probes, need a certificate signed by these (None: no)")
    add("--otlp-traces-endpoint", type=_url, metavar="URL", help="a collector's OTLP/HTTP endpoint for traces (None: no traces)")
    add("--enable-auto-tool-choice", action="store_true", help="find tool calls in answers; needs --tool-call-parser")
    add("--tool-call-parser", metavar="NAME", help="how the model writes tool calls: docs/engine/api.md lists the names")
    add("--reasoning-parser", metavar="NAME", help="how the model marks its reasoning: docs/engine/api.md lists the names")
    add("--shutdown-timeout", type=not_negative, default=120.0, help="seconds that running requests get after SIGTERM")
    add("--allow-runtime-lora-updating", action="store_true", help="serve /v1/load_lora_adapter …; use in a trusted network only")
    what = "run ranks or cores for another node's server, without HTTP: every node but the first one does"
    add("--headless", action="store_true", help=what)
    add(
        "--enable-control-endpoints",
        action="store_true",
        help="serve /pause, /sleep, /reload_weights …; use in a trusted network only",
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    add("--revision", help="branch, tag or commit of a model from hf:// (None: main)")
    add("--tokenizer", metavar="FOLDER", help="folder with the tokenizer and the chat template (None: the model's)")
    add(
        "--dtype",
        choices=["auto", "bfloat16", "float32", "float16"],
        default="auto",
        help="number type of the weights; auto: the checkpoint's",
    )
    add("--load-format", choices=get_args(LoadFormat), default="auto", help="dummy: random weights, for benchmarks")
    schemes = [*get_args(QuantizationName), *get_args(StoredMethod)]
    add(
        "--quantization",
        choices=schemes,
        help="store the weights in fewer bits, computed while loading; a quantized checkpoint needs none, or its method's name",
    )
    add(
        "--runner",
        choices=get_args(RunnerType),
        default="auto",
        help="generate: text; pooling: embeddings; auto: by the checkpoint",
    )
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where the model runs; auto: on a supported GPU, otherwise on the CPU",
    )
    isas = ["auto", *get_args(IsaName)]
    add("--cpu-isa", choices=isas, default="auto", help="CPU instruction set; auto: the best that the CPU has")
    add("--max-model-len", type=positive, help="largest number of tokens in prompt and output together (None: the checkpoint's)")
    add("--max-num-seqs", type=positive, default=256, help="largest number of sequences in a step")
    add("--max-num-batched-tokens", type=positive, default=2048, help="largest number of tokens in a step")
    add(
        "--long-prefill-token-threshold",
        type=count,
        default=0,
        help="largest number of prompt tokens of one request in a step; 0: no limit",
    )
    add("--enable-chunked-prefill", action=argparse.BooleanOptionalAction, default=True, help="compute prompts in chunks")
    add(
        "--scheduling-policy",
        choices=get_args(SchedulingPolicy),
        default="fcfs",
        help="by arrival, or by priority first",
    )
    add(
        "--max-num-waiting",
        type=count,
        default=1024,
        help="largest number of waiting sequences",
    )
    add(
        "--watermark",
        type=share,
        default=0.01,
        help="share of the KV blocks that stays free when requests are admitted",
    )
    add(
        "--tenant-weights",
        type=_weights,
        default={},
        metavar="NAME=WEIGHT,…",
        help="shares of service among tenants; other tenants have 1",
    )
    add("--async-scheduling", action=argparse.BooleanOptionalAction, help="plan the next step while one runs (None: on a GPU)")
    add("--block-size", type=positive, default=16, help="tokens in a KV block")
    add(
        "--kv-cache-dtype",
        choices=["auto", "bfloat16", "float32", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head"],
        default="auto",
        help="number type of the KV cache; auto: that of the weights; fp8 is fp8_e4m3",
    )
    add("--num-gpu-blocks-override", type=positive, help="number of KV blocks (None: computed from the memory)")
    add("--kv-cache-memory-bytes", type=positive, help="memory for the KV cache (None: by --gpu-memory-utilization)")
    add(
        "--kv-offload-memory-bytes",
        type=count,
        default=0,
        help="host memory that keeps KV pages when they leave the KV cache; 0: none",
    )
    add("--kv-offload-directory", metavar="FOLDER", help="folder that keeps copies of the KV pages in host memory (None: none)")
    add("--kv-offload-disk-bytes", type=count, default=0, help="disk space for the files in --kv-offload-directory")
    what = "store that keeps copies of the KV pages in host memory for all replicas of the model (None: none)"
    add("--kv-offload-store", metavar="STORE_URI", help=what)
    add("--kv-offload-store-bytes", type=count, default=0, help="pages in --kv-offload-store that this replica knows")
    what = "object store that keeps copies of the KV pages in host memory for all replicas of the model (None: none)"
    add("--kv-offload-bucket", metavar="S3_URI", help=what)
    add("--kv-offload-bucket-bytes", type=count, default=0, help="pages in --kv-offload-bucket that this replica uses")
    what = "when to load KV pages from these tiers: cost (where that is faster than to compute their tokens) or always"
    add("--kv-offload-loads", choices=["cost", "always"], default="cost", help=what)
    what = "which page leaves a tier that is full: lru (the least recently used one) or arc (adaptive)"
    add("--kv-offload-eviction-policy", choices=get_args(PolicyName), default="lru", help=what)
    what = "requests that must have shown a block in their prompts before it is copied to host memory; 0 and 1: every block is"
    add("--kv-offload-threshold", type=count, default=0, metavar="REQUESTS", help=what)
    what = 'lend KV pages to other replicas or read theirs: \'{"kv_connector": "transfer", "kv_role": "kv_both"}\''
    add("--kv-transfer-config", type=_object, metavar="JSON", help=what)
    what = "file with a secret that all replicas of the model share (with --kv-transfer-config)"
    add("--kv-transfer-secret-file", metavar="FILE", help=what)
    add(
        "--gpu-memory-utilization",
        type=_utilization,
        help="share of the device's memory for weights, steps and KV cache together (None: 10 %% for the KV cache alone)",
    )
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="reuse the KV of equal prefixes")
    add("--hash-seed", default="penstock", help="seed of the KV block hashes; must be equal in all replicas of a model")
    add(
        "--profile-dir",
        metavar="FOLDER",
        help="folder for the traces of /start_profile and /stop_profile (None: both are refused)",
    )
    add("--watchdog-timeout", type=positive, default=120, help="the engine counts as hung after this many seconds without a step")
    what = "number of processes among which every layer of the model is divided"
    add("--tensor-parallel-size", "-tp", type=positive, default=1, metavar="RANKS", help=what)
    what = "number of pipeline stages: each has some of the model's layers, on processes of its own"
    add("--pipeline-parallel-size", "-pp", type=positive, default=1, metavar="STAGES", help=what)
    what = "number of engine cores behind this server: each has the whole model and a part of the requests"
    add("--data-parallel-size", "-dp", type=positive, default=1, metavar="RANKS", help=what)
    what = "number of these cores on this node (None: all of them)"
    add("--data-parallel-size-local", "-dpl", type=positive, metavar="RANKS", help=what)
    what = "first of these cores, on a node with --headless (None: LWS_WORKER_INDEX times --data-parallel-size-local, or 0)"
    add("--data-parallel-start-rank", "-dpr", type=count, metavar="RANK", help=what)
    what = "address of the node of core 0, where cores are on several nodes (None: LWS_LEADER_ADDRESS)"
    add("--data-parallel-address", "-dpa", metavar="HOST", help=what)
    what = "port on which that node waits for the others"
    add("--data-parallel-rpc-port", "-dpp", type=port, default=29550, help=what)
    what = "give each process some experts of a mixture whole, in place of a part of every expert"
    add("--enable-expert-parallel", "-ep", action="store_true", help=what)
    add(
        "--enable-eplb",
        action="store_true",
        help="move busy experts to idle ranks, with copies where there is room, while serving",
    )
    what = 'when experts move, with vLLM\'s keys: \'{"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 0}\''
    add("--eplb-config", type=_object, metavar="JSON", help=what)
    what = "run the model in a process of its own, apart from the scheduler, even where there is one rank"
    add("--worker-process", action="store_true", help=what)
    what = "largest number of seconds that one process of the model may keep the others waiting"
    add("--distributed-timeout-seconds", type=positive, default=30, metavar="SECONDS", help=what)
    what = "number of nodes among which the ranks are distributed (None: LWS_GROUP_SIZE, or 1)"
    add("--nnodes", type=positive, metavar="NODES", help=what)
    add("--node-rank", type=count, metavar="NODE", help="this node's number, from 0 (None: LWS_WORKER_INDEX, or 0)")
    add("--master-addr", metavar="HOST", help="address of node 0 (None: LWS_LEADER_ADDRESS)")
    add("--master-port", type=port, default=29501, help="port on which node 0 waits for the other nodes")
    add("--seed", type=count, default=0, help="draws the seeds of requests without one")
    whose = "source of the default sampling: auto (the checkpoint), vllm (OpenAI's) or a folder with generation_config.json"
    add("--generation-config", default="auto", metavar="WHOSE", help=whose)
    add(
        "--override-generation-config",
        type=_object,
        default={},
        metavar="JSON",
        help="overrides fields of --generation-config: '{\"temperature\": 0.5}'",
    )
    what = "largest number of images in a request: '{\"image\": 4}'; 0: none (unset: 16)"
    add("--limit-mm-per-prompt", type=_object, default={}, metavar="JSON", help=what)
    what = "size of images for models that read any: '{\"max_pixels\": 1003520}', and min_pixels"
    add("--mm-processor-kwargs", type=_object, default={}, metavar="JSON", help=what)
    what = "host names from which images are fetched by HTTPS (None: images come inside requests alone)"
    add("--allowed-media-domains", nargs="+", metavar="HOST", help=what)
    backends = get_args(AttentionBackendName)
    what = 'enforcement of grammars, with vLLM\'s keys: \'{"backend": "xgrammar"}\''
    add("--structured-outputs-config", type=_object, default={}, metavar="JSON", help=what)
    what = 'speculative decoding, with vLLM\'s keys: \'{"method": "ngram", "num_speculative_tokens": 4}\''
    add("--speculative-config", type=_object, metavar="JSON", help=what)
    what = "source of draft tokens: ngram, suffix, draft_model, eagle, eagle3, mtp or auto (None: no speculative decoding)"
    add("--spec-method", metavar="METHOD", help=what)
    add("--spec-model", metavar="MODEL", help="draft model with the same tokenizer, or EAGLE head, named as MODEL is")
    add("--spec-tokens", type=positive, help="largest number of draft tokens of a request in a step (None: 4)")
    add("--attention-backend", choices=backends, help="attention kernels to use (None: the first that supports the model)")
    add("--prefill-attention-backend", choices=backends, help="the same for steps with prompts (None: as --attention-backend)")
    add("--enforce-eager", action="store_true", help="use no CUDA graphs: launch each kernel separately")
    graphs = get_args(CudagraphMode)
    add("--cudagraph-mode", choices=graphs, help="parts of a step that CUDA graphs capture (None: FULL_AND_PIECEWISE on a GPU)")
    add(
        "--cudagraph-capture-sizes",
        type=positive,
        nargs="+",
        metavar="SIZE",
        help="batch sizes to capture; steps are padded to them (None: a few)",
    )
    add(
        "--max-cudagraph-capture-size",
        type=positive,
        help="largest size to capture (None: 512, or --max-num-seqs if that is larger)",
    )
    modes: tuple[LogprobsMode, ...] = get_args(LogprobsMode)
    add(
        "--logits-processors",
        nargs="+",
        metavar="MODULE:CLASS",
        help="your own logits processors; the engine must be able to import them",
    )
    add(
        "--logprobs-mode",
        choices=modes,
        default=modes[0],
        help="logprobs or logits, before or after masks, temperature and filters",
    )


def _object(text: str) -> dict[str, Any]:
    return _json(text, dict, "object")


def _json(text: str, kind: type[_T], name: str) -> _T:
    """A flag's JSON, of the kind that it must be."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON {name}")
    return value


def _origins(text: str) -> list[str]:
    origins: list[str] = _json(text, list, "list")
    for origin in origins:
        # As browsers write it: with a slash at its end, say, it would never be found.
        if origin != "*" and not (isinstance(origin, str) and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\sA-Z]+", origin)):
            raise argparse.ArgumentTypeError(f"{origin!r} is not an origin such as https://ui.example or http://localhost:3000")
    return origins


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://collector:4318/v1/traces")
    return text


def add_lora_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("LoRA").add_argument
    add("--enable-lora", action="store_true", help="serve LoRA adapters on top of the model")
    add("--lora-modules", nargs="+", metavar="NAME=PATH", help="adapters to load at the start")
    add("--max-loras", type=positive, default=1, help="largest number of different adapters in a step: slots on the device")
    add("--max-cpu-loras", type=positive, help="largest number of adapters in the host's memory (None: --max-loras)")
    add("--max-lora-rank", type=positive, default=16, help="largest rank of an adapter")


def _utilization(text: str) -> float:
    return number(text, 0, 1, above=True)


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
