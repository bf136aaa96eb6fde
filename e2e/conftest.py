"""One cluster for all tests of a session; each test may have a Kubernetes namespace of its own in it."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from e2e.cluster.cluster import REPOSITORY, Cluster, running
from e2e.cluster.commands import TestbedError
from e2e.cluster.phases import Phases
from e2e.system import System, install

Write = Callable[[str], None]


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Write:
    """Writes a line to the terminal at once, past pytest's capture: what takes long shows its progress. Where several clusters
    stand side by side, each line says whose it is."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    assert capture and (reporter or worker)

    def write(line: str) -> None:
        with capture.global_and_fixture_disabled():
            if worker is not None:
                print(f"\n{worker}: {line}", end="", file=sys.stderr, flush=True)
                return
            reporter.ensure_newline()
            reporter.write_line(line)

    return write


@pytest.fixture(scope="session")
def phases(report: Write) -> Phases:
    """Reports what each phase took."""
    return Phases(report)


@pytest.fixture(scope="session")
def terminates_in_order() -> Iterator[None]:
    """SIGTERM, as from a CI job that is cancelled, ends the session as Ctrl-C does: with everything torn down."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, report: Write, phases: Phases, terminates_in_order: None) -> Iterator[Cluster]:
    """A control plane that knows our CRDs and two nodes, node-1 with eight GPUs. The tests are in its network from here on."""
    crds = sorted(REPOSITORY.glob("manifests/crds/*.yaml"))
    try:
        with running(f"penstock-e2e-{os.getpid()}", crds, phases) as cluster, pytest.MonkeyPatch.context() as patch:
            for name, value in cluster.environment.items():
                patch.setenv(name, value)
            yield cluster
            if request.session.testsfailed:
                for name, tail in cluster.log_tails():
                    report(f"---- {name}\n{tail}")
                report(f"the whole logs stay in {cluster.processes.logs}")
        if not request.session.testsfailed:
            shutil.rmtree(cluster.state)
    except TestbedError as problem:
        pytest.exit(str(problem), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture(scope="session")
def system(cluster: Cluster, phases: Phases) -> System:
    """Penstock installed in it: operator, gateway and Envoy."""
    return install(cluster, phases)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A Kubernetes namespace for one test; it goes with all that is in it."""
    name = f"test-{uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    # A namespace begins to go 5 s after its deletion: a test need wait only for what uses the nodes.
    cluster.kubectl("delete", "deployments,jobs,pods", "--all", f"--namespace={name}")
    cluster.kubectl("delete", "namespace", name, "--wait=false")
