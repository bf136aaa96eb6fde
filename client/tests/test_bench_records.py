"""From stamps to latencies, exactly."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.bench.records import Record, Recorder, share_tokens
from penstock.client.bench.report import Cost, summarize
from penstock.client.stream import EventDecoder, decode_chunk


def text(content: str, reason: str | None = None, **more: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "text": content, "finish_reason": reason}], **more})


def end(content: str = "", **more: Any) -> str:
    return text(content, "length", **more)


def usage(output: int, prompt: int = 7) -> str:
    return json.dumps({"choices": [], **counted(output, prompt)})


def counted(output: int, prompt: int = 7) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": output}}


def record(*events: tuple[float, str], sent: float = 100.0) -> Record:
    recorder = Recorder(sent, sent)
    for stamp, payload in events:
        recorder.add(stamp, decode_chunk(payload))
    return recorder.complete()


@pytest.mark.req("MET-09")
def test_a_stream_of_known_stamps_gives_exact_latencies() -> None:
    one = record((100.5, text("a")), (100.6, text("b")), (100.8, text("c")), (101.2, end("d")), (101.3, usage(4)))
    assert one.ttft == pytest.approx(0.5)
    assert one.itls() == pytest.approx([0.1, 0.2, 0.4])
    assert one.tpot == pytest.approx(0.7 / 3)
    assert one.e2el == pytest.approx(1.2)  # not to the usage: that is no token
    assert (one.prompt_tokens, one.output_tokens) == (7, 4)

    report = summarize([one], 2.0, [50, 90, 99], {}, Cost(1))
    assert list(report.latencies["itl"].percentiles.values()) == pytest.approx([200, 360, 396])
    assert report.latencies["ttft"].percentiles[99] == pytest.approx(500)
    assert report.output_throughput == 2.0


@pytest.mark.req("MET-09")
def test_percentiles_run_over_all_samples_of_all_requests() -> None:
    slow = record((101.0, text("a")), (103.0, end("b")), (103.0, usage(2)))
    fast = [record((100.1, text("a")), (100.2, text("b")), (100.3, end("c")), (100.3, usage(3))) for _ in range(2)]
    report = summarize([slow, *fast], 4.0, [50, 100], {}, Cost(1))
    assert report.latencies["itl"].count == 1 + 2 + 2
    assert list(report.latencies["itl"].percentiles.values()) == pytest.approx([100, 2000])
    assert list(report.latencies["ttft"].percentiles.values()) == pytest.approx([100, 1000])


@pytest.mark.req("MET-09")
def test_one_token_has_a_ttft_and_no_gap() -> None:
    one = record((100.25, end("a")), (100.25, usage(1)))
    assert (one.ttft, one.itls(), one.tpot) == (0.25, [], None)
    report = summarize([one], 1.0, [50], {}, Cost(1))
    assert "tpot" not in report.latencies and "itl" not in report.latencies


def test_the_role_of_a_chat_is_no_token() -> None:
    role = '{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
    word = '{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}'
    last = '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
    one = record((100.1, role), (100.5, word), (100.7, last), (100.8, usage(1)))
    assert one.stamps == [100.5]
    ended_by_a_token = record((100.1, role), (100.5, word), (100.7, last), (100.8, usage(2)))
    assert ended_by_a_token.itls() == pytest.approx([0.2])


def test_reasoning_and_tool_calls_are_tokens() -> None:
    thought = '{"choices":[{"delta":{"reasoning_content":"hm"}}]}'
    call = '{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}'
    last = '{"choices":[{"delta":{},"finish_reason":"tool_calls"}]}'
    assert record((101, thought), (102, call), (103, last), (103, usage(2))).stamps == [101, 102]


def test_tokens_that_come_together_share_their_gap() -> None:
    one = record((101, text("a")), (102, text("bb")), (104, end("cccc")), (104, usage(7)))
    assert one.tokens == [1, 2, 4]
    assert one.itls() == pytest.approx([0.5] * 2 + [0.5] * 4)
    assert one.icls() == [1, 2]
    assert sum(one.itls()) == pytest.approx(one.e2el - one.ttft)


def test_running_counts_of_the_server_beat_any_guess() -> None:
    first, second, last = text("aaaa", **counted(1)), text("b", **counted(4)), end("", **counted(4))
    one = record((101, first), (103, second), (104, last), (104, usage(4)))
    assert (one.stamps, one.tokens) == ([101, 103], [1, 3])


def test_without_usage_each_chunk_with_text_is_one_token_and_that_is_said() -> None:
    one = record((101, text("a")), (102, text("b")), (103, end()))
    assert (one.output_tokens, one.counted) == (2, False)
    assert summarize([one], 1.0, [50], {}, Cost(1)).uncounted == 1


@pytest.mark.parametrize(
    ("events", "kind"), [([(101.0, text("a"))], "cut off"), ([], "cut off"), ([(101.0, end()), (101.0, usage(0))], "no tokens")]
)
def test_what_is_no_whole_answer_is_an_error(events: list[tuple[float, str]], kind: str) -> None:
    assert record(*events).error == kind


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(0, 200))
def test_shared_tokens_add_up(characters: list[int], total: int) -> None:
    counts = share_tokens(total, characters)
    assert sum(counts) == total and min(counts) >= 0
    with_text = [at for at, length in enumerate(characters) if length]
    if total >= len(with_text):
        assert all(counts[at] for at in with_text)
    elif total:
        assert counts[with_text[0]]


@given(st.binary(max_size=200), st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(1, 60)))
def test_events_come_out_whole_however_the_bytes_are_cut(noise: bytes, line_end: bytes, cuts: list[int]) -> None:
    payload = noise.replace(b"\r", b"").replace(b"\n", b"") or b"x"
    events = [b": a comment\n\nevent: message\ndata: " + payload, b"data:one\ndata: two", b"data: [DONE]", b""]
    stream, decoder, found = b"\n\n".join(events).replace(b"\n", line_end), EventDecoder(), []
    while stream:
        size = cuts.pop() if cuts else 1
        found += decoder.feed(stream[:size])
        stream = stream[size:]
    assert found == [payload, b"one\ntwo", b"[DONE]"]


def test_no_gap_is_lost_when_many_tokens_come_in_few_chunks() -> None:
    rng = np.random.default_rng(0)
    stamps = np.cumsum(rng.exponential(0.01, 50)) + 100
    events = [(float(stamp), text("x" * int(rng.integers(1, 9)))) for stamp in stamps[:-1]]
    one = record(*events, (float(stamps[-1]), end("x")), (200.0, usage(173)))
    assert len(one.itls()) == 172
    assert sum(one.itls()) == pytest.approx(float(stamps[-1] - stamps[0]))
    assert one.tpot == pytest.approx(float(np.mean(one.itls())))
