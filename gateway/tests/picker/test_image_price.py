"""Images in the price of a replica: the tower runs where they are not in the prefix cache, and that takes time too."""

import msgspec
import numpy as np
import pytest
from picks import NOW, Known, columns_of, report, request

from penstock.api.fleet import Fleet, Model, Pool
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.choice import choose
from penstock.gateway.picker.columns import Columns
from penstock.gateway.picker.cost import cost_s, estimate
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.slate import Slate, slate_of
from penstock.gateway.picker.state import FleetState

pytestmark = pytest.mark.usefixtures("in_python_and_compiled")

RATE = 1000.0
IMAGES = ((40, 3000), (90, 500))
"""Where each ends, and what its run takes in tokens."""


def columns(*backlogs: int) -> Columns:
    fleet = [Known(n, report(prefill_backlog_tokens=of, prefill_tokens_per_s=RATE)) for n, of in enumerate(backlogs)]
    return columns_of(fleet)


def slate(columns: Columns, resident: list[float], images: tuple[tuple[int, int], ...] = IMAGES) -> Slate:
    asked = msgspec.structs.replace(request(100), prompts=(Prompt(100, (), images),))
    return slate_of(asked, columns, columns.open, np.array(resident), NOW, 0)


def test_the_towers_time_is_that_of_images_beyond_the_resident_prefix() -> None:
    of = slate(columns(0, 0, 0, 0), [0.0, 32.0, 48.0, 96.0])
    assert estimate(of).encoder_s.tolist() == pytest.approx([3.5, 3.5, 0.5, 0.0])
    assert (cost_s(of) - cost_s(slate(columns(0, 0, 0, 0), [0.0, 32.0, 48.0, 96.0], ()))).min() >= 0
    plain = slate(columns(0, 0), [0.0, 0.0], ())
    assert plain.encoder_s is None
    assert estimate(plain).encoder_s.tolist() == [0.0, 0.0]


def test_a_queue_is_worth_its_time_where_it_saves_a_run() -> None:
    """The prompt is short, and half of it is at the replica with the queue: its images are what is worth a wait."""
    busy = columns(0, 1500)
    assert choose(slate(busy, [0.0, 48.0], ()), "Cost").key.uid == "uid-0"
    choice = choose(slate(busy, [0.0, 48.0]), "Cost")
    assert choice.key.uid == "uid-1"
    assert choice.ttft_s == pytest.approx(1.5 + 0.052 + 0.5, abs=0.05)


def test_promises_that_did_not_come_true_count_for_towers_too() -> None:
    """Python and the compiled form agree on it."""
    of = columns(0, 0)
    of.figures.promised_s[:], of.figures.taken_s[:] = 1000.0, (1000.0, 8000.0)
    found = slate(of, [96.0, 0.0])
    assert found.figures.correction[1] > 2
    choice, priced = choose(found, "Cost"), cost_s(found).tolist()
    assert dict(zip(choice.rows, choice.scores, strict=True)) == dict(enumerate(priced))
    assert estimate(found).cost_s(16, found.figures.correction).tolist() == pytest.approx(priced)


def test_a_booking_counts_the_runs() -> None:
    asked, replica = RequestView(id="r", path="", model="m", prompts=(Prompt(100, (), IMAGES),)), Known(1).replica
    assert [asked.encoder_tokens(resident) for resident in (0, 39, 40, 89, 90)] == [3500, 3500, 500, 500, 0]
    state, model = FleetState(), Model(id="ns/m", served_names=["m"])
    state.update(Fleet(models=[model], pools=[Pool(id=replica.pool, model=model.id)], replicas=[replica]))
    state.book(asked, key_of(replica), 48, NOW)
    found = state.slates.of(model, asked, NOW)
    assert found is not None
    assert found.figures.booked_tokens.tolist() == [52 + 500]
