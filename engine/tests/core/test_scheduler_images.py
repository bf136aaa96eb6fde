"""Images in the scheduler: the tower runs once for equal images, under its budget, and no full cache is a deadlock."""

import pytest
from fake_runner import image_value, reference
from harness import Machine, make_config, make_request

from penstock.engine.core.executor import StepFailed
from penstock.engine.core.scheduling.images.encoder_cache import EncoderCache
from penstock.engine.messages import FinishReason
from penstock.prompt.hashing import BlockHasher, ExtraKeys, PromptItem

PLACEHOLDER = 7


def seen(index: int, parts: list, max_tokens: int = 4, **fields):
    """A request of tokens and images, (name, length) each, and the output that it must have."""
    prompt: list[int] = []
    values: list[int] = []
    items: list[PromptItem] = []
    for part in parts:
        if isinstance(part, tuple):
            name, length = part
            items.append(PromptItem(name, len(prompt), length))
            prompt += [PLACEHOLDER] * length
            values += [image_value(name, offset) for offset in range(length)]
        else:
            prompt.append(part)
            values.append(part)
    return make_request(index, prompt, max_tokens, images=items, **fields), reference(values, max_tokens)


def ran(machine: Machine, *requests) -> Machine:
    """To the end, with the right outputs."""
    for request, _ in requests:
        machine.add(request)
    machine.run()
    assert {request.index: machine.streams[request.index] for request, _ in requests} == {
        request.index: expected for request, expected in requests
    }
    machine.check_no_leak()
    return machine


def chunks(machine: Machine) -> list[list[int]]:
    """By step, the tokens of each row."""
    return [plan.num_new_tokens.tolist() for plan in machine.plans]


def test_images_wait_until_a_tower_begins_with_them():
    """Equal ones count once; those before the computed tokens, or with embeddings, do not wait."""
    machine = Machine(make_config(images=(4, 16), budget=40, max_num_seqs=2))

    def waiting() -> int:
        found = machine.scheduler.encoder_stats()
        assert found is not None
        return found.waiting

    assert waiting() == 0
    asked = [seen(0, [("a", 4), 1, ("b", 4), 2]), seen(1, [("b", 4), ("c", 4), 3]), seen(2, [("a", 4), ("d", 4), 4])]
    for request, _ in asked:
        machine.add(request)
    assert waiting() == 4, "a and b once each"
    counts = []
    while machine.scheduler.has_work:
        machine.step()
        counts.append(waiting())
    assert counts[:3] == [3, 2, 1] and counts[-1] == 0


@pytest.mark.req("MM-06", "MM-10", "MM-15")
def test_equal_images_are_encoded_once():
    machine = Machine(make_config(images=(16, 16), budget=40))
    ran(machine, seen(0, [1, ("a", 5), 2, ("a", 5)]), seen(1, [3, ("a", 5), 4]))
    assert machine.runner.encoded == ["a"]
    assert machine.plans[0].encoder_runs[0].identifier == "a"
    ran(machine, seen(2, [5, ("a", 5), 6]), seen(3, [5, ("b", 5), 6]))
    assert machine.runner.encoded == ["a", "b"]
    encoder = machine.scheduler.encoder
    assert (encoder.num_runs, encoder.num_hits, encoder.num_embeddings) == (2, 2, 10)


@pytest.mark.req("MM-07", "PC-06")
def test_a_prefix_hit_runs_no_tower_and_other_images_never_hit():
    machine = Machine(make_config(images=(16, 16), budget=40))
    prompt = [1, 2, ("a", 9), 3, 4, 5, 6]
    ran(machine, seen(0, prompt))
    machine.scheduler.encoder.clear()
    ran(machine, seen(1, prompt))
    assert machine.cached_tokens[1] == 12
    assert machine.runner.encoded == ["a"]
    ran(machine, seen(2, [1, 2, ("b", 9), 3, 4, 5, 6]))
    assert machine.cached_tokens[2] == 0  # the first block holds the beginning of the image
    ran(machine, seen(3, [1, 2, *[PLACEHOLDER] * 9, 3, 4, 5, 6]))
    assert machine.cached_tokens[3] == 0


def test_salts_and_tenants_share_embeddings_and_no_blocks():
    machine = Machine(make_config(images=(16, 16), budget=40))
    prompt = [1, 2, ("a", 9), 3, 4, 5, 6]
    for at, whose in enumerate(({}, {"salt": "s"}, {"tenant": "t"})):
        for again in range(2):
            ran(machine, seen(2 * at + again, prompt, **whose))
            assert machine.cached_tokens[2 * at + again] == 12 * again, whose
    assert machine.runner.encoded == ["a"]


@pytest.mark.req("MM-13", "MM-12", "CHK-10")
def test_a_chunk_ends_before_an_image_that_has_no_room():
    machine = Machine(make_config(images=(6, 12), budget=40))
    ran(machine, seen(0, [1, 2, ("a", 5), 3, ("b", 6), 4]))
    assert chunks(machine)[:2] == [[8], [7]]  # up to the second image, which the next step's budget makes
    assert [len(plan.encoder_runs) for plan in machine.plans[:2]] == [1, 1]
    again = Machine(make_config(images=(6, 12), budget=40))
    ran(again, seen(0, [1, 2, ("a", 5), 3, 4]), seen(1, [5, ("b", 5), 6]), seen(2, [8, 9]))
    # The second begins without its image; the third is not held up.
    assert chunks(again)[0] == [9, 1, 2]


@pytest.mark.req("MM-13")
def test_a_request_that_begins_with_an_image_waits_for_the_budget():
    machine = Machine(make_config(images=(6, 12), budget=40))
    ran(machine, seen(0, [("a", 5), 3]), seen(1, [("b", 5), 6]))
    assert chunks(machine)[:2] == [[6], [1, 6]]


@pytest.mark.req("MM-12", "MM-15")
def test_a_run_beyond_a_steps_budget_is_divided_among_steps_and_made_once():
    machine = Machine(make_config(images=(4, 16), budget=40))
    machine.add(seen(0, [1, 2], 12)[0])
    machine.step()
    requests = seen(1, [3, ("a", 10), 4]), seen(2, [("a", 10), 5]), seen(3, [6, 7])
    ran(machine, *requests)
    # The tower goes on beside the decodes, and the prompt behind the image waits for it; so does who begins with it.
    runs = [[(run.identifier, run.done) for run in plan.encoder_runs] for plan in machine.plans[1:4]]
    assert runs == [[("a", 4)], [("a", 8)], [("a", 10)]]
    assert chunks(machine)[1:4] == [[1, 1], [1], [1, 11, 11, 2]]
    assert machine.runner.encoded == ["a"]
    encoder = machine.scheduler.encoder
    assert (encoder.num_runs, encoder.num_hits, encoder.num_embeddings) == (1, 1, 10)  # the other one's is a hit


def test_a_divided_run_ends_without_the_request_that_began_it():
    machine = Machine(make_config(images=(4, 16), budget=40))
    machine.add(seen(0, [3, ("a", 10), 4])[0])
    machine.step()
    machine.abort(0)
    machine.run()
    assert machine.runner.encoded == ["a"] and not machine.scheduler.encoder.is_busy
    ran(machine, seen(1, [5, ("a", 10), 4]))
    assert machine.runner.encoded == ["a"]


def test_a_divided_run_begins_again_after_a_step_that_failed():
    machine = Machine(make_config(images=(4, 16), budget=40))
    machine.add(seen(0, [1, ("a", 10), 2])[0])
    machine.step()
    plan = machine.scheduler.schedule(1.0)
    assert [(run.identifier, run.pixels, run.done) for run in plan.encoder_runs] == [("a", None, 8)]
    machine._take(machine.scheduler.fail_step(str(StepFailed("the tower broke")), "step_failed", 1.0))
    ran(machine, seen(1, [3, ("a", 10), 2]))
    assert machine.runner.encoded == ["a"]
    assert [run.done for plan in machine.plans[1:4] for run in plan.encoder_runs] == [4, 8, 10]


@pytest.mark.req("MM-19", "MM-20", "MM-17")
def test_a_chunk_may_cut_an_image_which_is_encoded_whole_and_kept_until_it_is_over():
    machine = Machine(make_config(images=(16, 16), budget=4))
    request, expected = seen(0, [1, 2, ("a", 9), 3])
    machine.add(request)
    held = []
    while not machine.streams.get(0):
        machine.step()
        held.append(machine.scheduler.encoder.cache.held)
    assert held == [9, 9, 0]
    machine.run()
    assert (machine.streams[0], machine.runner.encoded) == (expected, ["a"])


@pytest.mark.req("MM-19")
def test_an_image_whose_tokens_see_each_other_is_computed_in_one_step():
    machine = Machine(make_config(images=(16, 16), budget=10, whole_images=True))
    ran(machine, seen(0, [1, 2, ("a", 9), 3, ("b", 4), ("c", 3), 4]))
    assert chunks(machine)[:4] == [[2], [10], [8], [1]]
    ran(machine, seen(1, [5, 6, 7, ("a", 9), 3]))
    other = Machine(make_config(images=(16, 16), budget=12, whole_images=True))
    other.add(seen(0, [1], 30)[0])
    other.step()
    ran(other, seen(1, [1, 2, 3, ("a", 9), 4]), seen(2, [("b", 9), 5]), seen(3, [6, 7]))
    # A decode is in each step. The third request waits for a step with room for its image; the fourth, behind it, too.
    assert chunks(other)[1:5] == [[1, 3], [1, 10], [1, 1, 10], [1, 1, 1, 2]]


@pytest.mark.req("MM-26")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_draft_head_has_the_image_after_a_chunks_last_token(ahead, whole):
    machine = Machine(make_config(images=(16, 16), budget=4, image_lookahead=ahead, whole_images=whole))
    ran(machine, seen(0, [1, 2, 3, 4, ("a", 4), 5]))
    assert chunks(machine)[:3] == [[4], [4], [1]]
    assert [len(plan.encoder_runs) for plan in machine.plans[:2]] == [ahead, 1 - ahead]
    # Without room for it, the chunk ends a token earlier. The images are kept until they are over.
    tight = Machine(make_config(images=(4, 8), budget=40, image_lookahead=ahead, whole_images=whole))
    ran(tight, seen(0, [1, 2, ("a", 4), 3, 4, ("b", 4), 5]))
    assert chunks(tight)[:2] == [[8 - ahead], [5 + ahead]]
    assert tight.runner.encoded == ["a", "b"]
    # Where images touch, one is over only when the next one is there: with room for one alone, the head does without.
    touching = Machine(make_config(images=(4, 4), budget=40, image_lookahead=ahead, whole_images=whole))
    ran(touching, seen(0, [("a", 4), ("b", 4), 5]), seen(1, [("c", 4), ("d", 4), 6]))


def test_a_prefix_hit_may_end_within_an_image_whose_rest_is_computed_in_one_step():
    machine = Machine(make_config(images=(16, 16), budget=20, whole_images=True))
    ran(machine, seen(0, [1, 2, ("a", 9)], 1))
    ran(machine, seen(1, [1, 2, ("a", 9), 3, 4]))
    assert machine.cached_tokens[1] == 8
    ran(machine, seen(2, [1, 2, ("a", 9), 5]))
    assert chunks(machine)[-4] == [4]


def test_an_image_that_a_prompt_holds_twice_is_kept_until_the_second_one_is_over():
    machine = Machine(make_config(images=(16, 16), budget=12))
    machine.add(seen(0, [1, ("a", 9), ("a", 9), 3])[0])
    machine.step()
    assert machine.scheduler.encoder.cache.held == 9
    machine.step()
    assert machine.scheduler.encoder.cache.held == 0
    assert machine.runner.encoded == ["a"]


@pytest.mark.req("MM-09", "MM-11", "MM-14")
def test_entries_that_nobody_holds_leave_when_their_room_is_needed_oldest_first():
    machine = Machine(make_config(images=(16, 10), budget=40, caching=False))
    ran(machine, seen(0, [("a", 5), 1]))
    ran(machine, seen(1, [("b", 5), 1]))
    ran(machine, seen(2, [("a", 5), 2]))  # used again: it is the younger now
    ran(machine, seen(3, [("c", 5), 1]))
    assert machine.runner.encoded == ["a", "b", "c"]
    assert set(machine.runner.embeddings) == {"a", "c"}
    assert [name for plan in machine.plans for name in plan.encoder_frees] == ["b"]


@pytest.mark.req("MM-18", "MM-16")
def test_abort_and_preemption_let_images_go():
    machine = Machine(make_config(images=(16, 16), budget=4))
    machine.add(seen(0, [1, ("a", 9), 3])[0])
    machine.step()
    assert machine.scheduler.encoder.cache.held == 9
    machine.abort(0)
    assert machine.scheduler.encoder.cache.held == 0
    tight = Machine(make_config(images=(16, 9), budget=8, num_blocks=17, max_model_len=64, caching=False))
    ran(tight, seen(0, [1, ("a", 9), 2], 40), seen(1, [3, ("b", 9), 4], 40))
    assert tight.scheduler.totals.num_preemptions
    assert set(tight.runner.encoded) == {"a", "b"}


def test_waiting_requests_hold_nothing_so_that_a_full_cache_is_never_a_deadlock():
    machine = Machine(make_config(images=(9, 9), budget=6, max_num_seqs=3))
    ran(machine, *[seen(at, [at, (f"{at} first", 9), 1, (f"{at} second", 9), 2]) for at in range(8)])
    assert len(machine.runner.encoded) >= 16


def test_the_last_token_of_a_prompt_may_be_an_image():
    machine = Machine(make_config(images=(16, 16), budget=5))
    ran(machine, seen(0, [1, 2, 3, 4, 5, ("a", 1)]), seen(1, [1, 2, ("b", 8)]))


def test_images_that_can_never_be_served_are_that_requests_error():
    machine = Machine(make_config(images=(9, 12), budget=40))
    for at, (items, word) in enumerate(
        (
            ([PromptItem("a", 2, 13)], "does not fit"),
            ([PromptItem("a", 2, 5), PromptItem("b", 6, 2)], "overlaps"),
            ([PromptItem("a", 18, 5)], "overlaps"),
            ([PromptItem("a", 5, 0)], "overlaps"),
        )
    ):
        machine.add(make_request(at, [PLACEHOLDER] * 20, images=items))
        assert machine.finished[at].reason is FinishReason.ERROR
        assert word in machine.finished[at].error
    text = Machine(make_config())
    text.add(make_request(0, [PLACEHOLDER] * 20, images=[PromptItem("a", 2, 3)]))
    assert text.finished[0].reason is FinishReason.ERROR


def test_a_step_that_failed_made_no_embeddings():
    machine = Machine(make_config(images=(16, 16), budget=40))
    machine.add(seen(0, [1, ("a", 5), 2])[0])
    plan = machine.scheduler.schedule(1.0)
    assert [run.identifier for run in plan.encoder_runs] == ["a"]
    machine._take(machine.scheduler.fail_step(str(StepFailed("the tower broke")), "step_failed", 1.0))
    assert machine.finished[0].reason is FinishReason.ERROR
    ran(machine, seen(1, [3, ("a", 5), 2]))
    assert machine.runner.encoded == ["a"]  # by the second alone, as this runner never saw the first


@pytest.mark.req("MM-08")
def test_the_cache_counts_embeddings():
    cache = EncoderCache(10)
    cache.add("a", 4, 1)
    cache.add("b", 6, 2)
    assert (cache.used, cache.held, cache.room([])) == (10, 10, 0)
    cache.release("a", 1)
    cache.release("a", 1)
    assert (cache.used, cache.held, cache.room([]), cache.room(["a", "a"])) == (10, 6, 4, 0)
    assert cache.hold("a", 3)
    assert not cache.hold("a", 3)
    cache.release("a", 3)
    cache.add("c", 3, 4)
    assert (cache.take_evicted(), cache.take_evicted()) == (["a"], [])
    cache.forget(["b", "nobody"])
    cache.release("b", 2)
    assert (cache.used, cache.held, "b" in cache) == (3, 3, False)


def test_an_images_place_is_in_the_name_of_each_block_that_it_reaches_into():
    hasher, tokens = BlockHasher(4, "test"), [PLACEHOLDER] * 16
    plain = hasher.hash(tokens)
    one = hasher.hash(tokens, ExtraKeys(items=(PromptItem("a", 5, 4),)))
    assert [a == b for a, b in zip(plain, one, strict=True)] == [True, False, False, False]
    assert one[1] != hasher.hash(tokens, ExtraKeys(items=(PromptItem("a", 6, 4),)))[1]
    assert one[1] != hasher.hash(tokens, ExtraKeys(items=(PromptItem("b", 5, 4),)))[1]
