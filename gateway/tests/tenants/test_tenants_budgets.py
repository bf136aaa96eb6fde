"""Budgets and accounts in virtual time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.tenants.account import Account, OverBudget
from penstock.gateway.tenants.budget import Bucket
from penstock.gateway.tenants.tenant import Limits


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 400)), min_size=1, max_size=120), st.integers(1, 300))
@settings(max_examples=60)
def test_no_more_goes_than_flows_in_a_minutes_worth_and_one_request(steps: list[tuple[float, int]], per_minute: int) -> None:
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0
    for pause, amount in steps:
        now += pause
        if bucket.wait_s(now) == 0:
            bucket.take(amount, now)
            taken += amount
        assert taken <= per_minute + now * per_minute / 60 + 400


@given(st.integers(1, 1000), st.integers(1, 5000))
def test_after_the_wait_there_is_something_and_not_long_before(per_minute: int, amount: int) -> None:
    bucket = Bucket(per_minute, 0.0)
    bucket.take(amount, 0.0)
    wait = bucket.wait_s(0.0)
    assert Bucket(per_minute, 0.0).wait_s(0.0) == 0
    if wait:
        assert bucket.wait_s(wait * 0.99) > 0
        assert bucket.wait_s(wait + 0.001) == 0


def test_each_limit_refuses_by_name_and_says_when() -> None:
    account = Account(Limits(max_concurrent=2, requests_per_minute=4, tokens_per_minute=600), 0.0)
    account.open(10, 0.0)
    account.open(10, 0.0)
    with pytest.raises(OverBudget, match="max_concurrent"):
        account.open(10, 0.0)
    account.close(8.0)
    account.close(8.0)
    account.open(10, 0.0)
    account.open(10, 0.0)
    with pytest.raises(OverBudget) as over:
        account.open(1, 0.0)
    assert (over.value.what, over.value.retry_after_s) == ("max_concurrent", 4)  # two run, each for about 8 s
    account.close(8.0)
    with pytest.raises(OverBudget) as over:
        account.open(1, 0.0)
    assert (over.value.what, over.value.limit, over.value.retry_after_s) == ("requests_per_minute", 4, 15)
    account.spend(1100, 15.0)  # the answers were long
    with pytest.raises(OverBudget) as over:
        account.open(1, 15.0)
    assert (over.value.what, over.value.retry_after_s) == ("tokens_per_minute", 51)  # 501 owed, paid at 10 a second
    account.open(1, 15.0 + over.value.retry_after_s)


def test_what_was_not_served_is_given_back_and_a_new_limit_takes_nothing_away() -> None:
    account = Account(Limits(requests_per_minute=1, tokens_per_minute=60), 0.0)
    account.open(50, 0.0)
    account.void(50, 0.0)
    assert account.running == 0
    account.open(50, 0.0)
    account.limit(Limits(requests_per_minute=2), 0.0)
    with pytest.raises(OverBudget, match="requests_per_minute"):
        account.open(1, 0.0)
    account.limit(Limits(), 0.0)
    account.open(10**6, 0.0)
    assert account.running == 2
