"""Flags of other servers (vLLM, SGLang, TGI) that `penstock serve` does not have, and what to use instead."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NoReturn

from penstock.suggest import suggestion

_RANKS: Final = "ranks are always processes of the engine's own; leave it out"
_MODEL: Final = "give the model first: penstock serve MODEL"
_TOKENIZER: Final = "the tokenizer is read as its files say; leave it out"
_NO_CODE: Final = "code in checkpoints never runs; leave it out"
_TEMPLATE: Final = "put the template into the model's folder as chat_template.jinja"
_ALWAYS: Final = "this is always on; leave it out"
_GRAMMARS: Final = '--structured-outputs-config, as in --structured-outputs-config \'{"backend": "xgrammar"}\''
_EPLB: Final = '--eplb-config, as in --eplb-config \'{"num_redundant_experts": 2, "step_interval": 3000}\''
_DOWNLOADS: Final = "set the environment variable HF_HOME"
_LOG: Final = "the log has a line for each request; --disable-log-stats ends the line every ten seconds"
_NO_RANK: Final = "a replica has one server: --data-parallel-size-local and --data-parallel-start-rank say which ranks a node has"
_OPEN: Final = "methods, headers and credentials are not limited: --allowed-origins alone"


def _all(names: str, advice: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), advice)


FOREIGN: Final[Mapping[str, str]] = {
    **_all("--tp --tp-size --num-shard --sharded", "--tensor-parallel-size"),
    **_all("--expert-parallel-size --ep --ep-size", "--enable-expert-parallel"),
    **_all("--num-redundant-experts --ep-num-redundant-experts --eplb-rebalance-num-iterations", _EPLB),
    **_all("--pp --pp-size", "--pipeline-parallel-size"),
    **_all("--distributed-executor-backend", _RANKS),
    **_all("--dp --dp-size", "--data-parallel-size"),
    **_all("--data-parallel-rank -dpn --data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe", _NO_RANK),
    **_all("--data-parallel-backend -dpb", _RANKS),
    **_all("--model --model-path --model-id", _MODEL),
    **_all("--tokenizer-path", "--tokenizer"),
    **_all("--tokenizer-mode --tokenizer-revision --skip-tokenizer-init", _TOKENIZER),
    **_all("--trust-remote-code --code-revision", _NO_CODE),
    **_all("-q --quantize", "--quantization"),
    **_all("--chat-template --chat-template-content-format", _TEMPLATE),
    **_all("--enable-metrics --enable-cache-report --enable-prompt-tokens-details --enable-request-id-headers", _ALWAYS),
    **_all("--enable-ssl-refresh --enable-server-load-tracking", _ALWAYS),
    **_all("--guided-decoding-backend --grammar-backend --disable-grammar-support", _GRAMMARS),
    **_all("--speculative-algorithm --speculative-model", "--spec-method, and --spec-model for a draft model"),
    **_all("--speculate --num-speculative-tokens --speculative-num-draft-tokens", "--spec-tokens, with --spec-method"),
    **_all("--allowed-local-media-path", "images come inside requests, or from --allowed-media-domains"),
    **_all("--enable-multimodal", _ALWAYS),
    **_all("--download-dir --huggingface-hub-cache", _DOWNLOADS),
    **_all("--disable-log-requests --enable-log-requests --no-enable-log-requests --log-requests --log-level", _LOG),
    **_all("--uvicorn-log-level --disable-uvicorn-access-log", _LOG),
    **_all("--allow-credentials --allowed-methods --allowed-headers", _OPEN),
    **_all("--cors-allow-origin", "--allowed-origins"),
    **_all("--ssl-cert-reqs", "--ssl-ca-certs alone asks clients for certificates"),
    **_all("--hostname", "--host"),
    **_all("--config", "write the flags on the command line"),
    **_all("--task --is-embedding", "--runner"),
    **_all("--context-length --max-input-tokens --max-input-length", "--max-model-len"),
    **_all("--max-total-tokens", "--max-model-len for one request, --num-gpu-blocks-override for the whole KV cache"),
    **_all("--max-batch-total-tokens", "--num-gpu-blocks-override"),
    **_all("--max-running-requests --max-batch-size", "--max-num-seqs"),
    **_all("--max-concurrent-requests --max-queued-requests", "--max-num-waiting"),
    **_all("--chunked-prefill-size --max-prefill-tokens --max-batch-prefill-tokens", "--max-num-batched-tokens"),
    **_all("--max-num-partial-prefills", "--long-prefill-token-threshold"),
    **_all("--mem-fraction-static --cuda-memory-fraction", "--gpu-memory-utilization"),
    **_all("--schedule-policy", "--scheduling-policy"),
    **_all("--disable-overlap-schedule --disable-async-output-proc", "--no-async-scheduling"),
    **_all("--disable-radix-cache --disable-prefix-caching", "--no-enable-prefix-caching"),
    **_all("--disable-chunked-prefill", "--no-enable-chunked-prefill"),
    **_all("--page-size", "--block-size"),
    **_all("--random-seed", "--seed"),
    **_all("--disable-cuda-graph", "--enforce-eager"),
    **_all("--cuda-graph-max-bs", "--max-cudagraph-capture-size"),
    **_all("--cuda-graph-bs --cuda-graphs", "--cudagraph-capture-sizes"),
    **_all("--compilation-config -O", "--cudagraph-mode and --cudagraph-capture-sizes"),
    **_all("--lora-paths --lora-adapters", "--lora-modules"),
    **_all("--max-loras-per-batch", "--max-loras"),
    **_all("--enable-sleep-mode", "--enable-control-endpoints"),
    **_all("--otlp-endpoint --trace-endpoint", "--otlp-traces-endpoint"),
    **_all("--tool-server --enable-auto-tools", "--enable-auto-tool-choice"),
}
"""By flag: our flag for it, or what to do instead."""


class FlagParser(argparse.ArgumentParser):
    """Refuses a flag that it does not know with the nearest one that it has, and without a page of usage."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):  # type: ignore[no-untyped-def]
        """Parse as argparse does, but refuse unknown flags first. Otherwise argparse would report a missing MODEL."""
        known = self._option_string_actions
        unknown = [name for word in args or () if _is_flag(name := word.partition("=")[0]) and name not in known]
        if unknown:
            self.error(f"unrecognized arguments: {', '.join(_advised(name, known) for name in dict.fromkeys(unknown))}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Ends with one line and exit status 2."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the flags)\n")


def _is_flag(word: str) -> bool:
    """Whether it is a flag, and not a value such as `-1` or `-0.5`."""
    return word.startswith("-") and not word.lstrip("-").replace(".", "").isdecimal() and word.strip("-") != ""


def _advised(name: str, known: Iterable[str]) -> str:
    spelled = name.replace("_", "-")
    if (advice := FOREIGN.get(spelled)) is not None:
        return f"{name} ({'use ' if advice.startswith('--') else ''}{advice})"
    near = suggestion(spelled, known).removeprefix("; ")
    return f"{name} ({near})" if near else name
