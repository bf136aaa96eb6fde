"""Flags and keyword arguments are the same settings."""

from pathlib import Path

import pytest

from penstock.engine.args import EngineArgs
from penstock.engine.cli import _parser


def test_every_engine_flag_is_a_keyword_with_the_same_default() -> None:
    parsed = vars(_parser().parse_args(["m"]))
    names = set(EngineArgs.__struct_fields__)
    assert names <= set(parsed)
    assert EngineArgs(**{name: parsed[name] for name in names}) == EngineArgs(model="m")
    [group] = [group for group in _parser()._action_groups if group.title == "engine"]
    assert {action.dest for action in group._group_actions} <= names


@pytest.mark.parametrize(("flags", "depth"), [([], 1), (["--async-scheduling"], 2), (["--no-async-scheduling"], 1)])
def test_async_scheduling_is_a_depth(flags: list[str], depth: int) -> None:
    model = Path(__file__).parents[3] / "examples/models/penstock-tiny"
    parsed = vars(_parser().parse_args([str(model), *flags]))
    assert EngineArgs(**{name: parsed[name] for name in EngineArgs.__struct_fields__}).config().depth == depth


def test_tenants_weights_are_positive_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert _parser().parse_args(["m", "--tenant-weights", "a=2,b=0.5"]).tenant_weights == {"a": 2.0, "b": 0.5}
    for wrong in ("a", "a=0", "=1", "a=much"):
        with pytest.raises(SystemExit):
            _parser().parse_args(["m", "--tenant-weights", wrong])
        assert f"'{wrong}' is not NAME=WEIGHT" in capsys.readouterr().err
