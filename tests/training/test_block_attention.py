"""The package's block attention against dense attention under the same mask rule: values and gradients."""

import pytest
import torch
from torch.nn import functional

from dflash_hf.errors import DFlashError
from dflash_hf.training.attention import block_attention, lay_out_blocks
from dflash_hf.training.masks import dense_mask, make_mask_mod

CASES = {
    "full": dict(),
    "causal block": dict(is_causal=True),
    "window": dict(sliding_window=5),
    "window, causal": dict(sliding_window=9, is_causal=True),
    "window smaller than a block": dict(sliding_window=2),
    "documents": dict(documents=True),
    "documents and window": dict(documents=True, sliding_window=6, is_causal=True),
}


def random_row(generator, *, length, count, documents):
    """Sorted anchors with padding blocks at the end, document ids, and the first row of each anchor's document."""
    kept = int(torch.randint(0, count + 1, (1,), generator=generator))
    anchors = torch.zeros(count, dtype=torch.long)
    anchors[:kept] = torch.randint(0, length, (kept,), generator=generator).sort().values  # repeats overlap fully
    ids = torch.zeros(length, dtype=torch.long)
    if documents:
        cuts = torch.randint(0, 2, (length,), generator=generator).bool() & (torch.arange(length) % 4 == 3)
        ids = cuts.long().cumsum(0)
    starts = torch.tensor([int((ids == ids[a]).nonzero()[0]) for a in anchors])
    return anchors, torch.arange(count) < kept, ids, starts


def case(seed, *, batch=2, heads=6, key_heads=2, length=23, count=7, block=4, size=8, dtype=torch.float64, **rule):
    """Random tensors, the mask rule, and what `lay_out_blocks` needs of it."""
    generator = torch.Generator().manual_seed(seed)
    documents = rule.pop("documents", False)
    rows = [random_row(generator, length=length, count=count, documents=documents) for _ in range(batch)]
    anchors, keep, ids, starts = (torch.stack(parts) for parts in zip(*rows))
    shape = dict(anchors=anchors, keep=keep, context_length=length, block_size=block)
    rule = {"is_causal": False, "sliding_window": None, **rule}
    mask_mod = make_mask_mod(**shape, **rule, document_ids=ids if documents else None)
    keys = length + count * block
    tensors = [
        torch.randn(batch, n, rows, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for n, rows in ((heads, count * block), (key_heads, keys), (key_heads, keys))
    ]
    layout = dict(
        mask_mod=mask_mod,
        **shape,
        sliding_window=rule["sliding_window"],
        document_starts=starts if documents else None,
    )
    return tensors, layout


def dense(queries, keys, values, layout, scaling):
    """One mask over all keys."""
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    mask = dense_mask(
        layout["mask_mod"],
        batch_size=len(queries),
        num_queries=queries.shape[2],
        num_keys=keys.shape[2],
        device="cpu",
    )
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)


@pytest.mark.parametrize("group_slots", [1, 8, 12, 1000])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_dense_attention(name, group_slots):
    """Random anchors (repeated, at position 0, at the end), padding blocks, grouped heads; fp64; gradients too."""
    for seed in range(8):
        (queries, keys, values), layout = case(seed, **CASES[name])
        ours = block_attention(
            queries=queries,
            keys=keys,
            values=values,
            layout=lay_out_blocks(**layout, group_slots=group_slots),
            scaling=0.3,
        )
        expected = dense(queries, keys, values, layout, 0.3)
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
        up = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(seed))
        gradients = torch.autograd.grad((ours * up).sum(), (queries, keys, values))
        wanted = torch.autograd.grad((expected * up).sum(), (queries, keys, values))
        for gradient, other in zip(gradients, wanted):
            torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)


def test_half_precision_under_autocast():
    """bf16 products, fp32 softmax, under autocast: within bf16 rounding of the fp64 result."""
    (queries, keys, values), layout = case(3, dtype=torch.float32)
    groups = lay_out_blocks(**layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = block_attention(queries=queries, keys=keys, values=values, layout=groups, scaling=0.3)
    assert ours.dtype == torch.bfloat16
    expected = dense(queries, keys, values, layout, 0.3)
    torch.testing.assert_close(ours.float(), expected, rtol=0.05, atol=0.05)
    (gradient,) = torch.autograd.grad(ours.float().square().sum(), keys)
    (wanted,) = torch.autograd.grad(expected.square().sum(), keys)
    assert (gradient - wanted).norm() < 0.03 * wanted.norm()


def test_scores_of_one_group_exist_at_once():
    """No tensor of all slots by all keys is made, forward or backward: the largest is a group's scores."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, (tuple, list)) else [output]:
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return output

    heads, count, block, length = 3, 64, 8, 96
    (queries, keys, values), layout = case(
        0, batch=1, heads=heads, key_heads=1, length=length, count=count, block=block
    )
    with Largest() as seen:
        groups = lay_out_blocks(**layout, group_slots=64)
        output = block_attention(queries=queries, keys=keys, values=values, layout=groups, scaling=0.3)
        output.sum().backward()
    assert seen.numel <= max(heads * 64 * length, queries.numel(), heads * count * block * block)
    assert seen.numel < heads * count * block * (length + count * block) / 8


def test_sorted_anchors_are_scored_against_what_they_see_only():
    """Groups end at their last anchor and start at their first document: half the scores of a row, or less."""
    anchors = torch.arange(0, 320, 5)[None]
    shape = dict(anchors=anchors, keep=torch.ones_like(anchors).bool(), context_length=320, block_size=8)
    rule = dict(is_causal=False, sliding_window=None)
    whole = lay_out_blocks(mask_mod=make_mask_mod(**shape, **rule), **shape, sliding_window=None, group_slots=64)
    scored = sum((group.end - group.start) * (group.high - group.low) for group in whole.groups)
    assert scored < 0.57 * anchors.numel() * 320
    documents = torch.arange(320)[None] // 80
    starts = anchors // 80 * 80
    packed = lay_out_blocks(
        mask_mod=make_mask_mod(**shape, **rule, document_ids=documents),
        **shape,
        sliding_window=None,
        document_starts=starts,
        group_slots=64,
    )
    assert sum((g.end - g.start) * (g.high - g.low) for g in packed.groups) < 0.2 * anchors.numel() * 320


def test_other_masks_and_dropout_are_refused():
    """The registered name is the trainer's; a plain call names what to use instead."""
    from dflash_hf.training.attention import _attention_forward

    (queries, keys, values), layout = case(0)
    with pytest.raises(DFlashError, match="DFlashTrainingArguments"):
        _attention_forward(None, queries, keys, values, None, scaling=1.0)
    with pytest.raises(DFlashError, match="no dropout"):
        _attention_forward(None, queries, keys, values, lay_out_blocks(**layout), scaling=1.0, dropout=0.1)
