"""Flags and keyword arguments are the same settings."""

from penstock.engine.args import EngineArgs
from penstock.engine.cli import _parser


def test_every_engine_flag_is_a_keyword_with_the_same_default() -> None:
    parsed = vars(_parser().parse_args(["m"]))
    names = set(EngineArgs.__struct_fields__)
    assert names <= set(parsed)
    assert EngineArgs(**{name: parsed[name] for name in names}) == EngineArgs(model="m")
    [group] = [group for group in _parser()._action_groups if group.title == "engine"]
    assert {action.dest for action in group._group_actions} <= names
