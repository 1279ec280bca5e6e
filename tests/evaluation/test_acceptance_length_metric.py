"""The `evaluate` metric, loaded from its folder as a user does, against a count by loops."""

import random
from importlib.resources import files

import evaluate
import pytest


@pytest.fixture
def metric(tmp_path, monkeypatch):
    """Loaded by path; the module cache of `evaluate` lies in a folder of the test."""
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = files("dflash_hf.evaluation") / "acceptance_length"
    return evaluate.load(str(path), cache_dir=str(tmp_path / "cache"))


def by_loops(predictions, references):
    """Tokens per verification: the bonus token and the leading proposals that are the target's own."""
    total = 0
    for proposals, truth in zip(predictions, references):
        total += 1
        for proposal, token in zip(proposals, truth):
            if token == -100 or proposal != token:
                break
            total += 1
    return total / len(predictions)


def test_by_hand(metric):
    """Two right, none right (one behind the wrong one does not count), all three right."""
    result = metric.compute(predictions=[[5, 6, 9], [1, 6, 7], [5, 6, 7]], references=[[5, 6, 7]] * 3)
    assert result["acceptance_length"] == pytest.approx((3 + 1 + 4) / 3)
    assert result["acceptance_rate"] == pytest.approx(5 / 9)
    assert result["slot_accuracy"] == pytest.approx([2 / 3, 1, 2 / 3]) and result["blocks"] == 3


def test_ends_and_unknown_tokens(metric):
    """A text that ends, a token that is not known, and a block of no proposals."""
    result = metric.compute(predictions=[[5, 6, 7], [5, 6, 7], []], references=[[5], [5, -100, 7], [4]])
    assert result["acceptance_length"] == pytest.approx((2 + 2 + 1) / 3)
    assert result["slot_accuracy"] == pytest.approx([1, 0, 1])


def test_random_blocks_in_batches(metric):
    """`add_batch` in parts gives what loops over all of them give."""
    source = random.Random(0)
    predictions = [[source.randrange(2) for _ in range(source.randrange(1, 8))] for _ in range(200)]
    references = [[source.choice([0, 1, 1, -100]) for _ in range(source.randrange(0, 9))] for _ in range(200)]
    for start in range(0, 200, 30):
        metric.add_batch(predictions=predictions[start : start + 30], references=references[start : start + 30])
    assert metric.compute()["acceptance_length"] == pytest.approx(by_loops(predictions, references))
