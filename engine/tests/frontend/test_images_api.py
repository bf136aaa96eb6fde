"""Images over HTTP and from Python: answers are transformers', errors name the part, and equal images are encoded once."""

import base64
import io
import json
import shutil
from pathlib import Path

import httpx
import pytest
import torch
import transformers
from frontend_process import serving
from openai import BadRequestError, OpenAI
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from vision_models import TOKENS, data_url, make_llava, picture

from penstock.engine import LLM, SamplingParams
from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OUTPUTS = 16


@pytest.fixture(scope="module")
def checkpoint(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "seeing"
    tokenizer = Tokenizer.from_file(str(tokenizer_files / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    size = tokenizer.get_vocab_size()
    make_llava(folder, vocab_size=size, image_token=size - 1, max_position_embeddings=1024)
    shutil.copy(tokenizer_files / "tokenizer_config.json", folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    flags = ("--limit-mm-per-prompt", '{"image": 3}', "--dtype", "float32")
    with serving(checkpoint, tmp_path_factory.mktemp("log") / "serve.log", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one


def image(seed: int, **fields) -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(picture(seed)), **fields}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def ask(client: OpenAI, *content, **fields):
    messages = [{"role": "user", "content": list(content)}]
    return client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=OUTPUTS, **fields)


@pytest.fixture(scope="module")
def expected(checkpoint: Path):
    """`expected(prompt, *seeds)`: transformers' answer to a text with one `<image>` for each of the pictures."""
    model = transformers.LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = CLIPImageProcessorPil.from_pretrained(checkpoint)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def answer(prompt: str, *seeds: int) -> str:
        ids = tokenizer.encode(prompt.replace("<image>", "<image>" * TOKENS), add_special_tokens=False).ids
        pixels = dict(processor([picture(seed) for seed in seeds], return_tensors="pt")) if seeds else {}
        with torch.inference_mode():
            out = model.generate(torch.tensor([ids]), **pixels, max_new_tokens=OUTPUTS, do_sample=False, eos_token_id=None)
        return tokenizer.decode(out[0, len(ids) :].tolist())

    return answer


@pytest.mark.req("MM-01", "MM-06", "MM-07")
def test_answers_are_those_of_transformers(client, expected):
    prompt = "<s><|user|>the river <image>\nturns <image>\nthe mill<|end|><|assistant|>"
    answers = [
        ask(client, text("the river "), image(first), text("turns "), image(second), text("the mill"))
        for first, second in [(0, 1), (1, 0), (0, 1)]
    ]
    assert [one.choices[0].message.content for one in answers] == [expected(prompt, *seeds) for seeds in [(0, 1), (1, 0), (0, 1)]]
    usage = answers[2].usage
    assert usage.prompt_tokens_details.image_tokens == 2 * TOKENS
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16
    assert answers[1].usage.prompt_tokens_details.cached_tokens == 0
    chunks = ask(client, text("the river "), image(0), text("turns "), image(1), text("the mill"), stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == answers[0].choices[0].message.content


def test_text_alone_is_answered_as_ever(client, expected):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "the mill"}], temperature=0, max_tokens=OUTPUTS
    )
    assert answer.choices[0].message.content == expected("<s><|user|>the mill<|end|><|assistant|>")
    assert "image_tokens" not in answer.usage.prompt_tokens_details.model_fields_set


def test_responses_and_tool_results_take_images(client, expected):
    parts = [{"type": "input_text", "text": "see "}, {"type": "input_image", "image_url": data_url(picture(4)), "detail": "auto"}]
    answer = client.responses.create(
        model="tiny", input=[{"role": "user", "content": parts}], max_output_tokens=OUTPUTS, temperature=0
    )
    assert answer.output_text == expected("<s><|user|>see <image>\n<|end|><|assistant|>", 4)
    messages = [
        {"role": "user", "content": "look"},
        {"role": "tool", "tool_call_id": "1", "content": [text("here"), image(5)]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=OUTPUTS)
    prompt = "<s><|user|>look<|end|><|tool|>here<image>\n<|end|><|assistant|>"
    assert answer.choices[0].message.content == expected(prompt, 5)


def test_tokenize_counts_an_images_tokens(server):
    body = {"messages": [{"role": "user", "content": [text("see "), image(0)]}]}
    with_image = httpx.post(f"{server.url}/tokenize", json=body).json()
    body["messages"][0]["content"].pop()
    alone = httpx.post(f"{server.url}/tokenize", json=body).json()
    assert with_image["count"] == alone["count"] + TOKENS + 1  # and a line feed


@pytest.mark.parametrize(
    ("part", "param", "word"),
    [
        (image(0, detail="best"), "image_url.detail", "detail"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image_url.url", "not an image"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}, "image_url.url", "base64"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "image_url.url", "--allowed-media-domains"),
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}, "image_url.url", "https"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url.url", "https"),
        ({"type": "video_url", "video_url": {"url": "https://x/y"}}, None, "videos"),
    ],
)
def test_bad_images_are_errors_that_name_their_part(client, part, param, word):
    with pytest.raises(BadRequestError) as caught:
        ask(client, text("see"), part)
    assert caught.value.param == "messages[0].content[1]" + ("" if param is None else f".{param}")
    assert word in str(caught.value)


def test_too_many_images_placeholders_in_texts_and_long_prompts_are_refused(client):
    for content, word in (
        ([image(at) for at in range(4)], "at most 3 images"),
        ([text("<image>"), image(0)], "2 placeholders for 1 images"),
        ([text("<image>")], "1 placeholders for 0 images"),
        ([image(0), text("the " * 1000)], "context"),
    ):
        with pytest.raises(BadRequestError, match=word):
            ask(client, *content)


def test_many_hostile_images_leave_the_server_as_it_was(client, server, expected):
    sound = io.BytesIO()
    picture(0).save(sound, "PNG")
    data, cmyk = sound.getvalue(), io.BytesIO()
    Image.new("CMYK", (30, 30)).save(cmyk, "JPEG")
    hostile = [data[:cut] for cut in range(0, len(data), len(data) // 40)] + [b"\x89PNG\r\n\x1a\n" + bytes(40), b"GIF89a" * 9]
    for one in [*hostile, cmyk.getvalue()]:
        url = "data:image/png;base64," + base64.b64encode(one).decode()
        body = {
            "model": "tiny",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
        }
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert answer.status_code == (200 if one == cmyk.getvalue() else 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.url"
    report = httpx.get(f"{server.url}/load").json()
    assert report["num_requests_running"] == 0
    assert ask(client, image(7)).choices[0].message.content == expected("<s><|user|><image>\n<|end|><|assistant|>", 7)


def test_the_bundle_says_how_prompts_show_images(server):
    bundle = httpx.get(f"{server.url}/prompt-bundle").json()
    assert bundle["images"]["tokens"] == TOKENS


def test_python_reads_images_too(checkpoint, expected):
    with LLM(str(checkpoint), dtype="float32", kv_cache_memory_bytes=2**22, in_process=True) as llm:
        messages = [{"role": "user", "content": [text("see "), image(4)]}]
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUTS)
        [output] = llm.chat(messages, params, progress=False)
        assert output.outputs[0].text == expected("<s><|user|>see <image>\n<|end|><|assistant|>", 4)
        assert len(output.prompt_token_ids) > TOKENS
        with pytest.raises(ValueError, match="not an image"):
            llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}])


@pytest.mark.req("MM-12")
def test_flags(checkpoint, tmp_path):
    config = EngineArgs(model=str(checkpoint), max_num_batched_tokens=8, device="cpu").config()
    assert (config.scheduler.max_encoder_tokens, config.scheduler.encoder_cache_size) == (TOKENS, TOKENS)
    assert EngineArgs(model=str(checkpoint), device="cpu").config().scheduler.max_encoder_tokens == 2048
    none = EngineArgs(model=str(checkpoint), limit_mm_per_prompt={"image": 0, "video": 0}, device="cpu").config()
    assert none.model.images is None
    assert none.scheduler.encoder_cache_size == 0
    for wrong, word in (
        ({"limit_mm_per_prompt": {"video": 1}}, "video"),
        ({"allowed_media_domains": ["https://x"]}, "https://x"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}, "chunk"),
    ):
        with pytest.raises(ConfigError, match=word):
            EngineArgs(model=str(checkpoint), device="cpu", **wrong).config()
    plain = tmp_path / "plain"
    shutil.copytree(checkpoint, plain)
    (plain / "preprocessor_config.json").unlink()
    assert EngineArgs(model=str(plain), device="cpu").config().model.images is None
    with pytest.raises(ConfigError, match="reads text alone"):
        EngineArgs(model=str(plain), device="cpu", limit_mm_per_prompt={"image": 1}).config()
    (plain / "processor_config.json").write_text(
        json.dumps({"image_processor": json.loads((checkpoint / "preprocessor_config.json").read_text())})
    )
    assert (
        EngineArgs(model=str(plain), device="cpu").config().model.images
        == EngineArgs(model=str(checkpoint), device="cpu").config().model.images
    )
