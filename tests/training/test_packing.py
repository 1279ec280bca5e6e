"""Packed rows: which examples go together, and that packing changes nothing but the padding."""

import random

import pytest
import torch
from conftest import tiny_target
from training_helpers import UNEVEN, collate, make_trainer, reference_loss, rows, tiny_drafter, weights_of
from transformers import AutoModelForCausalLM, BloomConfig, Mamba2Config

from dflash_hf.errors import DFlashError
from dflash_hf.target import FeatureCapture
from dflash_hf.training.packing import keeps_documents_apart, pack_lengths, states_of_batch


def mixed_lengths(count=400, longest=512, seed=0):
    """Many short answers and a few long ones."""
    source = random.Random(seed)
    return [min(longest, 16 + int(source.expovariate(1 / 90))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_every_example_is_in_one_row_and_rows_hold_what_they_can(seed):
    """A partition within the capacity; no two rows could be joined."""
    lengths = mixed_lengths(seed=seed)
    packed = pack_lengths(lengths, capacity=512)
    assert sorted(index for row in packed for index in row) == list(range(len(lengths)))
    totals = sorted(sum(lengths[i] for i in row) for row in packed)
    assert totals[-1] <= 512 and totals[0] + totals[1] > 512
    assert packed == pack_lengths(lengths, capacity=512)


def test_padding_of_a_mixed_set(tmp_path):
    """Over an epoch of batches of two rows at most a tenth is padding; the same examples unpacked waste far more."""
    data = rows(mixed_lengths(120, longest=200), prompt=6)
    shares = {}
    for packing in (True, False):
        trainer = make_trainer(
            tmp_path, train=data, packing=packing, max_length=200, per_device_train_batch_size=2, num_anchors=4
        )
        real = total = 0
        for batch in trainer.get_train_dataloader():
            real += int(batch["attention_mask"].sum())
            total += batch["attention_mask"].numel()
        assert real == sum(map(len, data["input_ids"]))
        shares[packing] = 1 - real / total
    assert shares[True] <= 0.10 < shares[False]


def test_an_example_longer_than_a_row_is_refused(tmp_path):
    """By name, before anything runs."""
    with pytest.raises(DFlashError, match="40 tokens, a packed row holds 30"):
        pack_lengths([10, 40], capacity=30)
    with pytest.raises(DFlashError, match="packed_length 10 is shorter than max_length"):
        make_trainer(tmp_path, packing=True, packed_length=10)


DRAFTERS = {
    "full": {},
    "sliding": dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6),
}


CASES = [
    *((kind, name, "online") for kind in DRAFTERS for name in ("dflash_blocks", "sdpa", "eager")),
    ("sliding", "dflash_blocks", "memory"),
    ("full", "dflash_blocks", "disk"),
]


@pytest.mark.parametrize(("kind", "implementation", "features"), CASES)
def test_packed_loss_and_gradient_equal_those_of_the_unpacked_examples(tmp_path, kind, implementation, features):
    """Eight uneven examples in rows of 60 tokens, holes in their masks, against one example and one block at a time."""
    target = tiny_target()
    drafter = tiny_drafter(target, **DRAFTERS[kind])
    data = rows(UNEVEN, holes=True)
    more = dict(max_length=60, attn_implementation=implementation, features=features)
    if features == "disk":
        more["features_dir"] = str(tmp_path / "store")
    packed = make_trainer(tmp_path, target=target, drafter=drafter, train=data, packing=True, **more)
    plain = make_trainer(tmp_path, target=target, drafter=drafter, train=data, **more)
    assert len(packed.train_dataset) == 3 and packed.packed_forward
    drafter.eval()
    results = []
    for trainer in (packed, plain):
        batch = collate(trainer)
        drafter.zero_grad()
        loss = trainer.compute_loss(drafter, batch)
        loss.backward()
        results.append((loss.item(), {name: p.grad.clone() for name, p in drafter.named_parameters()}, batch))
    (loss, gradients, batch), (expected, wanted, other) = results
    assert batch["input_ids"].shape[0] == 3 and batch["active_rows"].numel() == other["active_rows"].numel()
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).norm() <= 1e-4 * wanted[name].norm(), name
    if features != "disk":  # the store rounds features to bf16
        for trainer, blocks in ((packed, batch), (plain, other)):
            assert loss == pytest.approx(reference_loss(trainer, blocks, gamma=4.0).item(), rel=1e-5)


def test_anchors_and_labels_never_leave_their_document(tmp_path):
    """Every block of a packed batch is a block of its own example, at its own place."""
    trainer = make_trainer(tmp_path, train=rows(UNEVEN, holes=True), packing=True, max_length=60, num_anchors=50)
    batch = collate(trainer)
    size = trainer.model.config.block_size
    checked = 0
    for row in range(len(batch["input_ids"])):
        ids, documents = batch["input_ids"][row], batch["document_ids"][row]
        for anchor, keep, labels in zip(batch["anchors"][row], batch["keep"][row], batch["labels"][row]):
            if not keep:
                assert labels.eq(-100).all()
                continue
            assert documents[anchor] >= 0
            for slot in range(1, size):
                place = int(anchor) + slot
                if labels[slot] >= 0:
                    assert documents[place] == documents[anchor] and ids[place] == labels[slot]
                    checked += 1
                elif place < len(ids) and documents[place] == documents[anchor]:
                    assert slot and (place - 4) >= 0  # a hole in the loss mask
    assert checked > 300
    assert (batch["position_ids"][batch["document_ids"] >= 0].view(-1) == 0).sum() == len(UNEVEN)


@pytest.mark.parametrize("family", ["llama", "qwen3", "bloom", "mamba2"])
def test_packed_features_are_those_of_each_document(family, tmp_path):
    """Attention targets run the row, recurrent ones and those without positions each document; both are exact."""
    torch.manual_seed(0)
    if family == "bloom":
        config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=4, n_head=4, initializer_range=0.2)
        target = AutoModelForCausalLM.from_config(config).eval()
    elif family == "mamba2":
        config = Mamba2Config(
            vocab_size=97, hidden_size=32, num_hidden_layers=4, num_heads=8, head_dim=8, state_size=8, n_groups=1
        )
        target = AutoModelForCausalLM.from_config(config).eval()
    else:
        target = tiny_target(family)
    together = keeps_documents_apart(target, [0, 3])
    assert together == (family in ("llama", "qwen3"))
    batch = packed_batch(tmp_path)
    features, final = states_of_batch(target, [0, 3], batch, packed_forward=together)
    with FeatureCapture(target, [0, 3]) as capture, torch.no_grad():
        for places in batch["documents"]:
            places = places[places >= 0]
            with capture.recording():
                alone = target.get_decoder()(input_ids=batch["input_ids"].flatten()[places][None])
            expected = capture.take(features.device)[0]
            torch.testing.assert_close(features.flatten(0, 1)[places], expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(final.flatten(0, 1)[places], alone.last_hidden_state[0], rtol=1e-4, atol=1e-5)


def packed_batch(tmp_path):
    return collate(make_trainer(tmp_path, train=rows(UNEVEN), packing=True, max_length=60))


def test_a_leaking_target_is_noticed(tmp_path):
    """A target whose masks ignore restarting positions is run document by document."""
    target = tiny_target()
    inner = target.model.forward

    def leaking(input_ids=None, position_ids=None, **more):
        return inner(input_ids=input_ids, position_ids=None, **more)

    target.model.forward = leaking
    assert not keeps_documents_apart(target, [0, 2])
    trainer = make_trainer(tmp_path, target=target, train=rows(UNEVEN), packing=True, max_length=60)
    assert trainer.packed_forward is False
    batch = collate(trainer)
    leaked, _ = states_of_batch(target, [0, 2], batch, packed_forward=True)
    kept, _ = states_of_batch(target, [0, 2], batch, packed_forward=False)
    real = batch["document_ids"] > 0
    assert (leaked - kept)[real].abs().max() > 1e-2


def test_a_packed_run_trains(tmp_path):
    """trainer.train() on packed rows moves every parameter; its first update is that of the unpacked examples."""

    def first_update(packing):
        target = tiny_target()
        drafter = tiny_drafter(target)
        trainer = make_trainer(
            tmp_path / str(packing),
            target=target,
            drafter=drafter,
            optimizers=(torch.optim.SGD(drafter.parameters(), lr=0.1), None),
            packing=packing,
            max_length=60,
            per_device_train_batch_size=8,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
        )
        before = weights_of(drafter)
        trainer.train()
        return before, weights_of(drafter)

    before, packed = first_update(True)
    _, plain = first_update(False)
    for name in packed:
        assert not torch.equal(before[name], packed[name])
        assert (packed[name] - plain[name]).norm() <= 1e-4 * (plain[name] - before[name]).norm(), name
