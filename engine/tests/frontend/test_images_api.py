"""Images over HTTP and from Python: answers are transformers', errors name the part, and equal images are encoded once."""

import asyncio
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
from lora_adapters import make_adapter, merged
from openai import BadRequestError, OpenAI
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from vision_models import CHAT_TEMPLATE, SEEING, SIZE, TOKENS, data_url, make_gemma3, make_qwen, picture, with_tokenizer

from penstock.engine import LLM, AsyncLLM, SamplingParams
from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError
from penstock.prompt.bundle import PromptBundle

OUTPUTS = 16


@pytest.fixture(scope="module")
def checkpoint(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory.mktemp("models") / "seeing", tokenizer_files)


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


def reference(checkpoint: Path) -> transformers.LlavaForConditionalGeneration:
    return transformers.LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(checkpoint: Path):
    """`expected(prompt, *seeds)`: transformers' answer to a text with one `<image>` for each of the pictures."""
    return answers_of(reference(checkpoint), checkpoint)


def answers_of(model, checkpoint: Path):
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


@pytest.mark.parametrize("forced", ["json_schema", "tool"])
def test_grammars_and_forced_calls_hold_beside_images(client, forced):
    """The image is read: the model's scores are another image's no more."""
    schema = {"type": "object", "properties": {"what": {"enum": ["mill", "river"]}}, "required": ["what"]}
    schema["additionalProperties"] = False
    if forced == "tool":
        tool = {"type": "function", "function": {"name": "say", "parameters": schema}}
        fields = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "say"}}}
    else:
        fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "what", "schema": schema}}}
    scores = []
    for seed in (0, 1, 0):
        messages = [{"role": "user", "content": [text("what is "), image(seed)]}]
        asked = {"messages": messages, "temperature": 0, "max_tokens": 200, "logprobs": True, **fields}
        answer = client.chat.completions.create(model="tiny", **asked)
        [choice] = answer.choices
        said = choice.message.tool_calls[0].function.arguments if forced == "tool" else choice.message.content
        assert json.loads(said)["what"] in ("mill", "river")
        assert answer.usage.prompt_tokens_details.image_tokens == TOKENS
        scores.append([round(one.logprob, 3) for one in choice.logprobs.content][:3])
    assert scores[0] == scores[2] != scores[1]


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
    rules = PromptBundle.from_json(httpx.get(f"{server.url}/prompt-bundle").content).images
    assert rules is not None
    tower = rules.cost.tokens(SIZE * SIZE)
    assert rules.usual == (TOKENS, tower)
    assert tower > 0


def test_python_reads_images_too(checkpoint, expected, tmp_path):
    # Modules of the decoder alone.
    path = make_adapter(tmp_path / "adapter", reference(checkpoint), modules=("o_proj", "gate_proj", "down_proj"))
    changed = answers_of(merged(reference(checkpoint), path), checkpoint)
    options: dict = {"dtype": "float32", "kv_cache_memory_bytes": 2**22, "enable_lora": True, "lora_modules": [f"other={path}"]}
    with LLM(str(checkpoint), in_process=True, **options) as llm:
        messages = [{"role": "user", "content": [text("see "), image(4)]}]
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUTS)
        [output] = llm.chat(messages, params, progress=False)
        assert output.outputs[0].text == expected("<s><|user|>see <image>\n<|end|><|assistant|>", 4)
        assert len(output.prompt_token_ids) > TOKENS
        [adapted] = llm.chat(messages, params, progress=False, adapter="other")
        assert adapted.outputs[0].text == changed("<s><|user|>see <image>\n<|end|><|assistant|>", 4) != output.outputs[0].text
        with pytest.raises(ValueError, match="not an image"):
            llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}])


async def test_async_python_reads_images_too(checkpoint, expected):
    args = EngineArgs(model=str(checkpoint), dtype="float32", kv_cache_memory_bytes=2**22)
    async with AsyncLLM.from_args(args, in_process=True) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, output_kind="final_only")

        async def say(seed: int) -> str:
            tokens = await llm.read_chat([{"role": "user", "content": [text("see "), image(seed)]}])
            [output] = [one async for one in llm.generate(tokens, params)]
            return output.outputs[0].text

        answers = await asyncio.gather(*(say(seed) for seed in (4, 5, 4)))
    assert answers == [expected("<s><|user|>see <image>\n<|end|><|assistant|>", seed) for seed in (4, 5, 4)]


@pytest.fixture(scope="module")
def gemma(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gemma"
    tokenizer = Tokenizer.from_file(str(tokenizer_files / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image_soft_token>", "<start_of_image>", "<end_of_image>"])
    size = tokenizer.get_vocab_size()
    tokens = {"image_token": size - 3, "begin": size - 2, "end": size - 1}
    make_gemma3(folder, vocab_size=size, max_position_embeddings=1024, **tokens)
    shutil.copy(tokenizer_files / "tokenizer_config.json", folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("<image>\n", "<start_of_image>"))
    return folder


@pytest.mark.req("MM-01")
def test_gemma_3_reads_images(gemma):
    family, soft = SEEING["gemma3"], "<image_soft_token>"
    tokenizer = Tokenizer.from_file(str(gemma / "tokenizer.json"))
    in_full = "\n\n<start_of_image>" + soft * family.tokens + "<end_of_image>\n\n"
    prompt = f"<s><|user|>see\n{in_full}and{in_full}<|end|><|assistant|>"
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    inputs = family.inputs(family.processor(gemma), [picture(1), picture(2)], ids, tokenizer.token_to_id(soft))
    with torch.inference_mode():
        out = family.reference(gemma).generate(**inputs, max_new_tokens=OUTPUTS, do_sample=False, eos_token_id=None)
    with LLM(str(gemma), dtype="float32", kv_cache_memory_bytes=2**22, in_process=True) as llm:
        messages = [{"role": "user", "content": [text("see\n"), image(1), text("and"), image(2)]}]
        [output] = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=OUTPUTS), progress=False)
    assert output.prompt_token_ids == ids
    assert output.outputs[0].token_ids == out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def qwen(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen"
    tokenizer = Tokenizer.from_file(str(tokenizer_files / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|image_pad|>"])
    size = tokenizer.get_vocab_size()
    make_qwen(folder, vocab_size=size, max_position_embeddings=1024, image_token=size - 1)
    shutil.copy(tokenizer_files / "tokenizer_config.json", folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("<image>", "<|image_pad|>"))
    return folder


@pytest.mark.req("MM-01", "MM-21")
def test_qwen_2_5_vl_reads_images_of_any_size(qwen):
    family, pad = SEEING["qwen2_5_vl"], "<|image_pad|>"
    tokenizer, pictures = Tokenizer.from_file(str(qwen / "tokenizer.json")), [picture(1, 61, 20), picture(2, 16, 16)]
    processor = family.processor(qwen)
    lengths = [int(grid.prod()) // 4 for grid in processor(pictures, return_tensors="pt")["image_grid_thw"]]
    assert lengths == [16, 4]
    prompt = f"<s><|user|>see {pad * lengths[0]}\nand {pad * lengths[1]}\n<|end|><|assistant|>"
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    inputs = family.inputs(processor, pictures, ids, tokenizer.token_to_id(pad))
    with torch.inference_mode():
        out = family.reference(qwen).generate(**inputs, max_new_tokens=OUTPUTS, do_sample=False, eos_token_id=None)
    images = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in pictures]
    with LLM(str(qwen), dtype="float32", kv_cache_memory_bytes=2**22, in_process=True) as llm:
        messages = [{"role": "user", "content": [text("see "), images[0], text("and "), images[1]]}]
        for _ in range(2):
            [output] = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=OUTPUTS), progress=False)
            assert output.prompt_token_ids == ids
            assert output.outputs[0].token_ids == out[0, len(ids) :].tolist()
        # A request chooses another size, and gets neither the embeddings nor the keys and values of the usual one.
        small = family.processor(qwen)
        small.size = {"shortest_edge": 256, "longest_edge": 512}
        grids = small(pictures, return_tensors="pt")["image_grid_thw"]
        lengths = [int(grid.prod()) // 4 for grid in grids]
        assert lengths[0] < 16
        words = f"<s><|user|>see {pad * lengths[0]}\nand {pad * lengths[1]}\n<|end|><|assistant|>"
        fewer = tokenizer.encode(words, add_special_tokens=False).ids
        inputs = family.inputs(small, pictures, fewer, tokenizer.token_to_id(pad))
        with torch.inference_mode():
            out = family.reference(qwen).generate(**inputs, max_new_tokens=OUTPUTS, do_sample=False, eos_token_id=None)
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUTS)
        [output] = llm.chat(messages, params, progress=False, mm_processor_kwargs={"max_pixels": 512})
        assert output.prompt_token_ids == fewer
        assert output.outputs[0].token_ids == out[0, len(fewer) :].tolist()
        with pytest.raises(ValueError, match="max_pixels 99999"):
            llm.chat(messages, progress=False, mm_processor_kwargs={"max_pixels": 99999})


def test_the_size_of_images_can_be_set(qwen, checkpoint):
    def settings(path: Path, **given: object):
        return EngineArgs(model=str(path), device="cpu", mm_processor_kwargs=given).config().model.images

    assert settings(qwen).tokens == 20
    assert settings(qwen, max_pixels=6400).tokens == 100
    assert settings(qwen, min_pixels=640).resize.size.min_pixels == 640
    for path, given, words in (
        (qwen, {"fps": 2}, "fps: this model takes min_pixels and max_pixels"),
        (qwen, {"max_pixels": 10}, "max_pixels 10"),
        (checkpoint, {"max_pixels": 6400}, "max_pixels: this model takes none"),
    ):
        with pytest.raises(ConfigError, match=words):
            settings(path, **given)


def test_limits_under_which_an_image_could_never_be_read_in_one_step_are_refused(gemma):
    config = EngineArgs(model=str(gemma), device="cpu", max_num_seqs=4, max_num_batched_tokens=12).config()
    assert config.scheduler.whole_images
    for wrong, words in (
        ({"max_num_batched_tokens": 11}, "must be at least 12, or --max-num-seqs less"),
        ({"spec_method": "ngram", "spec_tokens": 2}, "must be at least 18"),
        ({"long_prefill_token_threshold": 8}, "must be 0, or 9 at least"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineArgs(model=str(gemma), device="cpu", **{"max_num_seqs": 4, "max_num_batched_tokens": 12} | wrong).config()
    EngineArgs(
        model=str(gemma), device="cpu", max_num_seqs=4, max_num_batched_tokens=11, limit_mm_per_prompt={"image": 0}
    ).config()


@pytest.mark.req("MM-12")
def test_flags(checkpoint, tmp_path):
    config = EngineArgs(model=str(checkpoint), max_num_batched_tokens=8, device="cpu").config()
    assert (config.scheduler.max_encoder_tokens, config.scheduler.encoder_cache_size) == (8, TOKENS)
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
