"""What the InferenceModel's API says that engines have."""

from typing import get_args

from penstock.api.resources.support import WEIGHTS
from penstock.engine.quant.scheme import QuantizationName


def test_the_api_knows_the_engines_schemes():
    assert get_args(QuantizationName) == WEIGHTS
