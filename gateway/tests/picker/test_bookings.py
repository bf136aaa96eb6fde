"""Bookings: what counts, until when, and that a lost end distorts nothing."""

import random

import pytest

from penstock.gateway.picker.bookings import EXPIRY_S, Bookings, State
from penstock.gateway.picker.candidates import Booked, ReplicaKey
from penstock.gateway.picker.state import FleetState

pytestmark = pytest.mark.usefixtures("in_python_and_compiled")

A, B = ReplicaKey("a", 8000), ReplicaKey("b", 8000)


def empty() -> Bookings:
    return FleetState().bookings


def test_a_booking_counts_until_a_report_includes_it() -> None:
    bookings = empty()
    booking = bookings.book("r", A, 100, 0.0)
    assert bookings.outstanding(A) == Booked(1, 100)
    bookings.reported(A, 1, 5, 0.5)  # pending work is not in it yet
    assert bookings.outstanding(A) == Booked(1, 100)
    bookings.responded(booking, (1, 7), 1.0)
    bookings.reported(A, 1, 6, 1.1)
    assert bookings.outstanding(A) == Booked(1, 100)
    bookings.reported(A, 1, 7, 1.2)
    assert bookings.outstanding(A) == Booked()
    assert bookings.count(A, State.RUNNING) == 1
    bookings.finished(A, "r")
    assert bookings.count(A) == 0
    assert bookings.released == {"finished": 1}


def test_without_a_report_on_the_response_the_next_poll_begun_after_it_counts() -> None:
    bookings = empty()
    booking = bookings.book("r", A, 100, 0.0)
    bookings.responded(booking, None, 1.0)
    bookings.reported(A, 1, 9, 0.9)
    assert bookings.outstanding(A).requests == 1
    bookings.reported(A, 1, 9, 1.1)
    assert bookings.outstanding(A).requests == 0


def test_a_new_epoch_includes_what_an_old_one_answered() -> None:
    bookings = empty()
    bookings.responded(bookings.book("r", A, 100, 0.0), (1, 900), 1.0)
    bookings.reported(A, 2, 0, 2.0)
    assert bookings.outstanding(A) == Booked()


@pytest.mark.req("RT-33")
def test_a_thousand_streams_a_third_of_whose_ends_are_lost_leave_nothing() -> None:
    bookings, rng, seq = empty(), random.Random(7), {A: 0, B: 0}
    for n in range(1000):
        key, now = rng.choice((A, B)), float(n)
        booking = bookings.book(str(n), key, rng.randrange(1, 500), now)
        fate = rng.random()
        if fate < 0.1:
            bookings.release(booking, "reset")
            continue
        seq[key] += 1
        bookings.responded(booking, (1, seq[key]), now)
        bookings.reported(key, 1, seq[key], now)
        if fate < 0.67:
            bookings.finished(key, str(n))
    assert bookings.outstanding(A) == bookings.outstanding(B) == Booked()
    lost = bookings.count(A) + bookings.count(B)
    assert 250 < lost < 420
    bookings.expire(1000.0 + EXPIRY_S)
    assert bookings.count(A) == bookings.count(B) == 0
    assert bookings.released["expired"] == lost
    assert bookings.released.total() == 1000


def test_the_end_may_come_before_the_response_headers_and_twice() -> None:
    bookings = empty()
    booking = bookings.book("r", A, 100, 0.0)
    bookings.finished(A, "r")
    bookings.responded(booking, (1, 1), 1.0)
    bookings.release(booking, "reset")
    bookings.move(booking, B)
    assert bookings.outstanding(A) == bookings.outstanding(B) == Booked()
    assert bookings.released == {"finished": 1}


def test_a_booking_follows_its_request_to_the_replica_that_served_it() -> None:
    bookings = empty()
    booking = bookings.book("r", A, 100, 0.0)
    bookings.move(booking, B)
    assert bookings.outstanding(A) == Booked()
    assert bookings.outstanding(B) == Booked(1, 100)
    bookings.finished(A, "r")
    assert bookings.outstanding(B) == Booked(1, 100)


def test_of_bookings_with_one_id_the_oldest_ends_first() -> None:
    bookings = empty()
    for tokens in (10, 200, 3000):
        bookings.book("same", A, tokens, 0.0)
    bookings.finished(A, "same")
    assert bookings.outstanding(A) == Booked(2, 3200)
    bookings.finished(A, "same")
    assert bookings.outstanding(A) == Booked(1, 3000)
    bookings.finished(A, "same")
    bookings.finished(A, "same")
    assert bookings.outstanding(A) == Booked()


def test_a_replica_that_goes_takes_its_bookings_along() -> None:
    bookings = empty()
    for n in range(3):
        bookings.book(str(n), A, 10, 0.0)
    bookings.book("x", B, 10, 0.0)
    bookings.release_all(A, "replica_gone")
    assert (bookings.count(A), bookings.count(B)) == (0, 1)
    assert bookings.released == {"replica_gone": 3}


def test_a_request_for_several_answers_counts_each_until_its_end() -> None:
    left: list[ReplicaKey] = []
    bookings, key = Bookings(left=left.append), ReplicaKey("u", 8000)
    booking = bookings.book("r", key, 100, 0.0, answers=4)
    assert bookings.outstanding(key) == Booked(4, 100, 0)
    bookings.finished(key, "r")
    assert bookings.outstanding(key) == Booked(3, 100, 0)
    bookings.responded(booking, (1, 1), 1.0)
    bookings.reported(key, 1, 1, 2.0)
    assert bookings.outstanding(key) == Booked(0, 0, 0)
    bookings.finished(key, "r")
    bookings.finished(key, "r")
    assert bookings.count(key) == 1
    assert left == [key, key]
    bookings.finished(key, "r")
    assert bookings.count(key) == 0
    assert bookings.released["finished"] == 1
