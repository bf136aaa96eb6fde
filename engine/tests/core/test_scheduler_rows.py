"""What holds of requests and modules by themselves."""

import ast
from pathlib import Path

import pytest
from harness import Machine, make_config, make_request

from penstock.engine.core.scheduling import scheduler
from penstock.engine.core.scheduling.request import FINISHED_STATUS, PARKED_STATUS, RequestStatus
from penstock.engine.messages import FINISH_REASONS, FinishReason


@pytest.mark.req("SCH-26")
def test_scheduling_touches_no_block():
    """Of the cache it knows the manager, what the manager answers, and nothing of blocks."""
    for path in Path(scheduler.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        of_cache = {module for module in imported if module.startswith("penstock.engine.cache")}
        assert not any(module.endswith("block_pool") for module in of_cache), path
        if path.name in ("scheduler.py", "request_book.py"):
            assert of_cache == {"penstock.engine.cache.kv_manager"}
            attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            assert not attributes & {"pool", "tables", "ref_counts", "free_list"}


@pytest.mark.req("RL-01", "RL-02", "RL-03")
def test_every_end_has_a_status_and_a_word():
    assert set(FINISHED_STATUS) == set(FINISH_REASONS) == set(FinishReason)
    assert sorted(FINISHED_STATUS.values()) == [status for status in RequestStatus if status.is_finished]
    assert len(set(FINISH_REASONS.values())) == 5 and FINISH_REASONS[FinishReason.IGNORED] == "length"
    assert all(RequestStatus.WAITING < status < RequestStatus.RUNNING for status in PARKED_STATUS.values())


@pytest.mark.req("RL-08")
def test_the_work_owed_is_the_gap():
    machine = Machine(make_config(num_blocks=700, max_model_len=2500, budget=2048))
    machine.add(make_request(0, [1] * 2000, 5))
    assert machine.scheduler.prefill_backlog() == 2000
    plan = machine.step()
    table = machine.scheduler.table
    assert plan.num_new_tokens.tolist() == [2000]
    for _ in range(4):
        assert table.num_tokens[0] - table.num_computed[0] == 1
        assert machine.step().num_new_tokens.tolist() == [1]


@pytest.mark.req("IB-05")
def test_rows_stay_where_they_are_and_a_dictionary_would_say_the_same():
    """Rows are stable, so nothing moves together because nothing moves: the table is what a dictionary of requests is."""
    machine = Machine(make_config(num_blocks=200, max_num_seqs=4, depth=2))
    machine.add(*[make_request(index, [index] * (index % 7 + 1), index % 5 + 2) for index in range(30)])
    homes: dict[int, int] = {}
    while machine.scheduler.indexes():
        machine.step()
        tenancy, table = machine.scheduler._tenancy, machine.scheduler.table
        for request in tenancy.running:
            assert homes.setdefault(request.index, request.row) == request.row and tenancy.indexes[request.row] == request.index
            tokens = [*[request.index] * request.num_prompt_tokens, *machine.streams.get(request.index, [])]
            assert table.token_ids[request.row, : len(tokens)].tolist() == tokens
            assert (
                tenancy.num_known[request.row] == len(tokens)
                and table.num_prompt_tokens[request.row] == request.num_prompt_tokens
            )
