"""`penstock chat`: what it remembers, what it shows, and how it is interrupted."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from client_servers import Script, begin, event, stream_words, usage

from penstock.client.chat import Answer, Conversation, image_url
from penstock.client.server import ServerError

COMMAND = [sys.executable, "-m", "penstock.cli", "chat"]


def test_a_conversation_grows_by_what_was_said() -> None:
    talk = Conversation("m", "be brief", {"temperature": 0.5})
    talk.keep("one?", "1")
    talk.keep("nothing came", "")
    body = json.loads(talk.body("two?"))
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert (body["model"], body["temperature"], body["messages"][-1]["content"]) == ("m", 0.5, "two?")
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be brief"}]


def test_speed_is_that_of_the_tokens_after_the_first() -> None:
    assert Answer("x", began=10, first=10.5, last=12.5, tokens=21).speed() == "21 tokens, first token after 500 ms, 10.0 tok/s"
    assert Answer("x", began=10, first=10.5, last=10.5, tokens=1).speed() == "1 token, first token after 500 ms"
    assert Answer("x", began=10, first=10.5, last=12.5).speed() == "first token after 500 ms"
    assert (
        Answer("x", began=10, first=10.5, last=10.5, ended="length").speed() == "first token after 500 ms, cut off at the limit"
    )
    assert Answer().speed() == "no token"


async def piped(question: str, *flags: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a chat whose input is no terminal."""
    command = [*COMMAND, *flags]
    done = await asyncio.to_thread(
        subprocess.run, command, input=question, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


async def test_what_is_piped_in_is_one_question_and_the_answer_comes_out_plain(script: Script) -> None:
    assert await piped("two\nlines\n", "--base-url", script.url, "--system", "s", "--max-tokens", "2") == (0, "w0 w1 \n", "")
    [body] = script.bodies
    assert [message["content"] for message in body["messages"]] == ["s", "two\nlines"]
    assert (body["model"], body["max_completion_tokens"], "temperature" in body) == ("one", 2, False)


async def test_errors_are_sentences(script: Script) -> None:
    async def refuse(_: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such model"}}, status=404)

    script.answer = refuse
    status, out, err = await piped("hi", "--base-url", script.url, "--model", "x")
    assert (status, out, err) == (1, "", "penstock chat: the server answered 404: no such model\n")
    assert await piped("", "--base-url", script.url) == (1, "", "penstock chat: nothing was asked: standard input is empty\n")
    status, _, err = await piped("hi", "--base-url", "http://127.0.0.1:1")
    assert (status, err) == (1, "penstock chat: cannot reach http://127.0.0.1:1: connection refused\n")


async def test_what_is_no_whole_answer_is_an_error(script: Script) -> None:
    """A stream that ends in the middle, as that of a server which dies, and what is no stream at all."""

    async def stop(_: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(event(body, "half"))
        return response

    async def page(_: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text="<html></html>", content_type="text/html")

    for answer, out in ((stop, "half\n"), (page, "")):
        script.answer = answer
        found = await piped("hi", "--base-url", script.url)
        assert found == (1, out, "penstock chat: the stream ended before the answer did\n")


@pytest.mark.parametrize("flags", [["--temperature", "nan"], ["--temperature", "-1"], ["--max-tokens", "0"]])
async def test_flags_of_a_chat_that_make_no_sense_are_refused(flags: list[str]) -> None:
    status, _, err = await piped("hi", *flags)
    assert status == 2 and f"argument {flags[0]}" in err


def test_what_is_no_text_is_a_sentence() -> None:
    with pytest.raises(ServerError, match="not UTF-8 text"):
        Conversation("m").body(b"\xff".decode(errors="surrogateescape"))


def test_images_go_with_the_next_question_and_stay_in_the_conversation(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"not looked into")
    talk = Conversation("m")
    talk.images = [image_url(str(file)), image_url("https://example.com/b.png")]
    content = json.loads(talk.body("what?"))["messages"][0]["content"]
    assert content == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm90IGxvb2tlZCBpbnRv"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/b.png"}},
        {"type": "text", "text": "what?"},
    ]
    talk.keep("what?", "a thing")
    messages = json.loads(talk.body("and now?"))["messages"]
    assert [message["content"] for message in messages] == [content, "a thing", "and now?"]


async def test_an_image_is_a_flag(script: Script, tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(b"x")
    status, *_ = await piped("what?", "--base-url", script.url, "--image", str(file))
    assert status == 0
    assert script.bodies[0]["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    for name, word in ((str(tmp_path / "none.png"), "No such file"), (str(tmp_path), "not named as an image")):
        status, _, err = await piped("what?", "--base-url", script.url, "--image", name)
        assert status == 1 and word in err


def test_the_real_engine_answers(engine: str) -> None:
    flags = ["--base-url", engine, "--temperature", "0"]
    done = subprocess.run(
        [*COMMAND, *flags], input="What does json.loads do?", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("json.loads: Deserialize"), done


class Terminal:
    """A chat on a pseudo-terminal, used by blocking calls."""

    def __init__(self, *flags: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
        # A job in the background, as this test may be, ignores Ctrl-C, and so would its children.
        reset = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        command = [*COMMAND, *flags]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, preexec_fn=reset)
        os.close(theirs)

    def see(self, pattern: str) -> str:
        """Reads until `pattern` has come; what came until then."""
        seen, deadline = "", time.monotonic() + 60
        while not re.search(pattern, seen):
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {seen!r}"
            seen += os.read(self._ours, 4096).decode()
        return seen

    def type(self, line: str) -> None:
        """A line and Enter."""
        os.write(self._ours, line.encode() + b"\n")

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def close(self) -> int:
        """Ends it; its exit status."""
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            os.close(self._ours)


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")
async def test_a_conversation_on_a_terminal(script: Script) -> None:
    async def answer(script: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        question = body["messages"][-1]["content"]
        if question == "slow":
            response = await begin(request)
            await response.write(event(body, "half"))
            await asyncio.sleep(120)
        if question == "bad":
            return web.json_response({"error": {"message": "I cannot"}}, status=400)
        if question == "markup":
            response = await begin(request)
            await response.write(event(body, "[bold]a[/bold] [1]", "stop") + usage(1, 1))
            return response
        return await stream_words(script, request, body)

    def converse() -> int:
        chat = Terminal("--base-url", script.url)
        assert "one at http" in chat.see("> ")
        chat.type("hello")
        assert "w0 w1 w2" in chat.see("first token after .*\n> ")
        chat.type("slow")
        chat.see("half")
        chat.interrupt()
        assert "interrupted; " in chat.see("first token after .*\n> ")
        chat.type("markup")
        assert "[bold]a[/bold] [1]" in chat.see("1 token, .*\n> ")
        chat.type("bad")
        assert "the server answered 400: I cannot" in chat.see("cannot\r\n> ")
        chat.type("/nonsense")
        chat.see("there is no command /nonsense; .*\r\n> ")
        chat.type("/help")
        assert "forget the conversation" in chat.see("stays in the conversation\r\n> ")
        chat.type("/reset")
        chat.see("/reset\r\n> ")  # what is typed while the terminal changes its mode can get lost
        chat.type("again")
        chat.see("first token after .*\n> ")
        chat.type("/quit")
        return chat.close()

    script.answer = answer
    assert await asyncio.to_thread(converse) == 0
    said = [[message["content"] for message in body["messages"]] for body in script.bodies]
    hello = ["hello", "w0 w1 w2 "]
    slow = [*hello, "slow", "half"]
    assert said == [
        ["hello"],
        [*hello, "slow"],
        [*slow, "markup"],
        [*slow, "markup", "[bold]a[/bold] [1]", "bad"],
        ["again"],
    ]
