"""What every test shares: torch computes in one thread, as an engine does, slowness is no failure, and chance decides nothing.

Results are bit-stable for one number of threads only, and on a busy two-core machine a second thread costs more than it gives.
"""

import datetime
import gc
import ipaddress
import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests run beside others on few cores: slowness there says nothing about the code. And a change is judged by the same examples
# each time, so that nobody's change fails by what another's might have; `--hypothesis-profile=explore` looks for new ones.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("same", unhurried, derandomize=True, max_examples=40)
settings.register_profile("explore", unhurried)
settings.load_profile("same")

# Before anything imports torch; processes that a test starts inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

# As in the Makefile: hundreds of processes would each compile torch's modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


LONGEST = frozenset(
    f"test_{name}.py"
    for name in (
        "distribution",
        "images",
        "aot",
        "cpu_aarch64",
        "kv_transfer_e2e",
        "masked_distribution",
        "device_graphs",
        "device_proposes",
        "data_parallel",
        "warm",
    )
)
"""Files that take minutes. They come first, so that nobody waits for one of them at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return three workers for two cores: many tests wait for a process or a clock."""
    return (3 * (os.cpu_count() or 1) + 1) // 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Return what `--dist loadfile` does, without two faults of xdist 3.8.

    A worker begins a test only when it knows the next one, or that there is none, and it is told so when a test ends. One that
    takes over from a worker that died, and gets an empty file or one test first, is never told and waits for ever. And one that
    has not yet collected the tests cannot be given any.
    """
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class TakingOver(LoadFileScheduling):
        def _reschedule(self, node) -> None:
            if node not in self.registered_collections:
                return
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
                super()._reschedule(node)

    return TakingOver(config, log)


FOR_DEVICES = ("gpu", "compiled", "gpu or compiled")
"""What to run on a CUDA device: nothing else, so that nothing is interpreted."""


def pytest_configure(config: pytest.Config) -> None:
    """Has Triton's kernels interpreted where there is no CUDA device to compile them for: they are decorated for one or other."""
    if config.option.markexpr not in FOR_DEVICES and not Path("/dev/nvidiactl").exists():
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish() -> None:
    """Lets no garbage collection walk through the modules and the tests again: it takes half a second."""
    gc.collect()
    gc.freeze()


CRASHED = pytest.StashKey[list[str]]()
"""The tests that workers died of."""


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched) -> None:
    """Notes a test that a worker died of: pytest forgets it if another worker, which takes over, passes it."""
    sched.config.stash.setdefault(CRASHED, []).append(crashitem)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keeps how the run ended: only when every test was run are its failures all that is left to try (.ci/run)."""
    cache = getattr(session.config, "cache", None)  # none with "-p no:cacheprovider"
    if cache is None or hasattr(session.config, "workerinput"):
        return
    distributed = session.config.pluginmanager.getplugin("dsession")
    if distributed is not None and distributed.sched is not None and distributed.sched.has_pending:
        exitstatus = pytest.ExitCode.INTERRUPTED  # too many workers died; pytest itself calls that failed tests
    cache.set("penstock/exitstatus", int(exitstatus))
    if crashed := session.config.stash.get(CRASHED, []):
        cache.set("cache/lastfailed", {**cache.get("cache/lastfailed", {}), **dict.fromkeys(crashed, True)})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every test draws the same numbers, whichever ran before it."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what launches kernels and has them compiled in this run; skips by name what needs a CUDA device where there is none;
    leaves out what is for production alone, unless it is asked for; begins with the longest files."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if "production" not in config.option.markexpr:
        late = [item for item in items if item.get_closest_marker("production")]
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if item not in late]
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if "triton_device" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("gpu"):
                item.add_marker("compiled")
    on_gpu = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("compiled")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"{item.name} needs a CUDA device"))


class Authority:
    """Signs certificates, and mounts them as Kubernetes mounts a Secret of cert-manager's: `ca.crt`, `tls.crt`, `tls.key`."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = ec.generate_private_key(ec.SECP256R1())
        self._own = self._certificate("authority", self._key.public_key(), ca=True)

    def mount(self, folder: Path, version: str = "one", name: str = "replica") -> Path:
        """A new certificate for `name` and 127.0.0.1, for servers and clients, in place of what the folder holds."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        encoding = serialization.Encoding.PEM
        private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        contents = {"tls.crt": self._certificate(name, key.public_key()).public_bytes(encoding), "tls.key": private}
        contents["ca.crt"] = self._own.public_bytes(encoding)
        (folder / version).mkdir(parents=True)
        for file, content in contents.items():
            (folder / version / file).write_bytes(content)
            if not (folder / file).is_symlink():
                (folder / file).symlink_to(f"..data/{file}")
        (folder / "..next").symlink_to(version)
        (folder / "..next").replace(folder / "..data")
        return folder

    def _certificate(self, name, public, ca=False):
        from cryptography import x509
        from cryptography.hazmat.primitives.hashes import SHA256

        day, now = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC)
        own = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
        names = x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = x509.CertificateBuilder().subject_name(own).issuer_name(issuer).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - day).not_valid_after(now + day)
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        uses = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False)
        usage = x509.KeyUsage(digital_signature=True, key_cert_sign=ca, encipher_only=False, decipher_only=False, **uses)
        builder = builder.add_extension(usage, critical=True)  # Python 3.13 refuses an authority without
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return builder.add_extension(signer, critical=False).add_extension(names, critical=False).sign(self._key, SHA256())


@pytest.fixture(scope="session")
def make_authority() -> type[Authority]:
    """`make_authority()` is one that nobody knows yet."""
    return Authority
