"""Anchors, labels and weights against loops over positions."""

import math

import pytest
import torch

from dflash_hf.training.anchors import (
    IGNORE,
    allowed_anchors,
    block_labels,
    default_gamma,
    example_generator,
    sample_anchors,
    slot_weights,
)


def random_case(seed):
    """A random mask with holes and, in every second case, documents; lengths 1 to 30."""
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1, 31, (1,), generator=generator))
    mask = (torch.rand(length, generator=generator) < 0.7).long()
    ids = torch.randint(0, 97, (length,), generator=generator)
    documents = None
    if seed % 2:
        documents = (torch.rand(length, generator=generator) < 0.2).long().cumsum(0)
    return ids, mask, documents, generator


def allowed_by_loop(mask, documents):
    found = []
    for i in range(len(mask)):
        if i + 1 >= len(mask) or not mask[i] or not mask[i + 1]:
            continue
        if documents is not None and documents[i] != documents[i + 1]:
            continue
        found.append(i)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_allowed_positions_equal_a_loop(seed):
    """i and i + 1 supervised, same document; nothing else."""
    _, mask, documents, _ = random_case(seed)
    allowed = allowed_anchors(loss_mask=mask, document_ids=documents)
    assert allowed.nonzero().flatten().tolist() == allowed_by_loop(mask.tolist(), documents)


def test_tail_of_the_response_is_allowed():
    """A block may run past the end: the last but one token is an anchor; the last, with nothing to predict, is not."""
    allowed = allowed_anchors(loss_mask=torch.tensor([0, 0, 1, 1, 1]))
    assert allowed.tolist() == [False, False, True, True, False]


def test_one_token_has_no_anchor():
    """The shortest example gives no anchor and no error."""
    assert allowed_anchors(loss_mask=torch.tensor([1])).tolist() == [False]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_anchors", [1, 4, 64])
def test_draw_is_sorted_unique_and_of_constant_size(seed, num_anchors):
    """The kept slots are a sorted subset of the allowed positions, as many as fit; padding slots follow."""
    _, mask, documents, generator = random_case(seed)
    allowed = allowed_by_loop(mask.tolist(), documents)
    anchors, keep = sample_anchors(loss_mask=mask, num_anchors=num_anchors, generator=generator, document_ids=documents)
    count = min(num_anchors, len(allowed))
    kept = anchors[keep].tolist()
    assert anchors.shape == keep.shape == (num_anchors,)
    assert keep.tolist() == [True] * count + [False] * (num_anchors - count)
    assert kept == sorted(set(kept)) and set(kept) <= set(allowed)
    assert anchors[~keep].eq(0).all()


def test_every_allowed_position_is_drawn_equally_often():
    """Uniform without replacement: 10 of 40 positions, 2,000 draws, each position 500 times within 5 sigma (97)."""
    mask = torch.ones(41, dtype=torch.long)
    counts = torch.zeros(41)
    for index in range(2000):
        generator = example_generator(seed=0, epoch=0, index=index)
        anchors, _ = sample_anchors(loss_mask=mask, num_anchors=10, generator=generator)
        counts[anchors] += 1
    assert counts[40] == 0
    assert (counts[:40] - 500).abs().max() < 97


def draw(seed, epoch, index):
    generator = example_generator(seed=seed, epoch=epoch, index=index)
    return sample_anchors(loss_mask=torch.ones(200, dtype=torch.long), num_anchors=16, generator=generator)[0].tolist()


def test_draw_depends_on_seed_epoch_and_index_only():
    """Equal triples draw equal anchors whatever ran before; changing any of the three changes them."""
    first = draw(3, 1, 7)
    torch.manual_seed(99)
    torch.rand(10)
    assert draw(3, 1, 7) == first
    others = [draw(4, 1, 7), draw(3, 2, 7), draw(3, 1, 8), draw(3, 17, 0), draw(31, 7, 0), draw(1, 3, 7)]
    assert len({tuple(drawn) for drawn in [first, *others]}) == 7


def test_draw_leaves_the_global_generator_alone():
    """Anchors come from their own generator, or dropout would depend on them."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    draw(0, 0, 0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("block_size", [2, 5, 8])
def test_labels_equal_a_loop(seed, block_size):
    """Slot k is labelled with token anchor + k if that is supervised, inside, of the same document and k >= 1."""
    ids, mask, documents, generator = random_case(seed)
    anchors, keep = sample_anchors(loss_mask=mask, num_anchors=7, generator=generator, document_ids=documents)
    labels = block_labels(
        input_ids=ids, loss_mask=mask, anchors=anchors, keep=keep, block_size=block_size, document_ids=documents
    )
    for n in range(7):
        for k in range(block_size):
            position = int(anchors[n]) + k
            expected = IGNORE
            if k > 0 and keep[n] and position < len(ids) and mask[position]:
                same = documents is None or documents[position] == documents[int(anchors[n])]
                expected = int(ids[position]) if same else IGNORE
            assert labels[n, k] == expected, (n, k)


def test_a_hole_drops_only_its_own_slot():
    """No cumulative product over the mask: slots after an unsupervised token still count (golden train_full)."""
    labels = block_labels(
        input_ids=torch.arange(10, 20),
        loss_mask=torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 1, 1]),
        anchors=torch.tensor([1, 0]),
        keep=torch.tensor([True, False]),
        block_size=5,
    )
    assert labels.tolist() == [[IGNORE, 12, IGNORE, 14, 15], [IGNORE] * 5]


def test_labels_end_with_the_anchors_document():
    """A block that runs into the next document has no labels there."""
    labels = block_labels(
        input_ids=torch.arange(10, 18),
        loss_mask=torch.ones(8, dtype=torch.long),
        anchors=torch.tensor([0, 3]),
        keep=torch.tensor([True, True]),
        block_size=6,
        document_ids=torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]),
    )
    assert labels.tolist() == [[IGNORE, 11, 12, IGNORE, IGNORE, IGNORE], [IGNORE, 14, 15, 16, 17, IGNORE]]


@pytest.mark.parametrize("gamma", [1.0, 4.0, 7.0])
def test_weights_are_the_closed_form(gamma):
    """exp(-(k-1)/gamma) where a label is, 0 elsewhere, in fp32."""
    labels = torch.tensor([[IGNORE, 5, 0, IGNORE, 9], [IGNORE] * 5])
    weights = slot_weights(labels=labels, gamma=gamma)
    expected = [[0.0, 1.0, math.exp(-1 / gamma), 0.0, math.exp(-3 / gamma)], [0.0] * 5]
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-6, atol=0)


def test_default_gamma_goes_through_the_published_points():
    """(8, 4), (10, 5), (16, 7), linear between and beyond, at least 1."""
    published = {8: 4.0, 10: 5.0, 16: 7.0, 9: 4.5, 13: 6.0, 22: 9.0, 4: 2.0, 2: 1.0}
    assert {size: default_gamma(size) for size in published} == pytest.approx(published)
    assert all(default_gamma(size) >= 1.0 for size in range(2, 40))
