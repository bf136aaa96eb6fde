"""Every parameter is honoured or refused by name."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engine.config import ModelConfig
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.openai.protocol import ChatRequest, CompletionRequest, parse_chat, parse_completion, parse_json
from penstock.engine.frontend.openai.requests import bad_word_tokens, check_prompts, sampling_params
from penstock.engine.sampling import SamplingParams
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import PromptError
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH, PromptProcessor

CHAT: dict[str, Any] = {"model": "m", "messages": []}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}


@pytest.fixture
def model(tmp_path: Any) -> ModelConfig:
    return ModelConfig(
        path=tmp_path, served_names=("m",), architecture="x", dtype="float32", max_model_len=64, eos_token_ids=(1, 2)
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": "1"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 1}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": "1"}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_everything": True}}, "stream_options.include_everything"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"user": 1}, "user"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"presence_penalty": False}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e30}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": -100.5}}, "logit_bias"),
        ({"logit_bias": {"the": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"logit_bias": [[5, 1]]}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 1.5}, "min_tokens"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["word", ""]}, "bad_words[1]"),
        ({"bad_words": ["word"] * 129}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"vllm_xargs": {"a": {"b": 1}}}, "vllm_xargs"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids[1]"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [{}]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": [{}]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [{}]}, "tool_choice.type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"return_token_ids": "yes"}, "return_token_ids"),
        ({"skip_special_tokens": 0}, "skip_special_tokens"),
        ({"include_stop_str_in_output": 0}, "include_stop_str_in_output"),
        ({"verbosity": "low"}, "verbosity"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 1.5}, "length_penalty"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "indent": 2}}, "response_format.indent"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend"),
        ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "guided_json"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"prompt": "x"}, "prompt"),
        ({"metadata": {str(at): "x" for at in range(17)}}, "metadata"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"colour": 1}, "colour"),
    ],
)
def test_bad_chat_parameters_are_named(fields: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat({**CHAT, **fields})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.split("[")[0].split(".")[-1] in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": []}, "tools"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
        ({"messages": []}, "messages"),
    ],
)
def test_bad_completion_parameters_are_named(fields: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion({**COMPLETION, **fields})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_neutral_values_and_null_are_absence() -> None:
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "n": 1,
        "best_of": 1,
        "logit_bias": {},
        "repetition_penalty": 1,
        "min_tokens": 0,
        "bad_words": [],
        "allowed_token_ids": None,
        "tools": None,
        "parallel_tool_calls": True,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "echo": False,
        "include_reasoning": True,
        "thinking_token_budget": -1,
        "stream_interval": 1,
        "verbosity": "medium",
        "moderation": None,
        "prompt_cache_options": None,
        "temperature": None,
        "stop": None,
        "stream_options": None,
        "user": "u",
        "metadata": {"k": "v"},
    }
    assert parse_chat({**CHAT, **neutral, "user": None, "metadata": None}) == parse_chat(CHAT)
    assert parse_chat({**CHAT, **neutral}).user == "u"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    plain = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert parse_chat({**CHAT, **plain}) == parse_chat({**CHAT, **options})
    assert parse_completion({**COMPLETION, "echo": False, "suffix": None}) == parse_completion(COMPLETION)


def test_every_sampling_parameter_reaches_the_sampler(model: ModelConfig) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11, "max_tokens": 9, "stop_token_ids": [5]}
    params = sampling_params(parse_chat({**CHAT, **fields, "logprobs": True, "top_logprobs": 3}), 10, model, 100, seed=1)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.seed, params.max_tokens, params.stop_token_ids, params.logprobs) == (11, 9, (5, 1, 2), 3)
    ignoring = sampling_params(parse_chat({**CHAT, "ignore_eos": True, "seed": -1, "top_k": -1}), 10, model, 100, seed=1)
    assert (ignoring.stop_token_ids, ignoring.logprobs, ignoring.seed, ignoring.top_k) == ((), None, 2**63 - 1, 0)


def test_every_adjustment_of_the_logits_reaches_the_sampler(model: ModelConfig) -> None:
    fields = {"presence_penalty": 0.5, "frequency_penalty": -2, "repetition_penalty": 1.1, "min_tokens": 3}
    lists = {"logit_bias": {"5": 1, "7": -100}, "allowed_token_ids": [9, 5, 9], "max_tokens": 9, "prompt_logprobs": 4}
    params = sampling_params(parse_chat({**CHAT, **fields, **lists}), 10, model, 100, seed=1, bad_words=((3, 4),))
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -2, 1.1)
    assert (params.logit_bias, params.min_tokens) == (((5, 1.0), (7, -100.0)), 3)
    assert (params.bad_words, params.allowed_token_ids) == (((3, 4),), (9, 5))
    assert params.prompt_logprobs == 4
    own = msgspec.structs.replace(model, logits_processors=("module:Class",))
    assert sampling_params(parse_chat({**CHAT, "vllm_xargs": {"a": [1, "b"]}}), 10, own, 100, seed=1).extra_args == {
        "a": [1, "b"]
    }
    plain = sampling_params(parse_chat(CHAT), 10, model, 100, seed=1)
    assert plain == SamplingParams(max_tokens=54, seed=1, stop_token_ids=(1, 2), seeded=False)


@pytest.mark.parametrize(
    ("fields", "bad_words", "param"),
    [
        ({"logit_bias": {"100": 1}}, (), "logit_bias"),
        ({"allowed_token_ids": [99, 100]}, (), "allowed_token_ids"),
        ({"vllm_xargs": {"a": 1}}, (), "vllm_xargs"),
        ({"min_tokens": 9, "max_tokens": 8}, (), "min_tokens"),
        ({"min_tokens": 55}, (), "min_tokens"),
        # Nothing left to sample: token 2 ends the output, 7 is a bad word.
        ({"min_tokens": 1, "allowed_token_ids": [2, 5], "stop_token_ids": [5]}, (), "allowed_token_ids"),
        ({"min_tokens": 1, "allowed_token_ids": [2, 7]}, ((7,),), "allowed_token_ids"),
    ],
)
def test_adjustments_that_cannot_be_made_are_named(model: ModelConfig, fields: dict, bad_words: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        sampling_params(parse_chat({**CHAT, **fields}), 10, model, 100, seed=1, bad_words=bad_words)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.req("SMP-18")
def test_bad_words_are_tokens_at_the_start_and_after_a_space(processor: PromptProcessor) -> None:
    tokenizer = processor.tokenizer

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    # "wheel" is several tokens at the start of a text and one after a space, "t" one and one.
    assert len(ids("wheel")) > 1 and len(ids(" wheel")) == 1
    assert bad_word_tokens(["wheel"], tokenizer) == (ids("wheel"),)
    assert bad_word_tokens([" t", "t"], tokenizer) == (ids("t"), ids(" t"))
    for words in (["t", " "], ["t", "水" * 40]):
        with pytest.raises(ApiError) as caught:
            bad_word_tokens(words, tokenizer)
        assert (caught.value.status, caught.value.param) == (400, "bad_words[1]")


def test_the_output_is_capped_by_the_context(model: ModelConfig) -> None:
    def limit(request: Any, prompt: int) -> int:
        return sampling_params(request, prompt, model, 100, seed=1).max_tokens

    assert limit(parse_chat(CHAT), 10) == 54
    assert limit(parse_completion(COMPLETION), 10) == 16
    assert limit(parse_completion(COMPLETION), 60) == 4
    assert limit(parse_chat({**CHAT, "max_completion_tokens": 5}), 10) == 5
    assert limit(parse_completion({**COMPLETION, "max_completion_tokens": 5, "max_tokens": 5}), 10) == 5
    assert limit(parse_completion({**COMPLETION, "max_completion_tokens": 5}), 10) == 5
    assert sampling_params(parse_chat(CHAT), 10, model, 100, seed=77).seed == 77


@pytest.mark.parametrize(
    ("length", "fields", "words"),
    [
        (64, {}, ["64 tokens"]),
        (60, {"max_tokens": 5}, ["60 tokens", "5 are asked for", "65 together", "context is 64"]),
        (60, {"max_completion_tokens": 5}, ["65 together"]),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_with_the_arithmetic(length: int, fields: dict, words: list[str]) -> None:
    param = next(iter(fields), "messages")
    with pytest.raises(ApiError) as caught:
        check_prompts([[7] * length], parse_chat({**CHAT, **fields}), 64)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", param)
    assert all(word in caught.value.message for word in words)
    check_prompts([[7] * (length - 1)], parse_chat({**CHAT, **fields}), 64)


def test_choices_are_bounded_and_stop_tokens_are_of_the_vocabulary(model: ModelConfig) -> None:
    with pytest.raises(ApiError) as caught:
        check_prompts([[1]] * 65, parse_completion({**COMPLETION, "n": 2}), 64)
    assert caught.value.param == "prompt"
    with pytest.raises(ApiError) as caught:
        sampling_params(parse_chat({**CHAT, "stop_token_ids": [100]}), 10, model, 100, seed=1)
    assert caught.value.param == "stop_token_ids"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a": NaN}', b'{"a":"\\ud800"}', b"[" * 10**5]
)
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(data)
    assert caught.value.status == 400


def test_an_error_quotes_no_more_of_a_body_than_people_read() -> None:
    name = "k" * 10**6
    with pytest.raises(ApiError) as caught:
        parse_chat({**CHAT, name: 1})
    assert caught.value.message.startswith("there is no parameter kkk") and len(caught.value.body()) < 3000
    assert caught.value.param and caught.value.param.startswith("kkk")


@pytest.fixture(scope="module")
def processor(tokenizer_files: Path) -> PromptProcessor:
    bundle = PromptBundle.from_checkpoint(tokenizer_files, served_names=("m",), block_size=4, hash_seed="", max_model_len=64)
    return PromptProcessor(bundle)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "x"]) | values, "content": values}, optional={"name": values}
    ),
    max_size=2,
)


def bodies(kind: type, prompts: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The right fields with values of any kind; `model` is a string."""
    fields = {name: values for name in kind.__struct_fields__ if name != "model"}
    return st.fixed_dictionaries({"model": st.just("m")}, optional=fields | prompts)


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_no_body_is_an_error_of_ours(path: str, data: st.DataObject, model: ModelConfig, processor: PromptProcessor) -> None:
    chat = path == CHAT_PATH
    strategy = bodies(ChatRequest, {"messages": messages}) if chat else bodies(CompletionRequest, {"prompt": values})
    body = data.draw(strategy)
    try:
        request = parse_chat(body) if chat else parse_completion(body)
        prompts = processor.tokens_of(path, body)
        check_prompts(prompts, request, 64)
        words = bad_word_tokens(request.bad_words, processor.tokenizer)
        for prompt in prompts:
            params = sampling_params(request, len(prompt), model, processor.vocab_size, 1, words)
            assert 1 <= params.max_tokens <= 64 - len(prompt)
    except ApiError as error:
        assert error.status == 400 and error.param
    except PromptError as error:
        assert error.param
