"""Logged numbers and the curve."""

import time
from xml.etree import ElementTree

import pytest
import torch
from training_helpers import collate, make_trainer, rows

from dflash_hf.training.curve import curve_svg
from dflash_hf.training.metrics import RunningCounts, count_blocks


def test_logged_numbers_are_those_of_the_steps(tmp_path):
    """Accuracy by place, acceptance length and throughput of the steps since the last log, counted by hand."""
    trainer = make_trainer(
        tmp_path, max_steps=4, logging_strategy="steps", logging_steps=2, per_device_train_batch_size=2
    )
    tokens, anchors = [], []
    inner = trainer.data_collator

    def collator(examples):
        batch = inner(examples)
        tokens.append(int(batch["attention_mask"].sum()))
        anchors.append(int(batch["keep"].sum()))
        return batch

    trainer.data_collator = collator
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    for number, entry in enumerate(logs):
        places = [entry[f"slot_accuracy_{place}"] for place in range(1, 8)]
        assert all(0 <= value <= 1 for value in (entry["slot_accuracy"], *places))
        assert 1 <= entry["block_acceptance_length"] <= 8
        part = slice(2 * number, 2 * number + 2)
        # both rates are over the same seconds
        ratio = entry["tokens_per_second"] / entry["anchors_per_second"]
        assert ratio == pytest.approx(sum(tokens[part]) / sum(anchors[part]), rel=1e-6)
        assert entry["tokens_per_second"] > 0


def test_rates_are_counts_over_seconds_and_leave_evaluation_out(monkeypatch):
    """Sums over two batches, by a clock that is set by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    counts = RunningCounts(places=2, device=torch.device("cpu"))
    hits = torch.tensor([[[False, True, False], [False, True, True]]])
    blocks = count_blocks(hits=hits, supervised=torch.ones_like(hits), keep=torch.ones(1, 2, dtype=torch.bool))
    counts.start_clock()
    counts.add(tokens=torch.tensor(30), counts=blocks)
    counts.add(tokens=torch.tensor(50), counts=blocks)
    now[0] = 104.0
    metrics = counts.take(lambda sums: sums)
    assert metrics["tokens_per_second"] == 20 and metrics["anchors_per_second"] == 1
    assert metrics["block_acceptance_length"] == 2.5 and metrics["slot_accuracy_1"] == 1
    assert metrics["slot_accuracy_2"] == 0.5 and metrics["slot_accuracy"] == 0.75
    counts.add(tokens=torch.tensor(30), counts=blocks)
    now[0] = 205.0
    counts.leave_out(100.0)  # an evaluation
    counts.add(tokens=torch.tensor(30), counts=blocks)
    now[0] = 206.0
    assert counts.take(lambda sums: sums)["tokens_per_second"] == 30


def test_evaluation_batches_do_not_count_as_training(tmp_path):
    """compute_loss in eval mode leaves the training counts alone."""
    trainer = make_trainer(tmp_path)
    trainer.model.eval()
    trainer.compute_loss(trainer.model, collate(trainer))
    assert trainer.counts.sums.eq(0).all()


HISTORY = [
    {"step": 10, "loss": 3.0, "block_acceptance_length": 1.2},
    {"step": 10, "eval_loss": 2.9, "eval_block_acceptance_length": 1.1},
    {"step": 20, "loss": 2.0, "block_acceptance_length": 1.8},
    {"step": 20, "train_runtime": 3.0},
    {"step": 40, "loss": 1.0, "block_acceptance_length": 2.2},
]


def test_curve_shows_every_point_where_it_belongs():
    """Two panels; x grows with the step, y falls with the value; a single evaluation is a dot."""
    root = ElementTree.fromstring(curve_svg(HISTORY))
    space = "{http://www.w3.org/2000/svg}"
    panels = root.findall(f"{space}g")
    assert len(panels) == 2
    loss, acceptance = (panel.find(f"{space}polyline").get("points").split() for panel in panels)
    xs, ys = zip(*(map(float, point.split(",")) for point in loss))
    assert len(xs) == 3 and list(xs) == sorted(xs) and list(ys) == sorted(ys), "a falling loss goes down the page"
    assert (xs[1] - xs[0]) / (xs[2] - xs[1]) == pytest.approx(0.5, abs=0.01)
    assert [float(point.split(",")[1]) for point in acceptance] == sorted(
        (float(point.split(",")[1]) for point in acceptance), reverse=True
    )
    assert all(len(panel.findall(f"{space}circle")) == 1 for panel in panels)


@pytest.mark.parametrize("history", [[], [{"step": 5, "loss": 1.0}], [{"step": 5, "train_runtime": 1.0}]])
def test_nothing_to_draw(history):
    """A curve needs two points."""
    assert curve_svg(history) is None


def test_constant_numbers_are_drawn():
    """No division by a span of zero."""
    assert "polyline" in curve_svg([{"step": step, "loss": 1.0} for step in (1, 2)])


def test_run_writes_its_curve(tmp_path):
    """At the end of training, into output_dir, with the evaluations that were made."""
    trainer = make_trainer(
        tmp_path,
        evaluation=rows([20, 12], seed=4),
        max_steps=4,
        logging_strategy="steps",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    root = ElementTree.fromstring((tmp_path / "training_curve.svg").read_text())
    text = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"loss", "block acceptance length", "training", "evaluation"} <= set(text)
    assert not list(tmp_path.glob("*.tmp"))
