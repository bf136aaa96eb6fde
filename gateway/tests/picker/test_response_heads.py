"""Heads of responses: who has answered, and whose word a load report is."""

import pytest
from prometheus_client import CollectorRegistry

from penstock.api import headers, load_report
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.extproc.call import ResponseHead, Routed
from penstock.gateway.extproc.stages.respond import Respond
from penstock.gateway.flow.control import DEFAULT_LIMITS
from penstock.gateway.flow.gate import FlowGate
from penstock.gateway.http.metrics import PickerMetrics
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.picker.bookings import Booking, State
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.state import FleetState

HOSTS = ("10.0.0.1", "FD00:0::1")
REPORT = LoadReport(epoch=5, seq=1, num_requests_running=3)
BIN = load_report.encode(REPORT, "BIN").removeprefix("BIN ")


class Site:
    """Two replicas, and a request that was sent to the first."""

    def __init__(self) -> None:
        self.state = FleetState()
        self.replicas = [
            Replica(uid=f"u{n}", name=f"r{n}", pool="p", host=host, port=8000, events_port=1, replay_port=1, ready=True)
            for n, host in enumerate(HOSTS)
        ]
        self.state.update(
            Fleet(models=[Model(id="m", served_names=["m"])], pools=[Pool(id="p", model="m")], replicas=self.replicas)
        )
        metrics = PickerMetrics(CollectorRegistry(), self.state.outcomes)
        self._respond = Respond(self.state, FlowGate(FleetFollower(self.state), DEFAULT_LIMITS), metrics)
        self.booking: Booking = self.state.bookings.book("r", key_of(self.replicas[0]), 1, 0.0)

    def responds(self, served: str | None, **fields: str) -> dict[str, str]:
        """Headers that the response gets."""
        routed = Routed(endpoints=[], pool=None, booking=self.booking, model="m", name="m", came=0.0)
        found = {":status": "200", **{name.replace("_", "-"): value for name, value in fields.items()}}
        return dict(self._respond.run(routed, ResponseHead(headers=found, served=served)))

    def heard(self) -> list[bool]:
        """Of which replica there is a report."""
        return [self.state.reports.get(key_of(replica)) is not None for replica in self.replicas]


@pytest.fixture
async def site() -> Site:
    return Site()


@pytest.mark.req("RT-05")
async def test_a_report_comes_in_the_header_of_grpcs_servers_too_which_goes_before_the_other(site: Site) -> None:
    site.responds("10.0.0.1:8000", endpoint_load_metrics_bin=BIN, endpoint_load_metrics="TEXT epoch=9,seq=9")
    heard = site.state.reports.get(key_of(site.replicas[0]))
    assert heard is not None and heard.report == REPORT


@pytest.mark.parametrize("served", ["[fd00::1]:8000", "[FD00:0:0::1]:8000", " [fd00::1]:8000"])
async def test_whoever_answered_is_found_however_its_address_is_written(site: Site, served: str) -> None:
    assert site.responds(served, endpoint_load_metrics_bin=BIN)[headers.REPLICA] == "u1"
    assert site.heard() == [False, True]


@pytest.mark.parametrize("served", ["10.0.0.9:8000", "10.0.0.1:9", "10.0.0.1", "somebody"])
async def test_the_word_of_a_stranger_is_not_taken_for_that_of_the_pick(site: Site, served: str) -> None:
    added = site.responds(served, endpoint_load_metrics_bin=BIN, **{":status": "503"})
    assert headers.REPLICA not in added and added[headers.MODEL] == "m"
    assert site.heard() == [False, False]
    assert not site.state.outliers.standing(key_of(site.replicas[0])).ejected_until > 0


@pytest.mark.parametrize("status", ["100", "103"])
async def test_what_comes_before_a_response_ends_no_request(site: Site, status: str) -> None:
    assert site.responds("10.0.0.1:8000", **{":status": status}) == {}
    assert site.booking.state is State.PENDING
    site.responds("10.0.0.1:8000")
    assert site.booking.state is not State.PENDING


def test_every_report_is_kept_from_clients() -> None:
    assert headers.LOADS == ("endpoint-load-metrics", "endpoint-load-metrics-bin")
