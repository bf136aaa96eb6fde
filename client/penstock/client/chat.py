"""`penstock chat`: a conversation with a server, token by token."""

import asyncio
import base64
import mimetypes
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
from rich.console import Console
from rich.text import Text

from penstock.client.server import Server, ServerError, check, unreachable
from penstock.client.stream import DONE, EventDecoder, decode_chunk, error_message

HELP: Final = """\
/image FILE   show the model an image with the next question: a file, or an https:// URL
/reset   forget the conversation
/help    this list
/quit    leave, as Ctrl-D does
Ctrl-C   interrupt an answer; what came of it stays in the conversation"""


@dataclass
class Answer:
    """What has come so far."""

    text: str = ""
    began: float = 0.0
    first: float | None = None
    last: float = 0.0
    tokens: int | None = None
    """Output tokens as the server counts them. None: not reported yet."""
    ended: str | None = None
    """The server's reason; None: the stream has not come to the answer's end."""

    def speed(self) -> str:
        """The line below an answer."""
        if self.first is None:
            return "no token"
        parts = [f"first token after {1000 * (self.first - self.began):.0f} ms"]
        if self.tokens is not None:
            parts.insert(0, f"{self.tokens} token{'s' if self.tokens != 1 else ''}")
            if self.tokens > 1 and self.last > self.first:
                parts.append(f"{(self.tokens - 1) / (self.last - self.first):.1f} tok/s")
        if self.ended == "length":
            parts.append("cut off at the limit")
        return ", ".join(parts)


@dataclass
class Conversation:
    """The messages so far, and how to go on.

    Args:
        model: The name to ask for.
        system: First message; None: none.
        fields: More of the request's body.
    """

    model: str
    system: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    """URLs of the images that go with the next question."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.images = []

    def body(self, question: str) -> bytes:
        """The request that asks `question` next; raises `ServerError` for what is no text."""
        messages = [*self.messages, {"role": "user", "content": self._content(question)}]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        try:
            return msgspec.json.encode({"model": self.model, "messages": messages, **options, **self.fields})
        except UnicodeEncodeError:
            raise ServerError("input", "the question is not UTF-8 text") from None

    def keep(self, question: str, answer: str) -> None:
        """Keep a question and its answer in the conversation. Drop both if the answer is empty."""
        if answer:
            self.messages += [{"role": "user", "content": self._content(question)}, {"role": "assistant", "content": answer}]
            self.images = []

    def _content(self, question: str) -> str | list[dict[str, Any]]:
        if not self.images:
            return question
        images: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return [*images, {"type": "text", "text": question}]


def image_url(name: str) -> str:
    """Return a file as a `data:` URL, and an https URL unchanged.

    Raises:
        ServerError: it is neither.
    """
    if name.startswith("https://"):
        return name
    kind, _ = mimetypes.guess_type(name)
    if kind is None or not kind.startswith("image/"):
        raise ServerError("input", f"{name} is not named as an image, such as picture.png")
    try:
        data = Path(name).expanduser().read_bytes()
    except OSError as error:
        raise ServerError("input", f"{name} cannot be read: {error.strerror}") from None
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def ask(server: Server, body: bytes, answer: Answer, write: Callable[[str, bool], None]) -> None:
    """Streams an answer into `answer`, and each piece to `write`, with whether it is reasoning. Raises `ServerError`."""
    decoder = EventDecoder()
    answer.began = time.perf_counter()
    headers = {"content-type": "application/json"}
    try:
        async with await server.post(server.url("/v1/chat/completions"), body, headers) as response:
            await check(response)
            async for data in response.content.iter_any():
                for payload in decoder.feed(data):
                    if payload != DONE:
                        _take(payload, answer, write)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise unreachable(server.base_url, error) from None
    if answer.ended is None:
        raise ServerError("cut off", "the stream ended before the answer did")


def _take(payload: bytes, answer: Answer, write: Callable[[str, bool], None]) -> None:
    try:
        chunk = decode_chunk(payload)
    except msgspec.MsgspecError as error:
        raise ServerError("protocol", f"this is no chunk of a completion: {error}") from None
    if chunk.error is not None:
        raise ServerError("error in the stream", f"the server broke off: {error_message(chunk.error)}")
    if chunk.usage is not None:
        answer.tokens = chunk.usage.completion_tokens
    for choice in chunk.choices:
        for text, thought in ((choice.thought, True), (choice.answer, False)):
            if text:
                answer.last = time.perf_counter()
                answer.first = answer.first or answer.last
                write(text, thought)
        answer.text += choice.answer
        answer.ended = choice.finish_reason or answer.ended


def run(
    base_url: str,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    images: Sequence[str] = (),
) -> int:
    """Talks until the input ends. Without a terminal on standard input, all of it is one question. `images` go with the first."""
    urls = [image_url(name) for name in images]
    given = {"max_completion_tokens": max_tokens, "temperature": temperature}
    fields = {name: value for name, value in given.items() if value is not None}
    with asyncio.Runner() as runner:
        server = Server(base_url)
        runner.run(server.__aenter__())
        try:
            conversation = Conversation(model or runner.run(server.first_model()), system, fields)
            conversation.images = urls
            if not sys.stdin.isatty():
                return _pipe(runner, server, conversation)
            return _converse(runner, server, conversation)
        except KeyboardInterrupt:
            return 130
        finally:
            runner.run(server.__aexit__())


def _pipe(runner: asyncio.Runner, server: Server, conversation: Conversation) -> int:
    """One question, and the plain answer on standard output."""
    question = sys.stdin.read().strip()
    if not question:
        raise ServerError("input", "nothing was asked: standard input is empty")

    def write(text: str, thought: bool) -> None:
        if not thought:
            sys.stdout.write(text)
            sys.stdout.flush()

    answer = Answer()
    try:
        runner.run(ask(server, conversation.body(question), answer, write))
    finally:
        if answer.text:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return 0


def _converse(runner: asyncio.Runner, server: Server, conversation: Conversation) -> int:
    import readline  # noqa: F401 - gives input() a history and editing

    console = Console(highlight=False)
    console.print(f"{conversation.model} at {server.base_url}; /help for commands", style="dim", markup=False)
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            console.print()
            return 0
        except KeyboardInterrupt:
            console.print()
            continue
        if question == "/quit":
            return 0
        if question == "/reset":
            conversation.reset()
        elif question == "/help":
            console.print(HELP, style="dim", markup=False)
        elif question.startswith("/image "):
            _show(conversation, question.removeprefix("/image ").strip(), console)
        elif question.startswith("/"):
            console.print(f"there is no command {question}; /help lists them", style="red", markup=False)
        elif question:
            _turn(runner, server, conversation, question, console)


def _show(conversation: Conversation, name: str, console: Console) -> None:
    try:
        conversation.images.append(image_url(name))
    except ServerError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)


def _turn(runner: asyncio.Runner, server: Server, conversation: Conversation, question: str, console: Console) -> None:
    def write(text: str, thought: bool) -> None:
        console.print(Text(text, style="dim" if thought else ""), end="", soft_wrap=True)

    answer, note = Answer(), ""
    try:
        runner.run(ask(server, conversation.body(question), answer, write))
    except KeyboardInterrupt:
        note = "interrupted; "
    except ServerError as error:
        console.print(f"{chr(10) if answer.first else ''}{error}", style="red", markup=False, soft_wrap=True)
    conversation.keep(question, answer.text)
    if answer.first or note:
        console.print(f"\n{note}{answer.speed()}", style="dim", markup=False)
