"""Where a container runs: a root of its own under overlayfs, the pod's volumes in it, and the script that goes there."""

import json
import shlex
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster import network
from e2e.cluster.kubelet.api import Object
from e2e.cluster.kubelet.inputs import Inputs, expand

# The API server's default; it is on the machine's own /dev, where nothing is to be left.
_UNSAID = "/dev/termination-log"
MESSAGE = "message"  # file below a container's `base`: what it wrote to its terminationMessagePath
# Each container has these of its own. (Where the machine is itself a container, they are mounted there.)
OWN_FILES = {Path("/etc/hosts"), Path("/etc/hostname"), Path("/etc/resolv.conf")}


class Addresses:
    """Pod addresses of one node, handed out in turn.

    One given out again at once would meet the old pod's ARP entries: up to 40 s of failing connections.
    """

    def __init__(self, prefix: str) -> None:
        """`prefix` is the node's /24, such as "10.244.1"; .1 is the node itself."""
        self.prefix = prefix
        self._used: dict[str, str] = {}
        self._last = 1
        self._lock = threading.Lock()

    def take(self, uid: str, wanted: str | None) -> str:
        """An address for that pod; the wanted one is what the pod had before this kubelet started."""
        with self._lock:
            address = wanted
            while address is None or (address in self._used.values() and not wanted):
                self._last = self._last + 1 if self._last < 254 else 2
                address = f"{self.prefix}.{self._last}"
            self._used[uid] = address
            return address

    def give_back(self, uid: str) -> None:
        with self._lock:
            self._used.pop(uid, None)


@dataclass
class Volumes:
    """The folders of a pod's volumes; a hostPath's folder is where its path gets mounted."""

    folder: Path
    host_paths: dict[str, Path] = field(default_factory=dict)

    def create(self, spec: Object, inputs: Inputs) -> None:
        """Raises ValueError or ApiError when an input is not there (yet); safe to repeat."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for volume in spec.get("volumes", []):
            target = self.folder / volume["name"]
            if "hostPath" in volume:
                self._prepare_host_path(volume["name"], volume["hostPath"])
            elif "persistentVolumeClaim" in volume:
                self._prepare_host_path(volume["name"], inputs.claimed(volume["persistentVolumeClaim"]["claimName"]))
            elif "emptyDir" in volume:
                target.mkdir(exist_ok=True)
            else:
                target.mkdir(exist_ok=True)
                for name, content in inputs.files({key: value for key, value in volume.items() if key != "name"}).items():
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    (target / name).write_bytes(content)

    def _prepare_host_path(self, name: str, host_path: Object) -> None:
        path = Path(host_path["path"])
        if host_path.get("type") == "DirectoryOrCreate":
            path.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            raise ValueError(f"hostPath {path} does not exist")
        if path.is_file():
            (self.folder / name).touch()
        else:
            (self.folder / name).mkdir(exist_ok=True)
        self.host_paths[name] = path


def program_of(image: str, programs: Path) -> list[str]:
    """What runs in place of an image whose container says no command: by the image's name without tag and digest, as the JSON
    file `programs` has it. Empty: none."""
    name = image.partition("@")[0]
    name = name.rpartition(":")[0] if ":" in name.rpartition("/")[2] else name
    known: dict[str, list[str]] = json.loads(programs.read_text()) if programs.exists() else {}
    return known.get(name, [])


def container_command(
    netns: str, base: Path, spec: Object, volumes: Volumes, inputs: Inputs, environment: dict[str, str], programs: Path
) -> list[str]:
    """The command that runs a container in the pod's network namespace, with its own root under `base` (made here).

    Each step replaces itself with the next, so that the container's first process has the id of what was started.
    """
    command = spec.get("command") or program_of(spec.get("image", ""), programs)
    argv = [expand(word, environment) for word in [*command, *spec.get("args", [])]]
    if not command and not argv:
        raise ValueError("no command: images are not run here, so every container must say what to run")
    root, upper, work = base / "root", base / "upper", base / "work"
    for folder in (root, upper / "etc", upper / ".volumes", work):
        folder.mkdir(parents=True)
    (base / MESSAGE).touch()
    base.chmod(0o755)
    (upper / "etc/hosts").write_text(_hosts(inputs))
    (upper / "etc/resolv.conf").write_text(_resolver(inputs.namespace))
    outside = [
        f"echo {shlex.quote(inputs.host_name)} >/proc/sys/kernel/hostname",
        f"mount -t overlay overlay -o lowerdir=/,upperdir={upper},workdir={work} {root}",
        *(f"mount --rbind {shlex.quote(str(point))} {root}{shlex.quote(str(point))}" for point in mount_points()),
        *(f"mount --rbind {shlex.quote(str(path))} {volumes.folder / name}" for name, path in volumes.host_paths.items()),
        *_message_mount(spec.get("terminationMessagePath", _UNSAID), base, root),
        f"mkdir -p {root}/.volumes",
        f"mount --rbind {volumes.folder} {root}/.volumes",
    ]
    mounts = spec.get("volumeMounts", [])
    inside = [line for mount in mounts for line in _volume_mount(mount, environment)]
    inside.append("umount -l /.volumes")
    if any(Path(mount["mountPath"]) in Path.cwd().parents for mount in mounts):
        inside = _kept(shlex.quote(str(Path.cwd())), inside)
    if spec.get("securityContext", {}).get("readOnlyRootFilesystem"):
        inside.append("mount -o remount,bind,ro /")
    # An image says where its processes run; here it is where the kubelet does: in the repository.
    inside.append(f'exec /usr/bin/env -C {shlex.quote(spec.get("workingDir", str(Path.cwd())))} "$@"')
    enter_root = f'exec {shutil.which("chroot")} {root} /bin/sh -ec {shlex.quote(chr(10).join(inside))} sh "$@"'
    script = "\n".join([*outside, enter_root])
    # Slave, not private: a network namespace that is unmounted on the machine must not live on in the mounts of other pods.
    unshare = ["unshare", "--mount", "--uts", "--propagation=slave"]
    return ["nsenter", f"--net=/run/netns/{netns}", *unshare, "/bin/sh", "-ec", script, "sh", *argv]


def mount_points() -> list[Path]:
    """What is mounted on the machine's root, outermost first only: an overlay of / shows none of it by itself."""
    found: list[Path] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(line.split()[4].encode().decode("unicode_escape"))  # spaces are written as \040
        if point != Path("/") and point.exists() and point not in OWN_FILES:
            found.append(point)
    outermost = [point for point in found if not any(other in point.parents for other in found)]
    return sorted(set(outermost))


def _hosts(inputs: Inputs) -> str:
    lines = ["127.0.0.1 localhost", f"{inputs.address} {inputs.host_name}"]
    lines += [f"{alias['ip']} {' '.join(alias['hostnames'])}" for alias in inputs.pod["spec"].get("hostAliases", [])]
    return "\n".join(lines) + "\n"


def _resolver(namespace: str) -> str:
    domains = [f"{namespace}.svc.cluster.local", "svc.cluster.local", "cluster.local"]
    return f"nameserver {network.GATEWAY}\nsearch {' '.join(domains)}\noptions ndots:5\n"


def _kept(folder: str, lines: list[str]) -> list[str]:
    """Shell lines with the repository where it was after them: a volume at /tmp, say, hides one that was cloned there."""
    aside = "/.repository"
    before = [f"mkdir -p {aside}", f"mount --rbind {folder} {aside}"]
    return [*before, *lines, f"mkdir -p {folder}", f"mount --rbind {aside} {folder}", f"umount -l {aside}"]


def _message_mount(path: str, base: Path, root: Path) -> list[str]:
    """Shell lines that put the file for the termination message where the container writes it."""
    if path == _UNSAID:
        return []
    target = shlex.quote(f"{root}{path}")
    return [f"mkdir -p $(dirname {target})", f"touch {target}", f"mount --bind {base / MESSAGE} {target}"]


def _volume_mount(mount: Object, environment: dict[str, str]) -> list[str]:
    """Shell lines that bind a volume, from the container's own root."""
    sub_path = expand(mount.get("subPathExpr", mount.get("subPath", "")), environment)
    source = shlex.quote(str(Path("/.volumes", mount["name"], sub_path)))
    target = shlex.quote(mount["mountPath"])
    place = f"if [ -f {source} ]; then mkdir -p $(dirname {target}); touch {target}; else mkdir -p {source} {target}; fi"
    bind = f"mount --rbind {source} {target}" + (f" && mount -o remount,bind,ro {target}" if mount.get("readOnly") else "")
    return [place, bind]
