"""What is asked of speculative decoding: vLLM's keys, defaults, and errors by name."""

import pytest

from penstock.engine.config import ConfigError, SpeculativeConfig
from penstock.engine.spec.settings import speculative_config


def test_nothing_asked_is_no_drafts():
    assert speculative_config(None, None, None) is None
    assert speculative_config({}, None, None) is None


@pytest.mark.req("SD-18")
def test_vllms_keys():
    asked = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=5)
    assert speculative_config(asked, None, None) == expected


@pytest.mark.parametrize("given", ["prompt_lookup_min", "prompt_lookup_max"])
def test_one_bound_is_the_other_too(given):
    found = speculative_config({"method": "ngram", given: 3}, None, None)
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == (3, 3)


def test_flags_of_their_own():
    assert speculative_config(None, "suffix", 7) == SpeculativeConfig(method="suffix", num_speculative_tokens=7)
    assert speculative_config(None, "auto", None).method == "suffix"


@pytest.mark.parametrize(
    ("config", "method", "tokens", "words"),
    [
        ({"num_speculative_tokens": 4}, None, None, "method is missing: ngram, suffix, draft_model, eagle, eagle3, mtp or auto"),
        (
            {"method": "ngam"},
            None,
            None,
            "there is no method 'ngam' (ngram, suffix, draft_model, eagle, eagle3, mtp, auto); did you mean ngram?",
        ),
        ({"method": "ngram", "num_speculative_token": 4}, None, None, "did you mean num_speculative_tokens?"),
        ({"method": "ngram", "num_speculative_tokens": 33}, None, None, "num_speculative_tokens: must be at most 32"),
        ({"method": "medusa"}, None, None, "the method medusa is not served yet"),
        ({"method": "draft_model"}, None, None, "the method draft_model needs model"),
        ({"method": "ngram", "model": "org/draft"}, None, None, "model is for draft_model, eagle, eagle3, not for ngram"),
        ({"method": "medusa", "model": "org/draft"}, None, None, "the method medusa is not served yet"),
        ({"method": "eagle3"}, None, None, "the method eagle3 needs model"),
        ({"model": "/no/such/folder"}, None, None, "draft model '/no/such/folder'"),
        ({"method": "draft_model", "draft_sample_method": "best"}, None, None, "draft_sample_method"),
        ({"method": "ngram"}, "ngram", None, "--spec-method and method in --speculative-config exclude each other"),
        ({"method": "ngram", "num_speculative_tokens": 2}, None, 2, "--spec-tokens and num_speculative_tokens in"),
        ({"method": "suffix", "prompt_lookup_max": 3}, None, None, "prompt_lookup_max is for the method ngram, not for suffix"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, None, None, "min 4 is above prompt_lookup_max 3"),
    ],
)
def test_what_cannot_be_is_refused_by_name(config, method, tokens, words):
    with pytest.raises(ConfigError) as error:
        speculative_config(config, method, tokens)
    assert words in str(error.value)
