"""The kernel of linear layers: the first of a platform's list that can, and the reason for each that cannot."""

import logging
from typing import Any

import pytest
import torch

from penstock.engine.config import ConfigError
from penstock.engine.models.layers.linear_choice import DISABLED_VARIABLE, Candidate, LinearNeeds, choose_linear, linear_method
from penstock.engine.models.layers.linear_method import CPU, NativeLinearMethod, PrepackedLinearMethod, UnquantizedLinearMethod
from penstock.engine.models.layers.projection import LinearLayer, Projection
from penstock.engine.models.layers.shard import Span
from penstock.kernels.ops import REFERENCE, ops_for


def needs(capability: tuple[int, int] | None = (8, 0), dtype: torch.dtype = torch.bfloat16) -> LinearNeeds:
    return LinearNeeds(dtype, REFERENCE, 1, CPU if capability is None else torch.device("meta"), capability)


def fake(name: str, refusal: str | None = None, capability: tuple[int, int] | None = None) -> Candidate:
    return Candidate(name, lambda _: refusal, lambda _: name, capability)  # type: ignore[arg-type, return-value]


FAKES = {"cuda": (fake("new", capability=(9, 0)), fake("odd", "no odd shapes"), fake("plain")), "cpu": (fake("slow"),)}


@pytest.mark.req("Q-09", "Q-11")
@pytest.mark.parametrize(
    ("capability", "disabled", "chosen"),
    [
        ((9, 0), set(), "new"),
        ((10, 0), set(), "new"),
        ((8, 9), set(), "plain"),
        ((9, 0), {"new"}, "plain"),
        (None, {"new", "plain"}, "slow"),
    ],
)
def test_the_first_that_can_is_chosen(capability: Any, disabled: set[str], chosen: str) -> None:
    assert choose_linear(needs(capability), FAKES, disabled) == chosen


@pytest.mark.req("Q-09")
def test_where_none_can_every_reason_is_given() -> None:
    with pytest.raises(ConfigError) as refused:
        choose_linear(needs((8, 6)), FAKES, {"plain"})
    assert str(refused.value) == (
        "no kernel can multiply by weights in torch.bfloat16 here: new: needs compute capability 9.0, and the device has 8.6; "
        f"odd: no odd shapes; plain: {DISABLED_VARIABLE} names it"
    )


def test_a_name_that_no_kernel_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no linear kernel is called nwe \(there are new, odd, plain, slow\)"):
        choose_linear(needs(), FAKES, {"nwe"})


def test_weights_that_move_are_in_no_layout_that_only_a_library_knows(caplog) -> None:
    caplog.set_level(logging.INFO)
    assert linear_method(torch.float32, REFERENCE) is PrepackedLinearMethod
    assert linear_method(torch.float32, REFERENCE, moves=True) is UnquantizedLinearMethod
    assert "onednn: weights in its layout cannot move, as --enable-eplb has experts do" in caplog.text


def test_the_environment_takes_kernels_away(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    assert linear_method(torch.float32, REFERENCE) is PrepackedLinearMethod
    monkeypatch.setenv(DISABLED_VARIABLE, "onednn, native")
    assert linear_method(torch.float32, REFERENCE) is UnquantizedLinearMethod
    assert f"torch, slower at small batches (native: {DISABLED_VARIABLE} names it; onednn: {DISABLED_VARIABLE}" in caplog.text
    monkeypatch.setenv(DISABLED_VARIABLE, "onednn,torch")
    with pytest.raises(ConfigError, match=r"no compiled operations for this dtype; onednn: .*; torch: "):
        linear_method(torch.float32, REFERENCE)


@pytest.mark.req("Q-10")
def test_without_the_winner_the_next_one_computes_the_same(monkeypatch) -> None:
    layer = LinearLayer("x", (Projection("x", Span(96, 0, 96), Span(64, 0, 64), 0),), False, torch.float32)
    weight, x = torch.randn(64, 96), torch.randn(5, 96)
    found = []
    for disabled in ("", "native"):
        monkeypatch.setenv(DISABLED_VARIABLE, disabled)
        found.append(method := linear_method(torch.float32, ops_for("cpu", torch.float32))(layer))
        method.load(layer.projections[0], "weight", weight)
        method.finish()
    winner, next_one = found
    assert isinstance(winner, NativeLinearMethod) and isinstance(next_one, PrepackedLinearMethod)
    torch.testing.assert_close(winner.apply(x), next_one.apply(x), rtol=1e-5, atol=1e-5)
