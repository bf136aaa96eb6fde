"""What the commands that go to an API server share: the flags that say to which, and how they end where it is not there or says
no. Light to import: `penstock --help` loads this module."""

import argparse
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.kube.errors import NoApiServer


class CommandFailed(Exception):
    """What could not be done, and why."""


def add_server(parser: argparse.ArgumentParser, *, context: bool = True) -> None:
    """Flags that say which API server.

    Args:
        context: Whether a person runs the command, who may have several clusters in one file.
    """
    parser.add_argument("--kubeconfig", help="default: the pod's ServiceAccount, else kubectl's file")
    if context:
        parser.add_argument("--context", help="of the kubeconfig; default: its current one")


def add_namespace(parser: Any) -> None:
    """The flag that says where; `parser` may be a group of one."""
    parser.add_argument("-n", "--namespace", help="default: the present context's, or the pod's")


def nowhere(name: str, error: NoApiServer) -> int:
    """Says that no API server is configured; the exit code."""
    sys.stderr.write(f"{name}: no API server to go to; see --kubeconfig: {error}\n")
    return 2


def run(name: str, command: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Runs a person's command to its end. The exit code: 0; 1 where something could not be done, or the API server refuses or is
    silent; 2 where there is none to go to; 130 after Ctrl-C."""
    import asyncio
    import json

    import aiohttp
    from kubernetes.aio.client import ApiException

    from penstock.operator.api import said

    try:
        asyncio.run(command())
    except CommandFailed as error:
        why = str(error)
    except ApiException as error:
        why = f"the API server says: {said(error)}"
    except (TimeoutError, aiohttp.ClientError, json.JSONDecodeError) as error:
        why = str(error) or "the API server does not answer"
    except NoApiServer as error:
        return nowhere(name, error)
    except KeyboardInterrupt:
        return 130
    else:
        return 0
    sys.stderr.write(f"{name}: {why}\n")
    return 1
