"""What somebody reads who brings another server's command line."""

import pytest

from penstock.engine.cli import _parser
from penstock.engine.foreign_flags import FOREIGN


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("m --tp-size 2 --context-length=4096", "--tp-size (use --tensor-parallel-size), --context-length (use --max-model-len)"),
        (
            "m --distributed-executor-backend mp",
            "--distributed-executor-backend (ranks are always processes of the engine's own; leave it out)",
        ),
        ("--model-path m", "--model-path (give the model first: penstock serve MODEL)"),
        ("--model m --port 8001", "--model (give the model first: penstock serve MODEL)"),
        ("m --mem_fraction_static 0.8", "--mem_fraction_static (use --gpu-memory-utilization)"),
        ("m --max_model_len 4096", "--max_model_len (did you mean --max-model-len?)"),
        ("m --max-num-seq 4", "--max-num-seq (did you mean --max-num-seqs?)"),
        ("m --colour red", "unrecognized arguments: --colour (penstock serve --help lists the flags)"),
        ("m --port x", "argument --port: 'x' is not a port"),
        ("", "the following arguments are required: MODEL"),
    ],
)
def test_a_flag_that_is_not_here_is_refused_in_one_line_with_the_nearest_of_ours(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _parser().parse_args(line.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said
    assert said.startswith("penstock serve: error: ") and said.count("\n") == 1, "no page of usage"


def test_advice_names_only_flags_that_exist_and_no_flag_of_ours_is_refused() -> None:
    known = _parser()._option_string_actions
    for name, advice in FOREIGN.items():
        assert name not in known
        assert {word.strip(",;:") for word in advice.split() if word.startswith("--")} <= set(known), (name, advice)


def test_values_that_begin_with_a_dash_are_no_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["m", "--seed", "-1"])
    assert "argument --seed: -1 is not at least 0" in capsys.readouterr().err
    assert _parser().parse_args(["m", "--served-model-name", "a", "b"]).served_model_name == ["a", "b"]
