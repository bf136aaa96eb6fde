"""The dispatcher: what it runs, lists and refuses."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from penstock import cli

CALLS: list[list[str]] = []


def hello(argv: list[str]) -> int:
    """Greets somebody.

    At length.
    """
    CALLS.append(argv)
    return 7


def entry(name: str, extra: str = "") -> EntryPoint:
    return EntryPoint(name, f"{__name__}:hello {extra}".strip(), cli.GROUP)


@pytest.fixture(autouse=True)
def installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image with the extra `here` and without the extra `away`."""
    points = EntryPoints([entry("plain"), entry("good", "[here]"), entry("bad", "[away]")])
    monkeypatch.setattr(cli, "entry_points", lambda group: points)
    monkeypatch.setattr(
        cli, "requires", lambda _: ["msgspec>=0", "pytest>=8; extra == 'here'", "no-such-package; extra == 'away'"]
    )


@pytest.mark.parametrize("name", ["plain", "good"])
def test_a_command_gets_the_rest_of_the_line_and_gives_the_exit_status(name: str) -> None:
    assert cli.main([name, "--to", "you"]) == 7
    assert CALLS.pop() == ["--to", "you"]


def test_help_lists_what_is_installed_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert "\n  good   Greets somebody.\n" in shown and "\n  plain  " in shown, "in columns, however long the names"
    assert "bad" not in shown


def test_a_command_whose_extra_is_missing_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bad"]) == 2
    assert "bad is part of penstock[away], which is not installed here (missing: no-such-package)" in capsys.readouterr().err


def test_an_unknown_command_is_named_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["frobnicate"]) == 2
    assert capsys.readouterr().err == "penstock: no command 'frobnicate'\npenstock --help lists the commands\n"
    assert cli.main(["goood"]) == 2
    assert "no command 'goood'; did you mean good?" in capsys.readouterr().err


def test_kubectls_plugin_calls_itself_as_people_call_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/kubectl-penstock"])
    assert cli.main() == 0
    assert capsys.readouterr().out.startswith("usage: kubectl penstock COMMAND")
