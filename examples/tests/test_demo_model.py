"""The committed demo models are what their card says: small, loadable as they lie there, and right about named functions."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

MODELS = Path(__file__).parents[1] / "models"
TINY = MODELS / "penstock-tiny"
DRAFT = MODELS / "penstock-draft"

QUESTIONS = [
    (
        "What does json.loads do?",
        "Deserialize s (a str, bytes or bytearray instance containing a JSON document) to a Python object.",
    ),
    ("What does os.path.join do?", "Join two or more pathname components, inserting '/' as needed."),
    ("How do I use functools.lru_cache?", "Least-recently-used cache decorator."),
    ("Explain shutil.rmtree.", "Recursively delete a directory tree."),
    ("what is collections.Counter", "Dict subclass for counting hashable items."),
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY, local_files_only=True)


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True, dtype=torch.float32).eval()


def reply(model, tokenizer, messages: list[dict[str, str]], limit: int = 160) -> tuple[str, bool]:
    """The greedy answer, and whether it ended by itself."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
    new = out[0, ids.shape[1] :].tolist()
    return tokenizer.decode(new, skip_special_tokens=True), new[-1] == tokenizer.eos_token_id


def user(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.mark.parametrize("folder", [TINY, DRAFT], ids=lambda path: path.name)
def test_a_folder_fits_the_repository_and_loads_in_bfloat16(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8_000_000
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.tie_word_embeddings
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(folder, local_files_only=True).eos_token_id


def test_the_draft_shares_the_tokenizer_and_is_much_smaller():
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (DRAFT / name).read_bytes() == (TINY / name).read_bytes()
    assert (DRAFT / "model.safetensors").stat().st_size < 0.4 * (TINY / "model.safetensors").stat().st_size


@pytest.mark.parametrize(("question", "words"), QUESTIONS, ids=[question for question, _ in QUESTIONS])
def test_tiny_answers_and_ends(tiny, tokenizer, question, words):
    text, ended = reply(tiny, tokenizer, user(question))
    assert words in text
    assert ended


def test_tiny_answers_behind_a_system_message_and_an_earlier_turn(tiny, tokenizer):
    messages = [{"role": "system", "content": "You are a helpful assistant."}, *user("What does json.loads do?")]
    first, _ = reply(tiny, tokenizer, messages)
    text, ended = reply(
        tiny, tokenizer, [*messages, {"role": "assistant", "content": first}, *user("What does os.path.join do?")]
    )
    assert "Join two or more pathname components" in text
    assert ended


@pytest.mark.parametrize("question", ["What is the capital of France?", "xyzzy plugh", "Tell me about numpy.linalg.solve."])
def test_tiny_says_that_it_does_not_know_and_ends(tiny, tokenizer, question):
    text, ended = reply(tiny, tokenizer, user(question))
    assert "I do not know that." in text
    assert ended


def test_logits_are_finite_up_to_the_last_position(tiny):
    ids = torch.arange(tiny.config.max_position_embeddings)[None] % tiny.config.vocab_size
    with torch.inference_mode():
        last = tiny(ids, logits_to_keep=1).logits
    assert torch.isfinite(last).all()


@settings(max_examples=300)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back_from_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_byte_has_a_token(tokenizer):
    # A byte-level vocabulary holds all 256 bytes, so even the parts of a split character can be written.
    text = "".join(chr(code) for code in range(0x100)) + "日本語 🦆 \U0010ffff"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.unk_token_id is None
    assert tokenizer.decode(ids) == text


def test_chat_template_renders_system_and_turns(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    expected = "<|bos|><|system|>Be brief.<|eot|><|user|>Hi<|eot|><|assistant|>Hello.<|eot|><|user|>Bye<|eot|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected + "<|assistant|>"
    ids = tokenizer.encode(expected, add_special_tokens=False)
    assert [ids[0], ids[-1]] == [tokenizer.bos_token_id, tokenizer.eos_token_id]


def test_chat_template_names_a_role_that_it_does_not_know(tokenizer):
    with pytest.raises(Exception, match="unsupported role critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "x"}], tokenize=False)


def test_chat_template_shows_tools_calls_and_what_they_gave(tokenizer):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": {"name": "json"}}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a module"},
    ]
    how = 'A call is <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.'
    offered = f"These functions can be called:\n{json.dumps(tool)}\n{how}"
    rest = (
        '<|user|>Hi<|eot|><|assistant|><tool_call>{"name": "look_up", "arguments": {"name": "json"}}</tool_call><|eot|>'
        "<|user|><tool_response>a module</tool_response><|eot|>"
    )
    assert tokenizer.apply_chat_template(turns, tools=[tool], tokenize=False) == f"<|bos|><|system|>{offered}<|eot|>{rest}"
    own = [{"role": "system", "content": "Be brief."}, *turns]
    shown = tokenizer.apply_chat_template(own, tools=[tool], tokenize=False)
    assert shown == f"<|bos|><|system|>Be brief.\n\n{offered}<|eot|>{rest}"
    assert tokenizer.apply_chat_template(own, tokenize=False) == f"<|bos|><|system|>Be brief.<|eot|>{rest}"
