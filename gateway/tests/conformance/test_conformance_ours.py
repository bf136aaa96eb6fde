"""Our own picker, judged by the suite as `make conformance` does it."""

import pytest
from conformance_of_ours import judge

pytestmark = pytest.mark.slow


@pytest.mark.req("RT-41")
@pytest.mark.parametrize("front_end", ["grpc", "lean"])
def test_ours_keeps_all_of_it(front_end: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = judge(["--ext-proc", front_end], "--at-once", "8", "--skip", "envoy-original-dst", "--skip", "subset-bodyless")
    said = capsys.readouterr().out
    assert status == 0, said
    assert " 0 fail, 0 not applicable" in said


@pytest.mark.req("RT-41")
def test_ours_names_one_destination_where_a_gateway_takes_one(capsys: pytest.CaptureFixture[str]) -> None:
    status = judge(["--single-destination"], "--only", "envoy-original-dst", "--only", "envoy-forged-destination")
    said = capsys.readouterr().out
    assert status == 0, said
    assert "MUST: 1 pass, 0 fail, 0 not" in said and "SHOULD: 1 pass, 0 fail, 0 not" in said


def test_ours_speaks_tls_to_gateways_that_do_not_verify(capsys: pytest.CaptureFixture[str]) -> None:
    checks = ("duplex-pick", "duplex-body-1mb", "envoy-picked", "health-*")
    status = judge(["--tls-self-signed"], "--tls", *(flag for name in checks for flag in ("--only", name)))
    said = capsys.readouterr().out
    assert status == 0, said
    assert "0 not applicable" in said
