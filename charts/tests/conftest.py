"""What Helm makes of the chart."""

from pathlib import Path

import pytest
import yaml

from charts.tests.rendered_chart import CHART, Object, Render
from e2e.cluster.build import PROGRAMS, missing_programs
from e2e.cluster.helm import Helm


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm as the cluster tier builds it."""
    if missing_programs({name: PROGRAMS[name] for name in ("helm", "kubectl")}):
        pytest.skip("Helm and kubectl have not been built (make e2e-build)")
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """The objects that the chart makes of some values, as the release `penstock` in `penstock-system`."""
    known: dict[tuple[Path, str], str] = {}

    def objects(values: Object | None = None, chart: Path = CHART) -> list[Object]:
        written = yaml.safe_dump(values or {})
        if (chart, written) not in known:
            known[chart, written] = helm("template", "penstock", chart, "--namespace=penstock-system", values=written)
        return [it for it in yaml.safe_load_all(known[chart, written]) if it]

    return objects
