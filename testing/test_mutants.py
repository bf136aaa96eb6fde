"""`make mutants`: which faults it makes, what it counts, and that its lists name what exists."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import mutants  # noqa: E402

pytestmark = pytest.mark.slow

CODE = """from dataclasses import dataclass

def larger(a: int | None, *, b: int) -> bool:
    return a is not None and a > b

@dataclass(frozen=True)
class Pair:
    one: int
"""
TESTS = "from code_to_test import larger\n\ndef test_larger():\n    assert larger(3, b=2) and not larger(2, b=3)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "code_to_test.py").write_text(CODE)
    (tmp_path / "test_code.py").write_text(TESTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_seed_draws_the_same_order_and_no_mutant_is_one_that_types_or_the_linter_hold(folder: Path) -> None:
    drawn = mutants.mutations(["code_to_test.py"], "1 a")
    assert drawn == mutants.mutations(["code_to_test.py"], "1 a")
    assert drawn != mutants.mutations(["code_to_test.py"], "2 a")
    assert not {it.operator_name for it in drawn} & mutants.SAME_COMPARISONS
    assert {it.start_pos[0] for it in drawn} == {4}


def test_a_fault_that_a_test_notices_is_killed_and_another_survives(folder: Path) -> None:
    drawn = {
        it.operator_name.removeprefix("core/ReplaceComparisonOperator_"): it for it in mutants.mutations(["code_to_test.py"], "")
    }
    score = mutants.Score(mutants.CORES[0], 2)
    for name in ("Gt_Lt", "Gt_GtE"):
        mutants.count(score, mutants.attempt(drawn[name], ["test_code.py"], 60), {})
    survivor = {
        "file": "code_to_test.py",
        "line": 4,
        "was": "return a is not None and a > b",
        "now": "return a is not None and a >= b",
    }
    assert (score.killed, score.survivors, score.row()["score"]) == (1, [survivor], 0.5)
    assert (folder / "code_to_test.py").read_text() == CODE


def test_an_equivalent_mutant_that_survives_does_not_count(folder: Path) -> None:
    (mutation, *_) = mutants.mutations(["code_to_test.py"], "")
    score = mutants.Score(mutants.CORES[0], 1)
    mutants.count(score, mutants.Outcome(mutation, False, "a", "b"), {("code_to_test.py", "b"): "the same"})
    assert score.tried == 0


def test_tests_that_fail_without_a_fault_end_the_run(folder: Path) -> None:
    (folder / "test_code.py").write_text("def test_wrong():\n    assert False\n")
    with pytest.raises(RuntimeError, match="fail without a mutant"):
        mutants.baseline(["test_code.py"])


def test_cores_take_turns() -> None:
    first, second = (mutants.Score(core, 0) for core in mutants.CORES[:2])
    assert list(mutants.turns([(first, [1, 2, 3]), (second, [7])])) == [(first, 1), (second, 7), (first, 2), (first, 3)]


def test_every_pattern_matches_and_no_equivalent_mutant_is_stale() -> None:
    for core in mutants.CORES:
        assert mutants.files(core.sources) and mutants.files(core.tests)
    mutants.equivalent()
