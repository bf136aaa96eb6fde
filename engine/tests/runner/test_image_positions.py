"""Positions in time, row and column: those of transformers, whatever part of a prompt a step has; text alone costs nothing."""

import numpy as np
import pytest
import torch
import transformers

from penstock.engine.core.plan import Admission, StepPlan
from penstock.engine.runner.image_positions import ImagePositions
from penstock.engine.sampling import SamplingParams
from penstock.prompt.hashing import PromptItem

IMAGE = 9
GRIDS = {"a": (3, 5), "b": (1, 1), "c": (4, 2)}
PROMPT = [1, 2, "a", 3, "b", 4, 5, 6, "c", 7]


def expanded(prompt: list) -> tuple[list[int], tuple[PromptItem, ...], tuple[tuple[int, int], ...]]:
    tokens, items, grids = [], [], []
    for part in prompt:
        if isinstance(part, str):
            rows, columns = GRIDS[part]
            items.append(PromptItem(part, len(tokens), rows * columns))
            grids.append((rows, columns))
            tokens += [IMAGE] * (rows * columns)
        else:
            tokens.append(part)
    return tokens, tuple(items), tuple(grids)


def plan(rows: list[tuple[int, int]], admissions=(), released=()) -> StepPlan:
    """`rows`: row and tokens of each."""
    return StepPlan(
        step_id=1,
        released=np.array(released, np.int32),
        admissions=list(admissions),
        append_rows=[],
        append_blocks=[],
        rows=np.array([row for row, _ in rows], np.int32),
        num_new_tokens=np.array([count for _, count in rows], np.int32),
        samples=np.ones(len(rows), np.bool_),
    )


def admit(row: int, prompt: list) -> Admission:
    tokens, items, grids = expanded(prompt)
    params = SamplingParams(max_tokens=1)
    return Admission(row, np.array(tokens, np.int32), len(tokens), 0, params, items=items, grids=grids)


def run(positions: ImagePositions, step: StepPlan, starts: list[int]) -> tuple[np.ndarray, bool]:
    """The positions, [3, n], and whether they differ."""
    positions.take_in(step)
    places = np.concatenate([np.arange(s, s + count) for s, count in zip(starts, step.num_new_tokens, strict=True)])
    three = positions.apply(step.rows, np.array(starts, np.int32), step.num_new_tokens, places)
    return (np.repeat(places[None], 3, 0) if three is None else three), three is not None


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """[3, n + 5]: of the prompt, and of five tokens after it."""
    tokens, _, grids = expanded(PROMPT)
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "num_hidden_layers": 0,
            "hidden_size": 8,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "vocab_size": 10,
        },
        vision_config={"depth": 0, "hidden_size": 16, "num_heads": 1, "out_hidden_size": 8},
    )
    model = transformers.Qwen2_5_VLModel(config)
    ids = torch.tensor([tokens + [1] * 5])
    thw = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])
    found, _ = model.get_rope_index(ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=thw)
    return found[:, 0].numpy()


@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
def test_every_part_of_a_prompt_has_the_positions_of_transformers(expected, chunk):
    positions, total = ImagePositions(4), expected.shape[1]
    first = [admit(2, PROMPT)]
    for start in range(0, total, chunk):
        count = min(chunk, total - start)
        found, differ = run(positions, plan([(2, count)], first), [start])
        assert np.array_equal(found, expected[:, start : start + count]), start
        items = expanded(PROMPT)[1]
        assert differ == any(start < item.start + item.length and item.start < start + count for item in items)
        first = []


def test_rows_do_not_mix_and_text_keeps_its_places(expected):
    positions, total = ImagePositions(4), expected.shape[1]
    text = Admission(0, np.zeros(9, np.int32), 9, 0, SamplingParams(max_tokens=1))
    found, differ = run(
        positions, plan([(0, 5), (1, 20), (3, 4)], [text, admit(1, PROMPT), admit(3, ["b", 1, 2, 3])]), [0, 10, 0]
    )
    assert differ
    assert found[:, :5].tolist() == [list(range(5))] * 3
    assert np.array_equal(found[:, 5:25], expected[:, 10:30])
    assert found[:, 25:].tolist() == [[0, 1, 2, 3]] * 3
    found, differ = run(positions, plan([(0, 1), (1, 1)]), [9, total - 1])
    assert not differ  # decodes have one position, also after images
    assert found[0].tolist() == [9, expected[0, -1]]
    found, differ = run(
        positions, plan([(1, 3)], [Admission(1, np.zeros(3, np.int32), 3, 0, SamplingParams(max_tokens=1))], [1, 3]), [0]
    )
    assert not differ
    assert found[0].tolist() == [0, 1, 2]
    places = np.arange(3)
    step = plan([(1, 3)])
    assert positions.apply(step.rows, np.zeros(1, np.int32), step.num_new_tokens, places) is None
    assert not positions._images  # so that text alone is not looked at
