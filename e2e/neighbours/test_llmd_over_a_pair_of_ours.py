"""llm-d's router and its sidecar over our prefill and decode replicas: the sidecar asks for the prompt, and the pages travel."""

import json

import httpx
import pytest

from e2e.neighbours import engines
from e2e.neighbours.engines import NAME, Engine
from e2e.neighbours.llmd.picker import Picker, disaggregated, program
from e2e.neighbours.programs import Programs, answers
from testing.ports import free_ports

PROMPT = "def parse(text):\n    return json.loads(text)\n" * 20
ROLE = "llm-d.ai/role"


@pytest.fixture(scope="module")
def pair(programs: Programs) -> list[Engine]:
    """The prefill replica, then the decode replica."""
    program("llm-d-pd-sidecar")
    (programs.folder / "secret").write_text("a secret of many bytes")
    return engines.ready(programs, [_ours(programs, role) for role in ("kv_producer", "kv_consumer")])


@pytest.fixture(scope="module")
def picker(programs: Programs, pair: list[Engine]) -> Picker:
    """The decode endpoint is the sidecar before the decode replica."""
    prefill, decode = pair
    (port,) = free_ports(1)
    flags = ["--port", port, "--model-server-port", decode.port, "--kv-connector", "nixlv2", "--secure-proxy=false"]
    programs.start("sidecar", [program("llm-d-pd-sidecar"), *flags, "--tracing=false"])
    programs.wait("sidecar", lambda: answers(f"http://127.0.0.1:{port}/v1/models"), 60)
    pool = {"prefill": (prefill.port, {ROLE: "prefill"}), "decode": (port, {ROLE: "decode"})}
    return Picker(programs, pool, disaggregated())


def _ours(programs: Programs, role: str) -> Engine:
    (port,) = free_ports(1)
    config = {"kv_connector": "transfer", "kv_role": role, "kv_port": port}
    secret = programs.folder / "secret"
    transfer = ["--kv-transfer-config", json.dumps(config), "--kv-transfer-secret-file", str(secret)]
    return engines.penstock(programs, role, "--metrics-compat", "vllm", *transfer, "--kv-offload-memory-bytes", 2**24)


def test_the_prefill_replica_computes_the_prompt_and_the_other_reads_its_pages(picker: Picker, pair: list[Engine]) -> None:
    prefill, decode = pair
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    alone = httpx.post(f"{prefill.url}/v1/completions", json=asked, timeout=60).raise_for_status().json()
    answer = picker.ask(PROMPT, 12)
    assert answer.choices[0].text == alone["choices"][0]["text"]
    assert (_figure(decode, "penstock_kv_transfer_pulls_total"), answer.usage.completion_tokens) == (1, 12)
    assert _figure(prefill, "vllm:request_success_total") == 2


def test_chats_stream_through_the_sidecar(picker: Picker, pair: list[Engine]) -> None:
    before = _figure(pair[1], "penstock_kv_transfer_pulls_total")
    messages = [{"role": "user", "content": "What does this do?\n" + PROMPT}]
    asked = {"model": NAME, "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
    with picker.api.chat.completions.create(**asked, extra_body={"ignore_eos": True}) as stream:
        chunks = [chunk for chunk in stream if chunk.choices]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert _figure(pair[1], "penstock_kv_transfer_pulls_total") == before + 1


def _figure(engine: Engine, name: str) -> float:
    """The sum of a metric's samples."""
    page = httpx.get(f"{engine.url}/metrics", timeout=10).raise_for_status().text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.partition("{")[0].partition(" ")[0] == name)
