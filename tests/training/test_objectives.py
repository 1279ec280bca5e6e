"""Objectives and weightings in DFlashTrainer: against loops over blocks, and independent of how a batch is split."""

import math

import pytest
import torch
from conftest import tiny_target
from training_helpers import UNEVEN, collate, first_slot, make_trainer, reference_blocks, rows, tiny_drafter, weights_of

from dflash_hf.errors import DFlashError

OPTIONS = {
    "data": dict(),
    "argmax": dict(objective="target_argmax"),
    "kl": dict(objective="target_kl"),
    "uniform": dict(loss_weighting="uniform"),
    "dpace": dict(loss_weighting="dpace"),
    "dpace, kl": dict(loss_weighting="dpace", objective="target_kl", dpace_alpha=0.2),
    "dpace, argmax": dict(loss_weighting="dpace", objective="target_argmax"),
    "prefix": dict(contiguous_prefix=True),
    "shifted": dict(sample_from_anchor=True),
    "shifted, kl, dpace": dict(sample_from_anchor=True, objective="target_kl", loss_weighting="dpace"),
    "packed": dict(packing=True, max_length=60),
    "packed, kl, dpace": dict(packing=True, max_length=60, objective="target_kl", loss_weighting="dpace"),
}


def shift(more):
    """Takes the drafter's own option out of a case; its config's field."""
    return {"sample_from_anchor": True} if more.pop("sample_from_anchor", False) else {}


def loss_by_loops(trainer, batch):
    """Every block on its own, every slot in a loop."""
    args = trainer.args
    alpha = args.dpace_alpha
    total, normaliser = 0.0, 0.0
    for _, _, logits, labels, target_logits in reference_blocks(trainer, batch, with_target=True):
        first = first_slot(trainer.model.config)
        slots = [slot for slot in range(first, len(labels)) if int(labels[slot]) >= 0]
        if args.contiguous_prefix:
            assert slots == list(range(first, first + len(slots)))
        losses, confidences = {}, {}
        for slot in slots:
            log_q, log_p = logits[slot].log_softmax(-1), target_logits[slot].log_softmax(-1)
            label = int(log_p.argmax()) if args.objective == "target_argmax" else int(labels[slot])
            losses[slot] = (log_p.exp() * (log_p - log_q)).sum() if args.objective == "target_kl" else -log_q[label]
            confidences[slot] = (1 - alpha) * math.exp(float(log_q[label].detach())) + alpha
        if args.loss_weighting == "dpace":
            normaliser += bool(slots)
        for slot in slots:
            if args.loss_weighting == "decay":
                weight = math.exp(-(slot - first) / 4.0)
            elif args.loss_weighting == "uniform":
                weight = 1.0
            else:
                weight, chance = 0.0, 1.0
                for later in slots:
                    chance *= confidences[later]
                    weight += chance if later >= slot else 0.0
            total = total + weight * losses[slot]
            if args.loss_weighting != "dpace":
                normaliser += weight
    return total / normaliser


@pytest.mark.parametrize("features", ["online", "memory"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradient_equal_loops(tmp_path, name, features):
    """Uneven examples with holes, padding and tails; the target's states from its forward pass or from memory."""
    more, target = dict(OPTIONS[name]), tiny_target()
    drafter = tiny_drafter(target, **shift(more))
    data = rows(UNEVEN, holes=True)
    trainer = make_trainer(tmp_path, target=target, drafter=drafter, train=data, features=features, **more)
    batch = collate(trainer)
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {key: parameter.grad.clone() for key, parameter in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    expected = loss_by_loops(trainer, batch)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for key, parameter in trainer.model.named_parameters():
        assert (gradients[key] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), key


def one_update(folder, batch_size, accumulation, more):
    target, more = tiny_target(), dict(more)
    drafter = tiny_drafter(target, **shift(more))
    trainer = make_trainer(
        folder,
        target=target,
        drafter=drafter,
        train=rows([6, 40, 9, 23, 14, 31, 8, 19], holes=True),
        optimizers=(torch.optim.SGD(drafter.parameters(), lr=0.1), None),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        num_anchors=12,
        **more,
    )
    start = weights_of(drafter)
    output = trainer.train()
    return start, weights_of(drafter), output.training_loss


@pytest.mark.parametrize("name", OPTIONS)
def test_update_does_not_depend_on_how_the_batch_is_split(tmp_path, name):
    """1 x 8, 2 x 4, 4 x 2 and 8 x 1 examples (or rows): equal updates to 1e-6 and equal logged losses."""
    more = OPTIONS[name] | (dict(max_length=40) if "packed" in name else {})
    start, whole, loss = one_update(tmp_path / "8x1", 8, 1, more)
    for split in ((1, 8), (2, 4), (4, 2)):
        _, parts, other = one_update(tmp_path / "{}x{}".format(*split), *split, more)
        assert other == pytest.approx(loss, rel=1e-5)
        for key in whole:
            step = (whole[key] - start[key]).norm()
            assert step > 0
            assert (parts[key] - whole[key]).norm() <= 1e-6 * whole[key].norm(), key
            assert (parts[key] - whole[key]).norm() <= 1e-3 * step, key


def test_target_objectives_over_a_part_of_the_vocabulary(tmp_path):
    """With every token counted, the part is the whole; with a few, the target's distribution is over those few too."""
    for objective in ("target_argmax", "target_kl"):
        whole = make_trainer(tmp_path, objective=objective)
        part = make_trainer(
            tmp_path, objective=objective, drafter=whole.model, loss_vocab_size=97, loss_vocab_negatives=97
        )
        whole.model.eval()
        value = whole.compute_loss(whole.model, collate(whole)).item()
        assert part.compute_loss(whole.model, collate(part)).item() == pytest.approx(value, rel=1e-5)
        few = make_trainer(
            tmp_path, objective=objective, drafter=whole.model, loss_vocab_size=30, loss_vocab_negatives=9
        )
        loss = few.compute_loss(whole.model, collate(few))
        assert loss.isfinite() and loss.item() != pytest.approx(value, rel=1e-3)


def test_evaluation_loss_does_not_depend_on_the_objective(tmp_path):
    """Runs with different objectives compare by one number: the decayed cross-entropy of the data's tokens."""
    data = rows([12, 20, 9], seed=8)
    expected = make_trainer(tmp_path, evaluation=data).evaluate()["eval_loss"]
    for more in OPTIONS.values():
        if not more.get("contiguous_prefix") and "sample_from_anchor" not in more:
            assert make_trainer(tmp_path, evaluation=data, **more).evaluate()["eval_loss"] == pytest.approx(expected)


@pytest.mark.parametrize("objective", ["target_argmax", "target_kl"])
def test_stored_final_states_give_the_loss_of_features_in_memory(tmp_path, objective):
    """A store made for the objective keeps what the target's head reads; only rounded to bf16."""
    more = dict(objective=objective, train=rows(UNEVEN, holes=True))
    disk = make_trainer(tmp_path / "out", features_dir=str(tmp_path / "store"), **more)
    memory = make_trainer(tmp_path / "out", drafter=disk.model, features="memory", **more)
    for states in (memory.train_dataset.features, memory.train_dataset.final_states):
        states[:] = [state.bfloat16() for state in states]
    disk.model.eval()
    expected = memory.compute_loss(disk.model, collate(memory)).item()
    assert disk.compute_loss(disk.model, collate(disk)).item() == pytest.approx(expected, rel=1e-5)


def test_a_store_without_final_states_is_refused(tmp_path):
    """target_kl from a feature store that holds taps only: the field is named."""
    make_trainer(tmp_path / "out", features_dir=str(tmp_path / "store"))
    with pytest.raises(DFlashError, match="final_hidden_states False"):
        make_trainer(tmp_path / "out", objective="target_kl", features_dir=str(tmp_path / "store"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(objective="kl"), "objective is 'kl'; it must be one of data, target_argmax, target_kl"),
        (dict(loss_weighting="exp"), "loss_weighting is 'exp'"),
        (dict(dpace_alpha=0.0), "dpace_alpha must be in"),
        (dict(attn_implementation="flash_attention_2"), "attn_implementation is 'flash_attention_2'"),
    ],
)
def test_unknown_options_are_refused(tmp_path, more, message):
    """Named with their choices."""
    with pytest.raises(DFlashError, match=message):
        make_trainer(tmp_path, **more)
