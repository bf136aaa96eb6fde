"""What a request costs the frontend before the engine has it: CPU time to parse, hash and admit it, beside tokenizing.

Run with `make bench-requests`; the result is a table, and JSON under benchmarks/results.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from report import write_results

from penstock.engine.config import ModelConfig
from penstock.engine.frontend.openai.parsing.registry import TOOL_FORMATS, ParserConfig
from penstock.engine.frontend.openai.protocol import parse_chat, parse_json
from penstock.engine.frontend.spec import generation_spec
from penstock.engine.messages import AddRequest, encode
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.hashing import BlockHasher
from penstock.prompt.processor import CHAT_PATH, PromptProcessor

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples/models/penstock-tiny"
REPEATS = 40
BODY_BYTES = 100_000
PROMPT_TOKENS = 4096
CONTEXT = 131_072
TARGET_MS = 1.0


def cpu_ms(work: Callable[[], object]) -> float:
    """The median CPU time of this thread, milliseconds."""
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.thread_time_ns()
        work()
        times.append((time.thread_time_ns() - start) / 1e6)
    return statistics.median(times)


def conversation(size: int) -> list[dict[str, str]]:
    """A chat of about so many bytes of JSON."""
    text = "What does json.loads do, and what does it raise on text that is no JSON document? " * 12
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at in range(max(size // (len(text) + 34), 1))]


def measure() -> dict[str, Any]:
    """Milliseconds of CPU."""
    bundle = PromptBundle.from_checkpoint(MODEL, served_names=("m",), block_size=16, hash_seed="s", max_model_len=CONTEXT)
    processor = PromptProcessor(bundle)
    model = ModelConfig(
        path=MODEL, served_names=("m",), architecture="x", dtype="float32", max_model_len=CONTEXT, eos_token_ids=(1,)
    )
    data = orjson.dumps({"model": "m", "messages": conversation(BODY_BYTES), "temperature": 0.5, "stop": ["END"]})
    long = {"model": "m", "messages": conversation(BODY_BYTES)}
    [all_tokens] = processor.tokens_of(CHAT_PATH, long)
    tokens = all_tokens[:PROMPT_TOKENS]
    hasher = BlockHasher(16, "s")
    request = parse_chat(long)

    def admit() -> bytes:
        """All between tokens and the core's socket."""
        spec = generation_spec([tokens], request, model, processor, seed=1, request_id="r", arrival=0.0)
        return encode(AddRequest(0, "r", spec.prompts[0], spec.sampling[0], 0.0))

    call = '<tool_call>\n{"name": "f", "arguments": {"text": "' + "word " * 200 + '"}}\n</tool_call>'

    def take_apart() -> None:
        parser = ParserConfig("hermes").parser(("f",), "")
        assert parser is not None
        for at in range(0, len(call), 4):
            parser.feed(call[at : at + 4])
        parser.finish()

    chars = len(call)
    return {
        "body_bytes": len(data),
        "prompt_tokens": len(tokens),
        "parse_body_ms": cpu_ms(lambda: parse_chat(parse_json(data))),
        "hash_prompt_ms": cpu_ms(lambda: hasher.hash(tokens)),
        "admit_prompt_ms": cpu_ms(admit),
        "render_ms": cpu_ms(lambda: processor.render_chat(long)),
        "render_and_tokenize_ms": cpu_ms(lambda: processor.tokens_of(CHAT_PATH, long)),
        "tool_parser_us_a_token": cpu_ms(take_apart) * 1000 / (chars / 4),
        "formats": len(TOOL_FORMATS),
    }


def main() -> None:
    """Prints the table and writes the JSON."""
    found = measure()
    together = found["hash_prompt_ms"] + found["admit_prompt_ms"]
    rows = [
        (f"parse a body of {found['body_bytes'] / 1000:.0f} kB", found["parse_body_ms"], TARGET_MS),
        (f"hash a prompt of {found['prompt_tokens']} tokens", found["hash_prompt_ms"], None),
        ("admit it: check, pack for the core", found["admit_prompt_ms"], None),
        ("hash and admit together", together, TARGET_MS),
        ("render the body's chat", found["render_ms"], None),
        ("render and tokenize it", found["render_and_tokenize_ms"], None),
    ]
    print(f"{'CPU of the frontend, median of ' + str(REPEATS):44s}{'ms':>9s}{'target':>9s}")
    for name, value, target in rows:
        print(f"{name:44s}{value:9.3f}{target if target is not None else '':>9}")
    print(f"{'tool parser, a token of 4 characters (µs)':44s}{found['tool_parser_us_a_token']:9.3f}")
    path = write_results("requests", found | {"hash_and_admit_ms": together})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
