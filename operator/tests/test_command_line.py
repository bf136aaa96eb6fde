"""How commands end that go to an API server."""

from pathlib import Path

import aiohttp
import pytest
from kubernetes.aio.client import ApiException

from penstock.kube.errors import NoApiServer
from penstock.operator import cli, explain
from penstock.operator.command_line import CommandFailed, run
from penstock.operator.kubectl import cli as plugin
from penstock.operator.rollout.cli import rollout


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (None, 0, ""),
        (CommandFailed("there is no such model"), 1, "penstock x: there is no such model\n"),
        (
            ApiException(status=403, body='{"message": "no pods"}'),
            1,
            "penstock x: the API server says: no pods\n",
        ),
        (aiohttp.ClientConnectionError("refused"), 1, "penstock x: refused\n"),
        (TimeoutError(), 1, "penstock x: the API server does not answer\n"),
        (NoApiServer("looked here"), 2, "penstock x: no API server to go to; see --kubeconfig: looked here\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_each_ending_has_a_sentence_and_a_code(
    error: BaseException | None, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def command() -> None:
        if error is not None:
            raise error

    assert run("penstock x", command) == code
    assert capsys.readouterr().err == words


def test_a_bug_is_not_taken_for_one() -> None:
    async def command() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        run("penstock x", command)


def test_all_commands_end_alike_where_there_is_no_api_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = f"--kubeconfig={tmp_path / 'none'}"
    for command, words in (
        (explain.main, ["m"]),
        (rollout, ["history", "m"]),
        (plugin.status, []),
        (cli.operator, []),
    ):
        assert command([*words, where]) == 2
        assert ": no API server to go to; see --kubeconfig: looked for " in capsys.readouterr().err
