"""Faults of other DFlash trainers, each put back here: the oracle of a training step must notice every one.

The oracle is a loop over examples, blocks and slots that builds no mask and no batch (`reference_loss`). Faults are
named after the list of known training faults that the project keeps; those of data preparation (templates without
generation marks, thinking mode) are tested in tests/data.
"""

import random

import pytest
import torch
from conftest import tiny_target
from training_helpers import (
    collate,
    documents_of,
    first_slot,
    make_trainer,
    reference_loss,
    rows,
    tiny_drafter,
    weights_of,
)

from dflash_hf import masks
from dflash_hf.errors import DatasetError
from dflash_hf.training import blocks, collator, trainer
from dflash_hf.training import masks as training_masks
from dflash_hf.training.anchors import IGNORE

IMPLEMENTATIONS = ("dflash_blocks", "sdpa", "eager")


def check_step(tmp_path, *, seed=0, implementation="dflash_blocks", packing=True, drafter_options=None, more=None):
    """One random batch (uneven examples, holes, tails, overlapping blocks, padding) against the oracle."""
    source = random.Random(seed)
    lengths = [source.randrange(7, 36) for _ in range(6)]
    target = tiny_target(seed=seed)
    drafter = tiny_drafter(target, block_size=source.choice([4, 8]), **(drafter_options or {}))
    run = make_trainer(
        tmp_path,
        target=target,
        drafter=drafter,
        train=rows(lengths, prompt=source.randrange(1, 5), seed=seed, holes=True),
        num_anchors=source.choice([2, 7, 40]),
        packing=packing,
        max_length=60,
        attn_implementation=implementation,
        decay_gamma=4.0,
        **(more or {}),
    )
    batch = collate(run)
    drafter.eval()
    check_blocks(run, batch)
    loss = run.compute_loss(drafter, batch)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    expected = reference_loss(run, batch, gamma=4.0)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in drafter.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name
    with torch.no_grad():
        assert run.draft_hidden_states(drafter, batch).isfinite().all()


def check_blocks(run, batch):
    """Anchors and labels of every example, from its tokens and loss mask alone."""
    examples = run.train_dataset.examples
    size = run.model.config.block_size
    by_ids = {tuple(ids): mask for ids, mask in zip(examples["input_ids"], examples["loss_mask"])}
    for row in range(len(batch["input_ids"])):
        seen = 0
        for start, ids in documents_of(batch, row):
            mask = by_ids[tuple(ids.tolist())]
            allowed = {i for i in range(len(ids) - 1) if mask[i] and mask[i + 1]}
            places = [
                (int(anchor) - start, labels.tolist())
                for anchor, keep, labels in zip(batch["anchors"][row], batch["keep"][row], batch["labels"][row])
                if keep and 0 <= int(anchor) - start < len(ids)
            ]
            assert len(places) == min(run.args.num_anchors, len(allowed))
            assert {anchor for anchor, _ in places} <= allowed and len({a for a, _ in places}) == len(places)
            seen += len(places)
            for anchor, labels in places:
                first = first_slot(run.model.config)
                for slot in range(size):
                    place = anchor + slot + 1 - first
                    wanted = slot >= first and place < len(ids) and mask[place]
                    assert labels[slot] == (int(ids[place]) if wanted else IGNORE), (anchor, slot)
        assert seen == int(batch["keep"][row].sum())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_random_steps_equal_the_oracle(tmp_path, implementation, packing, seed):
    """Anchors, labels, masks, positions, weights, loss and gradient, for every convention of slots and windows."""
    sliding = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=5)
    options = [{}, sliding, {"sample_from_anchor": True}, {**sliding, "window_rule": "anchor"}][seed % 4]
    check_step(tmp_path, seed=seed, implementation=implementation, packing=packing, drafter_options=options)


def mutated(change):
    """A `make_mask_mod` whose rule is changed by `change(visible, b, q, kv, arguments)`."""
    original = training_masks.make_mask_mod

    def make(**arguments):
        rule = original(**arguments)
        return lambda b, h, q, kv: change(rule(b, h, q, kv), b, q, kv, arguments)

    return make


def sees_the_anchor(visible, b, q, kv, a):
    return visible | ((kv == a["anchors"][b, q // a["block_size"]]) & a["keep"][b, q // a["block_size"]])


def sees_earlier_blocks(visible, b, q, kv, a):
    other = (kv - a["context_length"]) // a["block_size"]
    return visible | ((kv >= a["context_length"]) & (other < q // a["block_size"]))


def is_causal_in_the_block(visible, b, q, kv, a):
    return visible & ((kv < a["context_length"]) | (kv - a["context_length"] <= q))


def crosses_documents(visible, b, q, kv, a):
    row = torch.where(kv < a["context_length"], kv, 0)
    anchor = a["anchors"][b, q // a["block_size"]]
    return visible | ((kv < a["context_length"]) & (row < anchor) & a["keep"][b, q // a["block_size"]])


def hides_padding_blocks(visible, b, q, kv, a):
    return visible & a["keep"][b, q // a["block_size"]]


MASK_FAULTS = {
    "context includes the anchor's own target state": sees_the_anchor,
    "visibility by block index: cross-block leak": sees_earlier_blocks,
    "causal mask left on inside the block": is_causal_in_the_block,
    "blocks see other documents of a packed row": crosses_documents,
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MASK_FAULTS)
def test_mask_fault_is_noticed(tmp_path, monkeypatch, name, implementation):
    """A rule that lets through or hides one thing more; dense masks, which take the rule as it is."""
    check_step(tmp_path, seed=3, implementation=implementation)
    monkeypatch.setattr(training_masks, "make_mask_mod", mutated(MASK_FAULTS[name]))
    with pytest.raises(AssertionError):
        check_step(tmp_path, seed=3, implementation=implementation)


@pytest.mark.parametrize("name", ["causal mask left on inside the block", "blocks see other documents"])
def test_mask_fault_is_noticed_by_block_attention(tmp_path, monkeypatch, name):
    """The package's own attention scores a block's slots and its documents' rows by the same rule."""
    if name.startswith("causal"):
        monkeypatch.setattr(training_masks, "make_mask_mod", mutated(is_causal_in_the_block))
    else:
        original = blocks.training_masks
        monkeypatch.setattr(
            blocks, "training_masks", lambda **a: original(**{**a, "document_ids": None, "document_starts": None})
        )
    with pytest.raises(AssertionError):
        check_step(tmp_path, seed=3)


def test_fully_masked_padding_blocks_are_noticed(tmp_path, monkeypatch):
    """Padding blocks fully masked: NaN."""
    monkeypatch.setattr(training_masks, "make_mask_mod", mutated(hides_padding_blocks))
    with pytest.raises(AssertionError):
        for seed in range(4):
            check_step(tmp_path, seed=seed, packing=False)


def test_boolean_mask_added_as_a_number_is_noticed(tmp_path, monkeypatch):
    """A boolean mask added as a number hides nothing."""
    monkeypatch.setattr(masks, "to_additive", lambda visible, *, dtype: visible.to(dtype))
    with pytest.raises(AssertionError):
        check_step(tmp_path, seed=1, implementation="eager")


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_labels_are_noticed(tmp_path, monkeypatch, shift):
    """Labels shifted by one."""
    original = collator.block_labels

    def shifted(*, input_ids, **more):
        return original(input_ids=input_ids.roll(shift), **more)

    monkeypatch.setattr(collator, "block_labels", shifted)
    with pytest.raises(AssertionError):
        check_step(tmp_path, seed=1)


def test_blocks_across_documents_are_noticed(tmp_path, monkeypatch):
    """Blocks that run across document boundaries: labels taken from the row, not from the example."""

    def of_the_row(self, examples):
        joined = dict(examples[0])
        for key in ("input_ids", "loss_mask"):
            joined[key] = [token for example in examples for token in example[key]]
        return original(self, [joined])

    original = collator.DFlashDataCollator._blocks_of_row
    monkeypatch.setattr(collator.DFlashDataCollator, "_blocks_of_row", of_the_row)
    with pytest.raises(AssertionError):
        check_step(tmp_path, seed=1)


@pytest.mark.parametrize("fault", ["one too many", "one too few"])
def test_off_by_one_in_the_anchor_range_is_noticed(tmp_path, monkeypatch, fault):
    """The last supervised token may not be an anchor, the one before it may."""
    original = collator.sample_anchors

    def sample(*, loss_mask, **more):
        mask = loss_mask.clone()
        if fault == "one too few":
            mask[-1] = 0
            return original(loss_mask=mask, **more)
        chosen, keep = original(loss_mask=mask, **more)
        last = int(keep.sum()) - 1
        if last >= 0:
            chosen[last] = len(mask) - 1
        return chosen, keep

    monkeypatch.setattr(collator, "sample_anchors", sample)
    with pytest.raises(AssertionError):
        for seed in range(4):
            check_step(tmp_path, seed=seed)


def update(tmp_path, batch_size, accumulation):
    target = tiny_target()
    drafter = tiny_drafter(target)
    run = make_trainer(
        tmp_path,
        target=target,
        drafter=drafter,
        train=rows([6, 40, 9, 23]),
        optimizers=(torch.optim.SGD(drafter.parameters(), lr=0.1), None),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
    )
    run.train()
    return torch.cat([value.flatten() for value in weights_of(drafter).values()])


def test_loss_averaged_per_micro_batch_is_noticed(tmp_path, monkeypatch):
    """Loss averaged per micro-batch: the update depends on the split."""
    whole = update(tmp_path, 4, 1)
    assert (update(tmp_path, 1, 4) - whole).norm() <= 1e-6 * whole.norm()

    original = trainer.DFlashTrainer.compute_loss
    monkeypatch.setattr(
        trainer.DFlashTrainer,
        "compute_loss",
        lambda self, model, inputs, return_outputs=False, num_items_in_batch=None: original(self, model, inputs) / 4,
    )
    assert (update(tmp_path, 1, 4) - whole).norm() > 1e-5 * whole.norm()


def test_half_precision_parameters_are_noticed(tmp_path, monkeypatch):
    """bf16 parameters without fp32 masters: norms stay at 1.0."""

    def norm_after_a_step():
        target = tiny_target()
        drafter = tiny_drafter(target).bfloat16()
        make_trainer(tmp_path, target=target, drafter=drafter, learning_rate=1e-4).train()
        return drafter.norm.weight.detach().float()

    assert (norm_after_a_step() != 1).any()
    from dflash_hf import DFlashDraftModel

    monkeypatch.setattr(DFlashDraftModel, "float", lambda self: self)
    assert (norm_after_a_step() == 1).all(), "the put-back fault must freeze the norms, or this test shows nothing"


def test_a_batch_without_labels_reaches_every_parameter(tmp_path):
    """A rank without anchors skips its step: other ranks hang. Ours steps with a zero gradient for every parameter."""
    run = make_trainer(tmp_path, train=rows([6, 30, 12]))
    batch = collate(run)
    empty = dict(
        batch,
        keep=torch.zeros_like(batch["keep"]),
        labels=torch.full_like(batch["labels"], IGNORE),
        loss_weights=torch.zeros_like(batch["loss_weights"]),
        active_rows=batch["active_rows"][:0],
        loss_normaliser=torch.zeros(()),
    )
    run.compute_loss(run.model, empty, num_items_in_batch=torch.tensor(3.0)).backward()
    for name, parameter in run.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.eq(0).all(), name


def test_an_all_zero_loss_mask_is_an_error(tmp_path):
    """A chat template without generation marks gives an all-zero loss mask; nothing trains on it silently."""
    data = rows([12, 15])
    data = data.map(lambda row: {"loss_mask": [0] * len(row["loss_mask"])})
    with pytest.raises(DatasetError, match="supervised"):
        make_trainer(tmp_path, train=data)


def synchronisations(run, steps=3):
    """Operations within training steps that would make the host wait for a device."""
    from torch.utils._python_dispatch import TorchDispatchMode

    waits = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.masked_select.default"}

    class Spy(TorchDispatchMode):
        seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if str(func) in waits:
                self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    Spy.seen = []
    run.create_optimizer()
    batches = [collate(run, [i, i + 1]) for i in range(steps)]
    with Spy() as spy:
        for batch in batches:
            total = run._get_num_items_in_batch([batch], torch.device("cpu"))
            run.training_step(run.model, batch, total)
    return spy.seen


@pytest.mark.parametrize(
    "more", [{}, dict(packing=True, max_length=60), dict(loss_weighting="dpace", objective="target_kl")]
)
def test_no_step_waits_for_the_device(tmp_path, monkeypatch, more):
    """`.item()` in every step: ours have none, with stored features and masks that are tensors, as on a GPU.

    (An online step runs the target too, in whose forward pass transformers looks at its mask once or twice.)
    """
    data = rows([9] * 40) if more.get("packing") else None
    run = make_trainer(tmp_path, train=data, attn_implementation="sdpa", features="memory", **more)
    synchronisations(run, steps=1)  # warm-up
    assert synchronisations(run) == []
    original = trainer.RunningCounts.add

    def with_item(self, *, tokens, counts):
        float(counts.block_count)
        original(self, tokens=tokens, counts=counts)

    monkeypatch.setattr(trainer.RunningCounts, "add", with_item)
    assert len(synchronisations(run)) == 3, "the put-back fault must be seen, or this test shows nothing"


def test_evaluation_runs_the_drafter(tmp_path):
    """Evaluation that runs only the target: numbers would not move with the drafter's weights."""
    run = make_trainer(tmp_path, evaluation=rows([20, 12], seed=4))
    before = run.evaluate()
    with torch.no_grad():
        run.model.fc.weight.mul_(-1)
    after = run.evaluate()
    assert before["eval_loss"] != after["eval_loss"]


def test_acceptance_length_that_is_mean_accuracy_is_noticed(tmp_path, monkeypatch, trained_pair):
    """ "Acceptance length" that is really mean accuracy: the trainer's number is that of `count_blocks`' prefix."""
    import copy

    target, drafter = (copy.deepcopy(model) for model in trained_pair)
    prompts = torch.randint(1, 120, (3, 6), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        text = target.generate(prompts, do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0)
    from datasets import Dataset

    data = Dataset.from_dict({"input_ids": text.tolist(), "loss_mask": [[0] * 5 + [1] * 25] * 3})
    run = make_trainer(tmp_path, target=target, drafter=drafter, train=data, evaluation=data, num_anchors=20)
    metrics = run.evaluate()
    places = drafter.config.block_size - 1
    mean = 1 + sum(metrics[f"eval_slot_accuracy_{place}"] for place in range(1, places + 1))
    assert metrics["eval_block_acceptance_length"] < mean - 0.05
