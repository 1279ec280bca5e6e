"""DFlashTrainer: the update, the features, evaluation, saving, resuming."""

import copy
import json
import math
from collections import Counter

import pytest
import torch
from conftest import tiny_target
from training_helpers import (
    collate,
    make_trainer,
    reference_blocks,
    reference_loss,
    rows,
    tiny_drafter,
    weights_of,
)
from transformers import TrainerCallback

from dflash_hf import DFlashDraftModel
from dflash_hf.data.features import FeatureStore, build_feature_store
from dflash_hf.training.anchors import default_gamma


def test_loss_equals_loops_over_blocks(tmp_path):
    """compute_loss against one unpadded example, one block, one slot at a time, and its gradient."""
    trainer = make_trainer(tmp_path, train=rows(holes=True))
    batch = collate(trainer)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    expected = reference_loss(trainer, batch, gamma=4.0)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in trainer.model.named_parameters():
        difference = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert difference < 1e-4, name


def sgd(drafter, rate=1.0):
    return torch.optim.SGD(drafter.parameters(), lr=rate)


def one_update(tmp_path, batch_size, accumulation, kind):
    """Start and end weights of one optimizer step over the same four examples of very different response lengths."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    start = weights_of(drafter)
    more = dict(max_grad_norm=0.0, lr_scheduler_type="constant") if kind == "sgd" else {}
    optimizer = sgd(drafter, 0.1) if kind == "sgd" else None
    trainer = make_trainer(
        tmp_path / f"{batch_size}x{accumulation}",
        target=target,
        drafter=drafter,
        train=rows([6, 40, 9, 23]),
        optimizers=(optimizer, None),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        adam_epsilon=1e-3,
        num_anchors=12,
        **more,
    )
    output = trainer.train()
    return start, weights_of(drafter), output.training_loss


@pytest.mark.parametrize("kind", ["sgd", "adamw with clipping"])
def test_update_does_not_depend_on_how_the_batch_is_split(tmp_path, kind):
    """4x1, 2x2, 1x4, uneven: one normaliser over the accumulation window, so equal updates and equal logged loss.

    (AdamW with eps 1e-3, so that elements whose gradient is rounding noise do not turn into whole steps.)
    """
    start, whole, loss = one_update(tmp_path, 4, 1, kind)
    for split in ((2, 2), (1, 4), (3, 2), (1, 6)):  # also windows that are not full
        _, parts, other_loss = one_update(tmp_path, *split, kind)
        assert other_loss == pytest.approx(loss, rel=1e-5)
        for name in whole:
            step = (whole[name] - start[name]).norm()
            assert step > 0
            assert (parts[name] - whole[name]).norm() <= 1e-6 * whole[name].norm(), name
            assert (parts[name] - whole[name]).norm() <= 1e-3 * step, name


def test_every_parameter_moves_and_the_target_does_not(tmp_path):
    """All trainable tensors of the drafter change in one step; the target's stay bit-equal, frozen and in eval mode."""
    target = tiny_target()
    before_target = weights_of(target)
    trainer = make_trainer(tmp_path, target=target)
    before = weights_of(trainer.model)
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad and not torch.equal(parameter, before[name]), name
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, before_target[name]) and not parameter.requires_grad, name
        assert parameter.grad is None
    assert not target.training


def test_gradients_stay_finite_with_padding_and_without_labels(tmp_path):
    """Padding rows, padding blocks and one row without any label; then a batch with none at all: loss 0."""
    trainer = make_trainer(tmp_path, train=rows([6, 30, 12]), num_anchors=16)
    batch = collate(trainer)
    empty = dict(batch, keep=batch["keep"].clone(), labels=batch["labels"].clone())
    empty["keep"][1], empty["labels"][1] = False, -100
    empty["loss_weights"] = batch["loss_weights"].clone()
    empty["loss_weights"][1] = 0
    empty["active_rows"] = empty["loss_weights"].flatten().nonzero().flatten()
    none = dict(empty, labels=torch.full_like(batch["labels"], -100), keep=torch.zeros_like(batch["keep"]))
    none["loss_weights"] = torch.zeros_like(batch["loss_weights"])
    none["active_rows"] = torch.zeros(0, dtype=torch.long)
    for case in (batch, empty, none):
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, case, num_items_in_batch=case["loss_weights"].sum())
        loss.backward()
        assert loss.isfinite()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trainer.model.parameters())
    assert loss == 0 and all(p.grad.eq(0).all() for p in trainer.model.parameters())


def test_training_with_labels_all_outside_the_frequent_tokens(tmp_path):
    """loss_vocab_size can leave a micro-batch without any label; the step still runs and stays finite."""
    data = rows([8, 8, 30, 30])
    trainer = make_trainer(
        tmp_path,
        train=data,
        loss_vocab_size=2,
        loss_vocab_negatives=3,
        num_anchors=1,
        per_device_train_batch_size=1,
        max_steps=8,
    )
    weights = [float(collate(trainer, [i])["loss_weights"].sum()) for i in range(4)]
    assert 0.0 in weights, "the case needs a micro-batch without labels"
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_online_memory_and_disk_features_give_the_same_loss(tmp_path):
    """The same batch through all three; the disk store in fp32, since bf16 storage rounds an fp32 target's features."""
    target = tiny_target()
    losses = {}
    for kind in ("online", "memory"):
        trainer = make_trainer(tmp_path / kind, target=target, features=kind)
        trainer.model.eval()
        batch = collate(trainer)
        assert ("features" in batch) == (kind != "online")
        losses[kind] = trainer.compute_loss(trainer.model, batch).item()
    store = build_feature_store(
        tmp_path / "store", target=target, dataset=trainer.train_dataset.examples, layer_ids=[0, 2], dtype=torch.float32
    )
    trainer.train_dataset.features = store
    losses["disk"] = trainer.compute_loss(trainer.model, collate(trainer)).item()
    assert losses["memory"] == pytest.approx(losses["online"], rel=1e-5)
    assert losses["disk"] == pytest.approx(losses["online"], rel=1e-5)


def test_disk_features_are_used_and_only_rounded(tmp_path):
    """features_dir alone means disk; train and eval get a store each; the loss is that of features rounded to bf16."""
    target = tiny_target()
    trainer = make_trainer(
        tmp_path / "out", target=target, evaluation=rows([12, 20], seed=5), features_dir=str(tmp_path)
    )
    assert trainer.args.features == "disk"
    assert len(FeatureStore(tmp_path / "train")) == 8 and len(FeatureStore(tmp_path / "eval")) == 2
    trainer.model.eval()
    disk = trainer.compute_loss(trainer.model, collate(trainer)).item()
    memory = make_trainer(tmp_path / "other", target=target, drafter=trainer.model, features="memory")
    exact = memory.compute_loss(trainer.model.eval(), collate(memory)).item()
    memory.train_dataset.features = [states.bfloat16() for states in memory.train_dataset.features]
    rounded = memory.compute_loss(trainer.model.eval(), collate(memory)).item()
    assert disk == pytest.approx(rounded, rel=1e-5)
    assert disk == pytest.approx(exact, rel=5e-2)
    before = weights_of(trainer.model)
    trainer.train()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters())
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_memory_training_never_runs_the_target(tmp_path):
    """With stored features the target's layers are not called in a step."""
    trainer = make_trainer(tmp_path, features="memory", max_steps=2)

    def fail(*_):
        raise AssertionError("the target ran")

    trainer.target_model.get_decoder().register_forward_pre_hook(fail)
    trainer.train()


def brute_force_metrics(trainer, batches, gamma):
    slots = trainer.model.config.block_size - 1
    loss, weight_sum, prefixes, blocks = 0.0, 0.0, 0, 0
    hits, counts = [0] * slots, [0] * slots
    for batch in batches:
        with torch.no_grad():
            for _, _, logits, labels in reference_blocks(trainer, batch):
                blocks += 1
                alive = True
                for slot in range(1, slots + 1):
                    label = int(labels[slot])
                    right = label >= 0 and int(logits[slot].argmax()) == label
                    alive = alive and right
                    prefixes += alive
                    if label >= 0:
                        weight = math.exp(-(slot - 1) / gamma)
                        loss += weight * float(torch.logsumexp(logits[slot], 0) - logits[slot, label])
                        weight_sum += weight
                        hits[slot - 1] += right
                        counts[slot - 1] += 1
    metrics = {
        "eval_loss": loss / weight_sum,
        "eval_block_acceptance_length": 1 + prefixes / blocks,
        "eval_slot_accuracy": sum(hits) / sum(counts),
    }
    for slot in range(slots):
        metrics[f"eval_slot_accuracy_{slot + 1}"] = hits[slot] / max(counts[slot], 1)
    return metrics


@pytest.mark.parametrize("more", [{}, dict(loss_vocab_size=3, loss_vocab_negatives=2), dict(decay_gamma=2.0)])
def test_evaluation_equals_loops(trained_pair, tmp_path, more):
    """Loss, accuracy by slot and the true acceptance length (correct prefix) of a drafter that does hit.

    The whole vocabulary counts, also when training covers a part of it.
    """
    target, drafter = trained_pair
    drafter = copy.deepcopy(drafter)
    with torch.no_grad():
        prompts = torch.randint(1, 120, (5, 6), generator=torch.Generator().manual_seed(3))
        text = target.generate(prompts, do_sample=False, max_new_tokens=22, eos_token_id=None, pad_token_id=0)
    from datasets import Dataset

    lengths = [28, 20, 25, 13, 28]
    data = Dataset.from_dict(
        {
            "input_ids": [row[:length].tolist() for row, length in zip(text, lengths)],
            "loss_mask": [[0] * 5 + [1] * (length - 5) for length in lengths],
        }
    )
    trainer = make_trainer(
        tmp_path, target=copy.deepcopy(target), drafter=drafter, train=data, evaluation=data, num_anchors=10, **more
    )
    metrics = trainer.evaluate()
    batches = [collate(trainer, part, "eval") for part in ([0, 1, 2], [3, 4])]
    expected = brute_force_metrics(trainer, batches, more.get("decay_gamma", 4.0))
    assert expected["eval_block_acceptance_length"] > 2 and 0.2 < expected["eval_slot_accuracy"] < 1
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value, rel=1e-5), key
    assert trainer.evaluate()["eval_loss"] == metrics["eval_loss"], "evaluation draws the same blocks every time"


def test_evaluation_prefix_and_state(tmp_path):
    """evaluate(metric_key_prefix) renames every key and does not train; the next training step is in train mode."""
    trainer = make_trainer(tmp_path, evaluation=rows([12, 15], seed=8))
    before = weights_of(trainer.model)
    metrics = trainer.evaluate(metric_key_prefix="held_out")
    assert {"held_out_loss", "held_out_block_acceptance_length", "held_out_slot_accuracy_7"} <= set(metrics)
    assert all(torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters())
    modes = []

    class Spy(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            modes.append(model.training)

    trainer.add_callback(Spy())
    trainer.train()
    assert modes == [True]


def test_loss_over_a_part_of_the_vocabulary(tmp_path):
    """loss_vocab_size: softmax over frequent tokens and drawn negatives only, rarer labels dropped, by loops."""
    data = rows([20, 31, 14, 26])
    trainer = make_trainer(tmp_path, train=data, loss_vocab_size=30, loss_vocab_negatives=17)
    counts = {}
    for ids, mask in zip(data["input_ids"], data["loss_mask"]):
        for token, supervised in zip(ids, mask):
            counts[token] = counts.get(token, 0) + supervised
    frequent = sorted((token for token in counts if counts[token]), key=lambda token: (-counts[token], token))[:30]
    batch = collate(trainer)
    tokens = batch["loss_token_ids"].tolist()
    assert set(frequent) <= set(tokens) and len(tokens) == len(set(tokens)) == 47 and tokens == sorted(tokens)
    assert len(set(batch["labels"][batch["labels"] >= 0].tolist()) - set(frequent)) > 0, "some labels must be dropped"
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradient = trainer.model.fc.weight.grad.clone()
    trainer.model.zero_grad()
    expected = reference_loss(trainer, batch, gamma=4.0, vocabulary=(frequent, tokens))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, trainer.model.fc.weight.grad, rtol=1e-3, atol=1e-6)


def test_negatives_change_with_the_batch(tmp_path):
    """Other tokens are drawn for each first example and epoch, so that all are pushed down in time; the same again."""
    trainer = make_trainer(tmp_path, loss_vocab_size=10, loss_vocab_negatives=5)
    first, again, other = (collate(trainer, [i])["loss_token_ids"].tolist() for i in (0, 0, 1))
    assert first == again != other
    trainer.train_dataset.set_epoch(1)
    assert collate(trainer, [0])["loss_token_ids"].tolist() != first


def test_part_of_the_vocabulary_that_is_the_whole_is_the_plain_loss(tmp_path):
    """With every token frequent or drawn, nothing changes but labels never seen in training."""
    trainer = make_trainer(tmp_path, loss_vocab_size=97, loss_vocab_negatives=97)
    trainer.model.eval()
    batch = collate(trainer)
    plain = {key: value for key, value in batch.items() if key != "loss_token_ids"}
    part = trainer.compute_loss(trainer.model, batch).item()
    assert part == pytest.approx(trainer.compute_loss(trainer.model, plain).item(), rel=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_loss_uses_the_heads_own_transform(tmp_path, softcap):
    """A softcap of the drafter's config enters the loss, over the whole vocabulary and over a part of it alike."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.config.final_logit_softcapping = softcap
    whole = make_trainer(tmp_path / "a", target=target, drafter=drafter)
    part = make_trainer(tmp_path / "b", target=target, drafter=drafter, loss_vocab_size=97, loss_vocab_negatives=97)
    drafter.eval()
    batch = collate(whole)
    value = whole.compute_loss(drafter, batch).item()
    assert part.compute_loss(drafter, collate(part)).item() == pytest.approx(value, rel=1e-5)
    total, weights = 0.0, 0.0
    for _, _, logits, labels in reference_blocks(whole, batch):
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        for slot in range(1, 8):
            if labels[slot] >= 0:
                weight = math.exp(-(slot - 1) / 4)
                total += weight * float(torch.logsumexp(logits[slot], 0) - logits[slot, labels[slot]])
                weights += weight
    assert value == pytest.approx(total / weights, rel=1e-5)


def test_saved_drafter_is_read_back_equal(tmp_path):
    """save_model writes a complete drafter, and only it: equal tensors, the target's name, no target weights."""
    target = tiny_target()
    target.config._name_or_path = "someone/a-target"
    trainer = make_trainer(tmp_path / "out", target=target)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "saved")
    expected = weights_of(trainer.model)
    assert set(dict(loaded.named_parameters())) == set(expected)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())
    for name in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "input_embedding_scale"):
        assert getattr(loaded.config, name) == getattr(trainer.model.config, name), name
    assert "someone/a-target" in (tmp_path / "saved" / "config.json").read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_drafter_is_trained_in_fp32(tmp_path, dtype):
    """bf16 norms under AdamW stay at 1.0: the trainer casts, and norms move by less than a bf16 ulp in one step."""
    target = tiny_target()
    drafter = tiny_drafter(target).to(dtype)
    trainer = make_trainer(tmp_path, target=target, drafter=drafter, learning_rate=1e-4)
    trainer.train()
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    moved = (drafter.norm.weight - 1).abs()
    assert moved.max() > 0 and moved.max() < 2**-8
    inverse = drafter.rotary_emb.inv_freq
    assert inverse.dtype == torch.float32
    assert torch.equal(inverse, tiny_drafter(target).rotary_emb.inv_freq)


def test_bf16_autocast_step(tmp_path):
    """args.bf16 runs the drafter under autocast with fp32 parameters, in training and in evaluation."""
    trainer = make_trainer(tmp_path, bf16=True, evaluation=rows([12, 15], seed=8))
    before = weights_of(trainer.model)
    trainer.train()
    moved = [not torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters()]
    assert all(moved) and {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    exact = make_trainer(tmp_path / "exact", drafter=trainer.model, evaluation=rows([12, 15], seed=8))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(exact.evaluate()["eval_loss"], rel=2e-2)


def test_bf16_target_trains_an_fp32_drafter(tmp_path):
    """A half-precision target is used as it is; its head and features are cast where they meet the drafter."""
    target = tiny_target().bfloat16()
    trainer = make_trainer(tmp_path, target=target, evaluation=rows([12, 15], seed=8))
    before = weights_of(trainer.model)
    trainer.train()
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    assert {parameter.dtype for parameter in target.parameters()} == {torch.bfloat16}
    for name, parameter in trainer.model.named_parameters():
        assert parameter.isfinite().all() and not torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("kind", ["bf16 target", "bf16 target and autocast"])
def test_part_of_the_vocabulary_with_a_bf16_target(tmp_path, kind):
    """loss_vocab_size reads rows of the head: they meet fp32 hidden states, which the whole head casts."""
    target = tiny_target().bfloat16()
    more = dict(loss_vocab_size=97, loss_vocab_negatives=97, bf16="autocast" in kind)
    trainer = make_trainer(tmp_path, target=target, **more)
    batch = collate(trainer)
    plain = {key: value for key, value in batch.items() if key != "loss_token_ids"}
    trainer.model.eval()
    with trainer.accelerator.autocast():
        expected = trainer.compute_loss(trainer.model, plain).item()
        assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(expected, rel=1e-4)
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_best_model_is_loaded_at_the_end(tmp_path):
    """load_best_model_at_end works with our own metric; the weights are those of the best checkpoint."""
    trainer = make_trainer(
        tmp_path,
        evaluation=rows([12, 15], seed=8),
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    best = 2 * (1 + losses.index(min(losses)))
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    saved = DFlashDraftModel.from_pretrained(trainer.state.best_model_checkpoint)
    current = weights_of(trainer.model)
    assert all(torch.equal(parameter, current[name]) for name, parameter in saved.named_parameters())


def test_evaluate_takes_another_dataset(tmp_path):
    """Trainer.evaluate(eval_dataset=...) is transformers' own way to evaluate on other data."""
    first, other = rows([12, 15], seed=8), rows([20, 11], seed=9)
    trainer = make_trainer(tmp_path, evaluation=first)
    expected = make_trainer(tmp_path, drafter=trainer.model, target=trainer.target_model, evaluation=other).evaluate()
    assert trainer.evaluate(eval_dataset=other)["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


def test_gradient_checkpointing_gives_the_same_gradients(tmp_path):
    """Recomputed layers: equal loss and gradients."""
    results = []
    for use in (False, True):
        trainer = make_trainer(tmp_path / str(use), gradient_checkpointing=use)
        if use:
            trainer.model.gradient_checkpointing_enable(dict(use_reentrant=False))
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, collate(trainer))
        loss.backward()
        results.append((loss.item(), {name: p.grad for name, p in trainer.model.named_parameters()}))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-4, atol=1e-6)


class Losses(TrainerCallback):
    """Keeps the training logs."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)


def test_training_logs_accuracy_since_the_last_log(tmp_path):
    """`slot_accuracy` beside `loss` is between 0 and 1 and the sums start anew after each log."""
    spy = Losses()
    trainer = make_trainer(tmp_path, logging_strategy="steps", logging_steps=2, max_steps=4, callbacks=[spy])
    trainer.train()
    logs = [entry for entry in spy.logs if "loss" in entry]
    assert len(logs) == 2 and all(0 <= entry["slot_accuracy"] <= 1 for entry in logs)
    assert trainer.counts.sums.eq(0).all()


def epochs_seen(tmp_path, **more):
    """(epoch, index) of every collated example of a run, written by the collator, whichever process it runs in."""
    trainer = make_trainer(
        tmp_path / "out",
        train=rows([9, 12, 14]),
        per_device_train_batch_size=1,
        max_steps=-1,
        num_train_epochs=3,
        **more,
    )
    log, inner = tmp_path / "seen.txt", trainer.data_collator

    def collator(examples):
        with log.open("a") as file:
            file.writelines(f"{example['epoch']} {example['index']}\n" for example in examples)
        return inner(examples)

    trainer.data_collator = collator
    trainer.train()
    return [tuple(map(int, line.split())) for line in log.read_text().splitlines()]


@pytest.mark.parametrize(
    "more",
    [
        {},
        dict(dataloader_num_workers=1),
        dict(dataloader_num_workers=1, dataloader_persistent_workers=True),
    ],
    ids=["main process", "worker", "persistent worker"],
)
def test_anchors_are_drawn_anew_in_every_epoch(tmp_path, more):
    """Each example is seen once with each epoch number, also when loader workers hold copies of the data set."""
    seen = epochs_seen(tmp_path, **more)
    assert sorted(seen) == [(epoch, index) for epoch in range(3) for index in range(3)]


RESUMES = {
    "adamw": {},
    "muon": dict(optimizer="muon", weight_decay=0.01),
    "muon fp32": dict(optimizer="muon", muon_fp32=True),
    "accumulation": dict(per_device_train_batch_size=1, gradient_accumulation_steps=2),
    "loss vocabulary": dict(loss_vocab_size=40, loss_vocab_negatives=9),
    "workers": dict(dataloader_num_workers=1),
    "between epochs": dict(save_steps=4),
}


@pytest.mark.parametrize("kind", RESUMES)
def test_resumed_run_ends_with_equal_weights(tmp_path, kind):
    """Stopped in mid-epoch (or after one) and resumed afresh: the same order, anchors, optimizer state and schedule."""

    def run(folder, resume=None):
        trainer = make_trainer(
            folder,
            **{
                **dict(
                    max_steps=-1,
                    num_train_epochs=3,
                    per_device_train_batch_size=2,
                    warmup_steps=2,
                    save_strategy="steps",
                    save_steps=6,
                ),
                **RESUMES[kind],
            },
        )
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == 12
        return weights_of(trainer.model)

    whole = run(tmp_path / "whole")
    stop = RESUMES[kind].get("save_steps", 6)
    checkpoint = tmp_path / "whole" / f"checkpoint-{stop}"
    assert json.loads((checkpoint / "trainer_state.json").read_text())["epoch"] == stop / 4
    resumed = run(tmp_path / "resumed", str(checkpoint))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize("muon_fp32", [False, True])
def test_muon_gets_the_matrices_and_adamw_the_norms(tmp_path, muon_fp32):
    """optimizer='muon': two groups with their own rates; every parameter moves."""
    trainer = make_trainer(tmp_path, optimizer="muon", muon_learning_rate=3e-3, learning_rate=5e-4, muon_fp32=muon_fp32)
    before = weights_of(trainer.model)
    optimizer = trainer.create_optimizer()
    matrices, others = optimizer.param_groups
    assert {p.dim() for p in matrices["params"]} == {2} and {p.dim() for p in others["params"]} == {1}
    assert len(matrices["params"]) + len(others["params"]) == len(before)
    assert (matrices["lr"], others["lr"]) == (3e-3, 5e-4)
    assert optimizer.iteration_dtype == (torch.float32 if muon_fp32 else torch.bfloat16)
    trainer.train()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters())


def test_default_gamma_follows_the_block_size(tmp_path):
    """Without decay_gamma the collator uses the paper's value for the drafter's block; with it, that one."""
    target = tiny_target()
    for size in (4, 8, 16):
        trainer = make_trainer(tmp_path, target=target, drafter=tiny_drafter(target, block_size=size))
        assert trainer.data_collator.gamma == default_gamma(size)
    assert make_trainer(tmp_path, decay_gamma=2.5).data_collator.gamma == 2.5


def test_max_length_cuts_examples(tmp_path):
    """No batch is longer than args.max_length."""
    trainer = make_trainer(tmp_path, max_length=11)
    assert collate(trainer)["input_ids"].shape[1] == 11


def test_data_seed_draws_other_anchors(tmp_path):
    """data_seed wins over seed; equal seeds draw equal blocks."""
    anchors = [
        collate(make_trainer(tmp_path, train=rows([60, 70]), **more))["anchors"].tolist()
        for more in (dict(seed=1), dict(seed=2), dict(seed=2, data_seed=1), dict(seed=1))
    ]
    assert anchors[0] == anchors[2] == anchors[3] != anchors[1]


def test_trainer_leaves_no_hook_on_the_target(tmp_path):
    """Feature hooks live only while a batch is computed."""
    trainer = make_trainer(tmp_path, evaluation=rows([12], seed=3))
    trainer.train()
    trainer.evaluate()
    for module in trainer.target_model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_the_index_of_frequent_tokens_is_counted_and_saved(tmp_path):
    """frequent_tokens=: the most frequent of the training responses, with the drafter in the output folder."""
    data = rows()
    trainer = make_trainer(tmp_path, train=data, frequent_tokens=6)
    trainer.save_model()
    counts = Counter(
        token for ids, mask in zip(data["input_ids"], data["loss_mask"]) for token, on in zip(ids, mask) if on
    )
    saved = DFlashDraftModel.from_pretrained(tmp_path).frequent_token_ids.tolist()
    assert len(saved) == 6
    assert [counts[token] for token in saved] == sorted(counts.values(), reverse=True)[:6]
    assert collate(trainer).get("loss_token_ids") is None  # the loss still covers the whole vocabulary
