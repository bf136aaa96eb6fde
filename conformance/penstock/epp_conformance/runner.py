"""Runs checks: each bounded in time, none able to break another, every result kept."""

import asyncio
import enum
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import grpc

from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import Check, Group
from penstock.epp_conformance.verdict import Failed, NotApplicable

CHECK_LIMIT_S = 60.0
"""Beyond the limits of single answers: a check that takes this long has failed."""


class Outcome(enum.StrEnum):
    """What came of a check."""

    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "n/a"


@dataclass(frozen=True)
class Result:
    """One check, made."""

    group: str
    check: Check
    outcome: Outcome
    detail: str
    """Why it failed, or cannot be made; empty where it passed."""
    seconds: float


def selected(groups: Sequence[Group], only: Sequence[str], skip: Sequence[str]) -> list[tuple[Group, Check]]:
    """The checks whose names, or whose groups' names, match `only` and not `skip` (shell patterns).

    Raises:
        ValueError: a pattern matches nothing, which is a mistake in its spelling.
    """
    every = [(group, check) for group in groups for check in group.checks]
    for pattern in (*only, *skip):
        if not any(_matches(group, check, [pattern]) for group, check in every):
            raise ValueError(f"no check and no group is called {pattern!r}; --list shows them")
    return [
        (group, check)
        for group, check in every
        if (not only or _matches(group, check, only)) and not _matches(group, check, skip)
    ]


def _matches(group: Group, check: Check, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in (group.name, check.name) for pattern in patterns)


async def run(checks: Sequence[tuple[Group, Check]], bench: Bench, at_once: int = 1) -> AsyncIterator[Result]:
    """Makes the checks, `at_once` of them where their group allows it; yields the results in order."""
    places = asyncio.Semaphore(at_once)

    async def one(group: Group, check: Check) -> Result:
        async with places:
            return await _made(group, check, bench)

    ahead = {check.name: asyncio.create_task(one(group, check)) for group, check in checks if not group.alone}
    try:
        for group, check in checks:
            yield await ahead[check.name] if check.name in ahead else await _made(group, check, bench)
    finally:
        for task in ahead.values():
            task.cancel()
        await asyncio.gather(*ahead.values(), return_exceptions=True)


async def _made(group: Group, check: Check, bench: Bench) -> Result:
    began = time.monotonic()
    outcome, detail = Outcome.PASS, ""
    try:
        async with asyncio.timeout(CHECK_LIMIT_S):
            await check.run(bench)
    except Failed as failed:
        outcome, detail = Outcome.FAIL, str(failed)
    except NotApplicable as why:
        outcome, detail = Outcome.NOT_APPLICABLE, str(why)
    except TimeoutError:
        outcome, detail = Outcome.FAIL, f"not over after {CHECK_LIMIT_S:g} s"
    except (grpc.aio.AioRpcError, OSError) as error:
        outcome, detail = Outcome.FAIL, f"the connection failed: {error!r}"
    except Exception as error:  # noqa: BLE001 - whatever a strange answer leads to is that picker's result, not the suite's end
        outcome, detail = Outcome.FAIL, f"the check could not make sense of an answer: {error!r}"
    return Result(group.name, check, outcome, detail, time.monotonic() - began)
