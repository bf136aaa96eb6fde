"""A prefill and a decode replica as two real servers: the answers of one, and what is left when either fails."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest
from frontend_process import make_llama, serving
from vision_models import TOKENS, data_url, picture, with_tokenizer

from penstock.engine.connectors.transfer import nixl
from testing.ports import free_ports

pytestmark = pytest.mark.slow

needs_nixl = pytest.mark.skipif(nixl.installed() is None, reason="NIXL is not installed: make kv-parts")
BLOCK = 16
PROMPT = "the river turns the wheel of the mill and the mill turns the stone that grinds the corn of the valley"


@pytest.fixture(scope="module")
def llama(tokenizer_files, tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)


@pytest.fixture(scope="module")
def seeing(tokenizer_files, tmp_path_factory):
    return with_tokenizer(tmp_path_factory.mktemp("models") / "seeing", tokenizer_files)


def flags(secret, role, **extra):
    config = {"kv_connector": "transfer", "kv_role": role, "kv_port": free_ports(1)[0], "kv_connector_extra_config": extra}
    transfer = ["--kv-transfer-config", json.dumps(config), "--kv-transfer-secret-file", str(secret)]
    return [*transfer, "--kv-offload-memory-bytes", str(2**20)]


@pytest.fixture
def start(llama, tmp_path):
    """Starts replicas that share a secret."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of many bytes")
    with ExitStack() as servers:

        def started(role, *more, secret=secret, model=llama, **extra):
            log = tmp_path / f"{role}-{len(list(tmp_path.iterdir()))}.log"
            return servers.enter_context(serving(model, log, *flags(secret, role, **extra), *more))

        yield started


def ask(server, path="/v1/completions", headers=None, **body):
    return post(server, path, {"model": "tiny", "max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **body}, headers)


def post(server, path, body, headers=None):
    data, headers = json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}
    with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers), timeout=60) as answer:
        return json.load(answer)


def refused(server, **body):
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(server, **body)
    return error.value.code, json.load(error.value)["error"]


def metric(server, name):
    """The sum of a metric's samples."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] in (name, name + "_total")]
    assert values, name
    return sum(values)


def wait_for(what, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_free(server):
    """No lease, and no block of the KV cache in use."""
    return metric(server, "penstock_kv_transfer_leases") == 0 == metric(server, "penstock_kv_cache_usage_perc")


def sent(tokens):
    return (tokens - 1) // BLOCK * BLOCK


def lend(server, prompt=PROMPT, on_rank=None, **body):
    """What llm-d's sidecar asks a prefill replica."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    headers = {} if on_rank is None else {"X-data-parallel-rank": str(on_rank)}
    answer = ask(server, prompt=prompt, headers=headers, **{**body, "max_tokens": 1, "kv_transfer_params": params})
    return answer["kv_transfer_params"]


def prefiller(server):
    return {"x-prefiller-host-port": server.url.removeprefix("http://")}


@pytest.mark.req("PD-01", "PD-08", "PD-33")
@pytest.mark.parametrize("transport", ["shm", pytest.param("nixl", marks=needs_nixl)])
def test_a_pair_answers_as_one_replica_and_the_decode_replica_computes_nothing_that_it_was_sent(start, transport, seeing):
    prefill, decode = (start(role, model=seeing, transports=[transport]) for role in ("kv_producer", "kv_consumer"))
    expected = ask(prefill, prompt=PROMPT)
    chat = {"messages": [{"role": "user", "content": PROMPT}], "path": "/v1/chat/completions"}
    expected_chat = ask(prefill, **chat)
    # As llm-d's sidecar does it.
    params = lend(prefill, prompt=PROMPT)
    remote = {f"remote_{name}" for name in ("engine_id", "block_ids", "request_id", "host", "port")}
    assert (
        remote | {"do_remote_prefill", "do_remote_decode", "tp_size", "pp_size"} <= set(params) and not params["do_remote_decode"]
    )
    assert params["do_remote_prefill"] and params["remote_num_tokens"] == sent(expected["usage"]["prompt_tokens"]) > 0
    answer = ask(decode, prompt=PROMPT, kv_transfer_params=params)
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == params["remote_num_tokens"]
    wait_for(lambda: metric(decode, "penstock_kv_transfer_pulls") == 1)
    # As the decode replica does it by itself.
    answer = ask(decode, headers=prefiller(prefill), **chat)
    assert answer["choices"][0]["message"] == expected_chat["choices"][0]["message"]
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == sent(answer["usage"]["prompt_tokens"]) > 0
    wait_for(lambda: metric(decode, "penstock_kv_transfer_pulls") == 2)
    assert metric(decode, "penstock_remote_prefills") == 1 and metric(decode, "penstock_kv_transfer_failed_pages") == 0
    wait_for(lambda: is_free(prefill) and is_free(decode), 5)
    assert metric(prefill, "penstock_kv_transfer_expired_leases") == 0
    assert f"come by {transport}" in decode.log.read_text()
    # What has come is in the prefix cache for the next request.
    cached = ask(decode, prompt=PROMPT)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == params["remote_num_tokens"] and metric(decode, "penstock_kv_transfer_pulls") == 2
    check_images(prefill, decode)


def check_images(prefill, decode):
    """The prefill replica runs the tower, and the decode replica does not; its answers are as if it had."""
    for number, (path, prompt, kind, limit) in enumerate(
        (
            ("/v1/chat/completions", "messages", "text", "max_tokens"),
            ("/v1/responses", "input", "input_text", "max_output_tokens"),
        )
    ):
        url = data_url(picture(number))
        image = {"type": "input_image", "image_url": url} if number else {"type": "image_url", "image_url": {"url": url}}
        turn = {"role": "user", "content": [{"type": kind, "text": "see"}, image, {"type": kind, "text": PROMPT}]}
        body = {"model": "tiny", "temperature": 0.0, "ignore_eos": True, limit: 12, prompt: [turn]}
        answer = post(decode, path, body, prefiller(prefill))
        encoded = TOKENS * (number + 1)
        wait_for(lambda encoded=encoded: metric(prefill, "penstock_encoder_tokens") == encoded)
        assert metric(decode, "penstock_encoder_tokens") == 0
        usage, said = answer["usage"], answer.get("output") or answer["choices"]
        cached = (usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))["cached_tokens"]
        assert cached == sent(usage.get("prompt_tokens") or usage["input_tokens"]) > TOKENS
        alone = post(prefill, path, body)
        assert words(said) == words(alone.get("output") or alone["choices"])


def words(said):
    [one] = said
    return one["message"]["content"] if "message" in one else one["content"][0]["text"]


def test_params_that_do_not_fit_are_refused_by_name_and_a_hop_that_does_not_fit_costs_nothing(start, tokenizer_files, tmp_path):
    prefill = start("kv_producer")
    other = tmp_path / "other"
    other.write_text("another secret of many bytes")
    decode = start("kv_consumer")
    params = lend(prefill)
    for change, words in {
        "unsigned": ({"signature": ""}, "signature is not that of a replica with the same secret"),
        "address": ({"remote_host": "192.0.2.1"}, "signature is not that"),
        "blocks": ({"remote_block_ids": [[1]]}, "signature is not that"),
        "unknown": ({"remote_block_id": []}, "remote_block_id: there is no such field"),
        "neither": ({"do_remote_prefill": False}, "one of do_remote_decode and do_remote_prefill must be true"),
    }.values():
        status, error = refused(decode, prompt=PROMPT, kv_transfer_params={**params, **change})
        assert status == 400 and words in error["message"] and error["param"] == "kv_transfer_params"
    status, error = refused(decode, prompt="another prompt", kv_transfer_params=params)
    assert status == 400 and "remote_num_tokens is" in error["message"] and error["param"] == "kv_transfer_params"
    lends = {"do_remote_decode": True}
    assert "lends no pages, it is a kv_consumer" in refused(decode, prompt=PROMPT, kv_transfer_params=lends)[1]["message"]
    assert "reads no pages, it is a kv_producer" in refused(prefill, prompt=PROMPT, kv_transfer_params=params)[1]["message"]
    assert "needs stream: false" in refused(prefill, prompt=PROMPT, stream=True, kv_transfer_params=lends)[1]["message"]
    assert refused(decode, prompt=PROMPT, headers={"x-prefiller-host-port": "a:1,b:2"})[0] == 400
    # Several sequences, and prompts that are scored, are computed where they are.
    for more in ({"n": 2}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"prompt": [PROMPT, PROMPT]}):
        assert ask(prefill, **{"prompt": PROMPT, **more}, kv_transfer_params=lends).get("kv_transfer_params") is None
        before = metric(decode, "penstock_remote_prefills")
        ask(decode, **{"prompt": PROMPT, **more}, headers=prefiller(prefill))
        assert metric(decode, "penstock_remote_prefills") == before


def test_a_prefill_replica_that_is_stopped_killed_or_another_one_costs_the_client_nothing(start, tokenizer_files, tmp_path):
    prefill, decode = start("kv_producer"), start("kv_consumer", prefill_timeout=1.5)
    prompts = [f"{number} {PROMPT}" for number in range(5)]
    expected = [ask(prefill, prompt=prompt)["choices"][0]["text"] for prompt in prompts]
    lent = [lend(prefill, prompt=prompt) for prompt in prompts]

    def answers(number, **body):
        answer = ask(decode, prompt=prompts[number], **body)
        assert answer["choices"][0]["text"] == expected[number]
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert answers(0, kv_transfer_params=lent[0]) > 0
    for pid in (prefill.process.pid, prefill.core_pid()):
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    assert answers(1, headers=prefiller(prefill)) == 0, "the prefill replica is stopped before it computes"
    assert time.monotonic() - began < 10
    assert answers(2, kv_transfer_params=lent[2]) == 0, "and when its pages are read"
    assert time.monotonic() - began < 30
    for pid in (prefill.core_pid(), prefill.process.pid):
        os.kill(pid, signal.SIGKILL)
    assert answers(3, headers=prefiller(prefill)) == 0 and answers(4, kv_transfer_params=lent[4]) == 0
    wait_for(lambda: metric(decode, "penstock_kv_transfer_failed_pages") > 0)
    wait_for(lambda: is_free(decode), 5)
    # Its weights are others, and its pages would be too.
    foreign = start("kv_producer", kv_lease_duration=1.0, model=make_llama(tmp_path / "foreign", tokenizer_files, seed=1))
    params = lend(foreign, prompt="7 " + PROMPT)
    status, error = refused(decode, prompt="7 " + PROMPT, kv_transfer_params=params)
    assert status == 400 and "remote_fingerprint" in error["message"]
    again = ask(decode, prompt="8 " + PROMPT, headers=prefiller(foreign))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    wait_for(lambda: is_free(foreign) and is_free(decode))


@pytest.mark.req("PD-11", "PD-14")
def test_pages_that_nobody_fetches_are_free_when_their_lease_has_run_out(start):
    prefill, decode = start("kv_producer", kv_lease_duration=1.0), start("kv_both")
    params = lend(prefill)
    expected = ask(decode, prompt=PROMPT)["choices"][0]["text"]
    wait_for(lambda: metric(prefill, "penstock_kv_transfer_leases") == 1, 1)
    wait_for(lambda: metric(prefill, "penstock_kv_transfer_expired_leases") == 1)
    assert is_free(prefill) and metric(prefill, "penstock_kv_transfer_leased_pages") == 0
    other = start("kv_consumer")
    answer = ask(other, prompt=PROMPT, kv_transfer_params=params)
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    wait_for(lambda: is_free(other))
    # All of the prompt is there already: the lease is released at once, although its time is long.
    ask(prefill, prompt=PROMPT)
    first = lend(decode)
    ask(other, prompt=PROMPT, kv_transfer_params=first)
    wait_for(lambda: is_free(decode), 5)
    assert metric(decode, "penstock_kv_transfer_expired_leases") == 0


@pytest.mark.req("DR-10")
def test_a_replica_that_drains_stays_until_what_it_has_lent_is_fetched(start):
    prefill, decode = start("kv_producer"), start("kv_consumer")
    params = lend(prefill)
    prefill.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        prefill.process.wait(2.0)
    answer = ask(decode, prompt=PROMPT, kv_transfer_params=params)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == params["remote_num_tokens"]
    assert prefill.process.wait(10) == 0 and "draining" in prefill.log.read_text()
    assert metric(decode, "penstock_kv_transfer_failed_pages") == 0


def test_a_replica_that_does_not_know_the_secret_gets_and_gives_nothing(start, tmp_path):
    other = tmp_path / "other"
    other.write_text("another secret of many bytes")
    prefill, decode = start("kv_producer", kv_lease_duration=1.0), start("kv_consumer", secret=other)
    answer = ask(decode, prompt=PROMPT, headers=prefiller(prefill))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "signature" in decode.log.read_text()
    assert metric(decode, "penstock_kv_transfer_pulls") == 0


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (["-tp", "2"], None),
        (["-pp", "2"], "pp_size is 2, and here it is 1"),
        (["-pp", "2", "-tp", "2"], "pp_size is 2, and here it is 1"),
    ],
    ids=["tensor", "pipeline", "both"],
)
def test_ranks_read_from_the_same_ranks(start, ranks, told):
    prefill, decode = start("kv_producer", *ranks), start("kv_consumer", *ranks, transports=["tcp"])
    expected = ask(prefill, prompt=PROMPT)["choices"][0]["text"]
    answer = ask(decode, prompt=PROMPT, headers=prefiller(prefill))
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == sent(answer["usage"]["prompt_tokens"])
    wait_for(lambda: is_free(prefill) and is_free(decode), 5)
    one = start("kv_consumer")
    if told is not None:
        assert told in refused(one, prompt=PROMPT, kv_transfer_params=lend(prefill))[1]["message"]
        return
    answer = ask(one, prompt=PROMPT, headers=prefiller(prefill))
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == sent(answer["usage"]["prompt_tokens"])


def test_pairs_have_data_parallel_ranks_too(start):
    """Each rank lends on a port of its own, and any rank reads from any."""
    prefill, decode = start("kv_producer", "-dp", "2"), start("kv_consumer", "-dp", "2")
    expected = ask(prefill, prompt=PROMPT)["choices"][0]["text"]
    lent = [lend(prefill, prompt=PROMPT, cache_salt=str(rank), on_rank=rank) for rank in (0, 1)]
    ports, names = [params["remote_port"] for params in lent], {params["remote_engine_id"] for params in lent}
    assert ports[1] == ports[0] + 1 and len(names) == 2
    for rank, params in enumerate(lent):
        headers = {"X-data-parallel-rank": str(1 - rank)}
        answer = ask(decode, prompt=PROMPT, cache_salt=str(rank), kv_transfer_params=params, headers=headers)
        assert answer["choices"][0]["text"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == params["remote_num_tokens"] > 0
    answer = ask(decode, prompt=PROMPT, cache_salt="a third", headers=prefiller(prefill))
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == lent[0]["remote_num_tokens"]
    assert metric(decode, "penstock_kv_transfer_failed_pages") == 0
    wait_for(lambda: is_free(prefill) and is_free(decode), 5)
