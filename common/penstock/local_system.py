"""How commands find what `penstock up` serves on this machine: a state file for each running system, in the user's own folder."""

import os
from pathlib import Path

import msgspec


class LocalSystem(msgspec.Struct, frozen=True, kw_only=True):
    """One system of `penstock up`."""

    pid: int
    born: str
    """When the process began, as the kernel counts: another process may get the same number."""
    url: str
    """What clients use."""
    gateway: str
    """The gateway's HTTP address."""
    own: str
    """URL of `penstock up` itself, with `/metrics` and `/models`."""
    sources: dict[str, str]
    """The source of each model by served name, in the order of the file."""


def state_folder() -> Path:
    """Return the folder of the state files: the user's runtime folder, else the user's cache."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "penstock"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "local"


def announce(url: str, gateway: str, own: str, sources: dict[str, str]) -> Path:
    """Writes this process's state file; remove it at the end."""
    folder, pid = state_folder(), os.getpid()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    system = LocalSystem(pid=pid, born=_born(pid) or "", url=url, gateway=gateway, own=own, sources=sources)
    path = folder / f"{pid}.json"
    scratch = path.with_suffix(".part")
    scratch.write_bytes(msgspec.json.encode(system))
    scratch.replace(path)
    return path


def running() -> LocalSystem | None:
    """The system that was started last and still runs. Files of those that were killed are removed."""
    found: list[tuple[float, LocalSystem]] = []
    for path in state_folder().glob("*.json"):
        try:
            system, written = msgspec.json.decode(path.read_bytes(), type=LocalSystem), path.stat().st_mtime
        except FileNotFoundError:  # it has just ended
            continue
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}: not a state file of penstock up: {error}") from None
        if _born(system.pid) == system.born:
            found.append((written, system))
        else:
            path.unlink(missing_ok=True)
    return max(found, key=lambda it: it[0])[1] if found else None


def _born(pid: int) -> str | None:
    """When a process began; None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[19]  # field 22, after the name, which may hold anything
