"""The batch: padding on the right, anchors of each example's own, weights that are known before the forward pass."""

import pytest
import torch
from datasets import Dataset
from training_helpers import rows

from dflash_hf import DFlashDataCollator, frequent_tokens
from dflash_hf.training.anchors import block_labels, example_generator, sample_anchors
from dflash_hf.training.collator import DrafterDataset


def collator(**more):
    return DFlashDataCollator(**{**dict(block_size=8, num_anchors=6, gamma=4.0, seed=3), **more})


def test_batch_of_uneven_examples():
    """Shapes, padding and attention mask; labels never point into the padding."""
    data = DrafterDataset(rows([9, 31, 14]))
    batch = collator()([data[i] for i in range(3)])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (3, 31)
    assert batch["attention_mask"].sum(1).tolist() == [9, 31, 14]
    assert batch["input_ids"][0, 9:].eq(0).all()
    assert batch["labels"].shape == batch["loss_weights"].shape == (3, 6, 8) and batch["anchors"].shape == (3, 6)
    active = batch["active_rows"].tolist()
    weights = batch["loss_weights"].flatten().tolist()
    assert active == [i for i, weight in enumerate(weights) if weight > 0]
    labels = batch["labels"].flatten()[batch["active_rows"]]
    assert (labels >= 0).all()
    places = batch["label_places"]
    assert len(places) == len(places.unique()) < len(active), "blocks overlap"
    assert torch.equal(batch["input_ids"].flatten()[places + 1][batch["label_place_of"]], labels)


def test_an_example_gets_the_same_blocks_in_any_batch():
    """Alone or padded beside others, in any place: anchors and labels depend on the example only."""
    data = DrafterDataset(rows([9, 31, 14]))
    together = collator()([data[2], data[1], data[0]])
    for place, index in enumerate((2, 1, 0)):
        alone = collator()([data[index]])
        width = alone["keep"].shape[1]
        for key in ("anchors", "keep", "labels", "loss_weights"):
            assert torch.equal(together[key][place, :width], alone[key][0]), key
        assert not together["keep"][place, width:].any() and together["loss_weights"][place, width:].eq(0).all()
        row = data[index]
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])
        generator = example_generator(seed=3, epoch=0, index=index)
        anchors, keep = sample_anchors(loss_mask=mask, num_anchors=6, generator=generator)
        labels = block_labels(input_ids=ids, loss_mask=mask, anchors=anchors, keep=keep, block_size=8)
        assert torch.equal(labels[:width], alone["labels"][0]) and width == keep.sum()


@pytest.mark.parametrize("lengths, slots", [([9, 7], 4), ([9, 31], 6), ([6], 1)])
def test_slots_that_no_example_fills_are_left_out(lengths, slots):
    """N is the largest number of blocks in the batch, num_anchors at most; the weights' sum does not change with it."""
    data = DrafterDataset(rows(lengths))
    batch = collator()([data[i] for i in range(len(lengths))])
    for key in ("anchors", "keep", "labels", "loss_weights"):
        assert batch[key].shape[1] == slots, key
    assert batch["keep"].sum(dim=1).tolist() == [min(6, length - 5) for length in lengths]


def test_an_example_without_anchor_still_makes_a_batch():
    """One slot remains, as a padding block, and no row is active."""
    data = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]], "loss_mask": [[0, 1, 0, 1]]})
    batch = collator()([DrafterDataset(data)[0]])
    assert batch["keep"].tolist() == [[False]] and batch["active_rows"].numel() == 0
    assert batch["loss_weights"].sum() == 0


def test_epoch_changes_the_blocks():
    """set_epoch draws anew."""
    data = DrafterDataset(rows([80]))
    first = collator()([data[0]])["anchors"].tolist()
    data.set_epoch(1)
    assert collator()([data[0]])["anchors"].tolist() != first
    data.set_epoch(0)
    assert collator()([data[0]])["anchors"].tolist() == first


def test_features_are_padded_beside_their_tokens():
    """Stored features `[n, K * H]` line up with the ids, zeros on the padding."""
    features = [torch.full((9, 4), 1.0), torch.full((31, 4), 2.0)]
    data = DrafterDataset(rows([9, 31]), features)
    batch = collator()([data[0], data[1]])
    assert batch["features"].shape == (2, 31, 4)
    assert batch["features"][0, :9].eq(1).all() and batch["features"][0, 9:].eq(0).all()
    assert batch["features"][1].eq(2).all()
    assert "features" not in collator()([DrafterDataset(rows([9]))[0]])


@pytest.mark.parametrize("count", [1, 3, 100])
def test_frequent_tokens_equal_a_count(count):
    """Supervised tokens only; ties go to the smaller id."""
    data = Dataset.from_dict(
        {"input_ids": [[9, 9, 9, 5, 7, 7], [4, 5, 7, 8, 8, 6]], "loss_mask": [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]]}
    )
    # counts: 7 three times, 5 and 8 twice, 6 once
    assert frequent_tokens(data, size=count).tolist() == [7, 5, 8, 6][:count]


def test_rare_labels_lose_their_weight_but_not_their_label():
    """With `frequent`, weights outside are 0 and the rows inactive; labels stay, since evaluation counts them."""
    data = DrafterDataset(rows([30, 20]))
    frequent = frequent_tokens(data.examples, size=10)
    examples = [data[0], data[1]]
    plain, part = collator()(examples), collator(frequent=frequent, negatives=5, vocab_size=97)(examples)
    assert torch.equal(plain["labels"], part["labels"])
    inside = torch.tensor(
        [[[int(label) in frequent.tolist() for label in block] for block in row] for row in part["labels"]]
    )
    assert torch.equal(part["loss_weights"], plain["loss_weights"] * inside)
    assert part["loss_weights"].sum() > 0 and len(part["active_rows"]) < len(plain["active_rows"])
    tokens = part["loss_token_ids"]
    assert len(tokens) == 15 and tokens.max() < 97 and set(frequent.tolist()) <= set(tokens.tolist())


def test_more_negatives_than_tokens():
    """Drawn without replacement: never more than the vocabulary."""
    data = DrafterDataset(rows([30]))
    batch = collator(frequent=torch.tensor([5, 4]), negatives=1000, vocab_size=97)([data[0]])
    assert batch["loss_token_ids"].tolist() == list(range(97))
