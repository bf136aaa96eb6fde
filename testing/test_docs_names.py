"""Files, flags with their defaults, and metrics that the documentation names are there."""

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[1]
HIDDEN = (".", "__")
"""How folders begin that hold nothing of ours, `.ci` aside: environments, caches."""


def walk(folder: Path) -> Iterator[str]:
    for one in folder.iterdir():
        if not one.is_dir():
            yield str(one.relative_to(ROOT))
        elif one.name == ".ci" or not one.name.startswith(HIDDEN):
            yield from walk(one)


FILES = list(walk(ROOT))
FOLDERS = {str(folder) for file in FILES for folder in Path(file).parents}
PAGES = [file for file in FILES if file.endswith(".md") and not file.startswith(("docs/requirements/", "CHANGELOG"))]
"""The requirements are words of others, the changelog's of their time."""
OTHERS_FLAGS = {  # that our own code passes to nobody
    "docker": {"--build-arg"},
    "helm": {"--create-namespace", "--reuse-values", "--set", "--take-ownership"},
    "kubectl": {"--for", "--force-conflicts", "--from-literal", "--previous", "--replicas", "--server-side", "--type"},
    "llama.cpp": {"--cache-ram"},
    "lmcache": {"--chunk-size", "--eviction-policy", "--l1-size-gb", "--shm-name", "--supported-transfer-mode", "--transport"},
    "mooncake": {"--global_segment_size", "--master_server_address", "--metadata_server", "--protocol", "--rpc_port"},
    "pip": {"--no-deps", "--no-index"},
    "pytest": {"--dist", "--hypothesis-profile"},
    "vLLM": {"--enable-ssl-refresh", "--ssl-cert-reqs", "--pipeline-parallel-size"},
}
OFF = ("off", "none")


class Asked(BaseException):
    """Instead of flags being read."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def spelled(text: str) -> Iterator[str]:
    """`a_{b,c}.py` is `a_b.py` and `a_c.py`; labels of metrics stay as they are."""
    if found := re.search(r"(?<=[/_.-])\{([\w/,-]+)\}", text):
        for one in found[1].split(","):
            yield from spelled(text[: found.start()] + one + text[found.end() :])
    else:
        yield text


def spans(page: str) -> Iterator[str]:
    for span in re.findall(r"`([^`\n]+)`", (ROOT / page).read_text()):
        yield from spelled(span)


def exists(path: str) -> bool:
    """A file or folder, or the end of one's path; words in capitals stand for any."""
    pattern = re.sub(r"\b[A-Z]{3,}\b", "*", path.rstrip("/"))
    return any(fnmatch(one, pattern) or fnmatch(one, f"*/{pattern}") for one in (*FILES, *FOLDERS))


@cache
def constants() -> set[str]:
    """Strings of the code, and metrics that are named within one."""
    found: set[str] = set()
    for file in FILES:
        if file.endswith(".py") and "/tests/" not in file and not file.startswith("testing/"):
            tree = ast.parse((ROOT / file).read_text())
            found |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found | {name for text in found for name in re.findall(r"\bpenstock_\w+", text)}


def defaults(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Each flag of any `penstock` command with its defaults there."""

    def ask(parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise Asked(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", ask)
    found: dict[str, list[Any]] = {}
    for entry in entry_points(group="penstock.commands"):
        with pytest.raises(Asked) as asked:
            entry.load()([])
        parsers = [asked.value.parser]
        for parser in parsers:
            for action in parser._actions:  # there is no public list
                if isinstance(action, argparse._SubParsersAction):
                    parsers += action.choices.values()
                for flag in action.option_strings:
                    found.setdefault(flag, []).append(action.default)
    return found


def rows(page: str) -> Iterator[tuple[str, str]]:
    """Flags and their defaults in tables of flags; where a row's flags are off without its first, that one alone."""
    for table in re.findall(r"^\| flag[^|]* \| default \|.*\n((?:\|.*\n)+)", (ROOT / page).read_text(), re.MULTILINE):
        for first, told in re.findall(r"^\| (.*?) \|(.*?)\|", table, re.MULTILINE):
            flags = [flag.replace("[no-]", "") for flag in re.findall(r"--(?:\[no-\])?[a-z][\w-]+", first)]
            yield from ((flag, told.strip()) for flag in (flags[:1] if told.strip() in OFF else flags))


def stands(told: str, truths: Sequence[Any]) -> bool | None:
    """Whether a default that is told is one command's; None where it is words."""
    if told in OFF:
        return any(not truth for truth in truths)
    if not re.search(r"[`\d]", told):
        return None
    values = [f"{it:g}" if type(it) is float else str(it) for it in truths if isinstance(it, int | float | str)]
    values = [{"True": "on", "False": "off"}.get(it, it).replace(version("penstock"), "VERSION") for it in values]
    values = [it for it in values if it and " " not in it]
    return any(re.search(rf"(?<![\w.]){re.escape(it)}(?![\w.])", told) for it in values) if values else None


def test_files_that_are_named_are_there() -> None:
    dead = [
        f"{page}: {span}"
        for page in PAGES
        for span in spans(page)
        if re.fullmatch(r"[\w./*-]+", span) and not span.endswith("__init__.py")  # which never are
        if span.endswith(".py") or ("/" in span and span.split("/")[0] in FOLDERS)
        if not exists(span)
    ]
    assert not dead


def test_flags_that_are_named_are_some_commands() -> None:
    known = constants().union(*OTHERS_FLAGS.values())
    dead = [
        f"{page}: {flag}"
        for page in PAGES
        for flag in sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w(?![\w-])", (ROOT / page).read_text())))
        if not {flag, flag.replace("--no-", "--", 1)} & known
    ]
    assert not dead


def test_tables_of_flags_have_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    known = defaults(monkeypatch)
    checked = [(page, flag, told, stands(told, known[flag])) for page in PAGES for flag, told in rows(page)]
    assert not [row for row in checked if row[-1] is False]
    assert len([row for row in checked if row[-1]]) > 60


def test_metrics_that_are_named_are_there() -> None:
    dead = [
        f"{page}: {name}"
        for page in PAGES
        for span in spans(page)
        for name in re.findall(r"\bpenstock_\w+", span)
        if not {name, re.sub(r"_(bucket|sum|count|total)$", "", name)} & constants()
    ]
    assert not dead
