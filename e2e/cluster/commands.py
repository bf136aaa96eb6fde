"""Runs the small programs that the testbed stands on, and says which of them are missing."""

import os
import shutil
import subprocess
from pathlib import Path

# Debian's names, so that the message can be pasted after `apt-get install`.
PACKAGE_OF = {
    "chroot": "coreutils",
    "ip": "iproute2",
    "mount": "mount",
    "nft": "nftables",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "unshare": "util-linux",
}


class CommandError(Exception):
    """A command ended with a non-zero code; the message holds what it said."""


class TestbedError(Exception):
    """The testbed cannot work here; the message says what to do about it."""

    __test__ = False  # pytest would take the name for a test class


def run(*argv: str | Path, stdin: str | None = None, env: dict[str, str] | None = None, timeout: float = 125) -> str:
    """The standard output of a command. Raises CommandError with its standard error when it fails or takes too long."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(words, input=stdin or "", env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as late:
        raise CommandError(f"{' '.join(words)}: not done after {timeout:g} s") from late
    if done.returncode:
        raise CommandError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def check_machine(state: Path) -> None:
    """Raises TestbedError unless this machine can hold a testbed with its state in that folder (which need not exist yet)."""
    if os.geteuid() != 0:
        raise TestbedError("the cluster tier needs root: it makes network and mount namespaces (try: sudo make e2e)")
    missing = sorted({package for program, package in PACKAGE_OF.items() if not shutil.which(program)})
    if missing:
        raise TestbedError(f"the cluster tier needs these Debian packages: apt-get install {' '.join(missing)}")
    try:
        run("unshare", "--net", "--mount", "nft", "list", "ruleset")
    except CommandError as problem:
        raise TestbedError(
            f"this machine lends no network namespaces with nftables (in a container: run it privileged): {problem}"
        ) from problem
    kind = run("stat", "--file-system", "--format=%T", state.parent).strip()
    if kind.startswith("overlay"):
        raise TestbedError(
            f"{state.parent} is on overlayfs, which cannot carry the pods' overlays: set TMPDIR to a folder that is not"
        )
