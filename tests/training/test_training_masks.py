"""The training mask against an oracle with one Python decision a cell, and against flex attention's own tracing."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from dflash_hf.training.masks import dense_mask, make_mask_mod

CASES = [
    (seed, is_causal, window, with_documents)
    for seed in range(3)
    for is_causal in (False, True)
    for window in (None, 1, 3, 7, 100)
    for with_documents in (False, True)
]


def random_case(seed, with_documents):
    generator = torch.Generator().manual_seed(seed)
    batch, blocks, block_size = 2, 4, (2, 4, 5)[seed % 3]
    context = int(torch.randint(6, 15, (1,), generator=generator))
    anchors = torch.randint(0, context, (batch, blocks), generator=generator).sort(dim=1).values
    keep = torch.rand(batch, blocks, generator=generator) < 0.7
    keep[0, 0], keep[1, -1] = True, False
    documents = None
    if with_documents:
        documents = (torch.rand(batch, context, generator=generator) < 0.25).long().cumsum(dim=1)
    return anchors, keep, context, block_size, documents


def oracle(anchors, keep, context, block_size, is_causal, window, documents):
    """Visible or not, from absolute positions: a block's slot s stands at anchor + s, a context row j at j."""
    batch, blocks = anchors.shape
    visible = torch.zeros(batch, 1, blocks * block_size, context + blocks * block_size, dtype=torch.bool)
    for b in range(batch):
        for n in range(blocks):
            anchor = int(anchors[b, n])
            for s in range(block_size):
                query = anchor + s
                if keep[b, n]:
                    for j in range(anchor):  # strictly before the anchor
                        same = documents is None or int(documents[b, j]) == int(documents[b, anchor])
                        if same and (window is None or query - j < window):
                            visible[b, 0, n * block_size + s, j] = True
                for t in range(block_size):
                    key = anchor + t
                    if is_causal and key > query:
                        continue
                    if window is not None and abs(query - key) >= window:
                        continue
                    visible[b, 0, n * block_size + s, context + n * block_size + t] = True
    return visible


@pytest.mark.parametrize("seed, is_causal, window, with_documents", CASES)
def test_dense_mask_equals_the_oracle(seed, is_causal, window, with_documents):
    """Every cell, over documents, padding blocks, overlapping blocks, causality and windows."""
    anchors, keep, context, block_size, documents = random_case(seed, with_documents)
    mask_mod = make_mask_mod(
        anchors=anchors,
        keep=keep,
        context_length=context,
        block_size=block_size,
        is_causal=is_causal,
        sliding_window=window,
        document_ids=documents,
    )
    queries = anchors.shape[1] * block_size
    mask = dense_mask(mask_mod, batch_size=2, num_queries=queries, num_keys=context + queries, device="cpu")
    assert torch.equal(mask, oracle(anchors, keep, context, block_size, is_causal, window, documents))
    assert mask.any(dim=-1).all(), "a fully masked row is NaN"


def small_mask(**more):
    common = dict(
        anchors=torch.tensor([[3, 4, 0]]),
        keep=torch.tensor([[True, True, False]]),
        context_length=6,
        block_size=2,
        is_causal=False,
        sliding_window=None,
    )
    mask_mod = make_mask_mod(**{**common, **more})
    return dense_mask(mask_mod, batch_size=1, num_queries=6, num_keys=12, device="cpu")[0, 0].int().tolist()


def test_small_mask_written_by_hand():
    """Anchors 3 and 4 overlap, the third block is padding: no leak between blocks, no anchor row, no empty row."""
    assert small_mask() == [
        [1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
    ]


def test_small_causal_window_written_by_hand():
    """Window 3, causal: slot 1 of anchor 3 stands at 4 and sees 2, 3, 4 (the query itself counts)."""
    assert small_mask(is_causal=True, sliding_window=3)[:4] == [
        [0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0],
    ]


@pytest.mark.parametrize("is_causal, window, with_documents", [(False, None, True), (True, 3, False)])
def test_flex_attention_takes_the_same_rule(is_causal, window, with_documents):
    """flex attention vmaps the rule over scalars: its dense form is ours, its tiles cover the visible cells."""
    anchors, keep, context, block_size, documents = random_case(1, with_documents)
    mask_mod = make_mask_mod(
        anchors=anchors,
        keep=keep,
        context_length=context,
        block_size=block_size,
        is_causal=is_causal,
        sliding_window=window,
        document_ids=documents,
    )
    queries = anchors.shape[1] * block_size
    shape = dict(B=2, H=1, Q_LEN=queries, KV_LEN=context + queries, device="cpu")
    ours = dense_mask(mask_mod, batch_size=2, num_queries=queries, num_keys=context + queries, device="cpu")
    assert torch.equal(create_mask(mask_mod, **shape), ours)
    tile = 4
    tiles = create_block_mask(mask_mod, BLOCK_SIZE=tile, **shape).to_dense().bool()
    for q in range(tiles.shape[2]):
        for k in range(tiles.shape[3]):
            cells = ours[:, :, q * tile : (q + 1) * tile, k * tile : (k + 1) * tile]
            assert torch.equal(tiles[:, :, q, k], cells.flatten(2).any(-1))
