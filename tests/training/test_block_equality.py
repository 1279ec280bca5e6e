"""A block seen in training is the block seen in inference: all blocks in one pass against one block with a cache."""

import pytest
import torch
from conftest import tiny_target
from training_helpers import collate, make_trainer, rows, tiny_drafter

from dflash_hf.data.features import compute_features
from dflash_hf.target import FeatureCapture


def inference_block(target, drafter, ids, anchor, pieces):
    """The block at `anchor` from the prefix alone: features run incrementally, both models with their caches.

    The prefix is cut into `pieces` parts; before every part but the last a block is drafted and cropped again, as in
    generation, so that the draft cache holds what it would hold there.
    """
    config = drafter.config
    cache, past, hidden, rounds = drafter.new_cache(), None, None, []
    cuts = [round(anchor * part / pieces) for part in range(pieces + 1)]
    with FeatureCapture(target, config.target_layer_ids) as capture, torch.no_grad():
        for start, end in zip(cuts, cuts[1:]):
            if start == end:
                continue
            with capture.recording():
                past = target(ids[None, start:end], past_key_values=past, use_cache=True).past_key_values
            features = capture.take(ids.device)
            noise_ids = torch.tensor([int(ids[end])] + [config.mask_token_id] * (config.block_size - 1))
            noise = target.get_input_embeddings()(noise_ids)[None]
            positions = torch.cat([torch.arange(start, end), end + torch.arange(config.block_size)])[None]
            hidden = drafter(
                noise_embeds=noise, context_hidden_states=features, position_ids=positions, cache=cache
            ).last_hidden_state
            cache.crop(end)
            rounds.append(end)
    assert rounds[-1] == anchor
    return hidden[0]


DRAFTERS = {
    "full": dict(),
    "sliding": dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6),
    "all sliding": dict(layer_types=["sliding_attention"] * 2, sliding_window=11),
    "last tap": dict(target_layer_ids=[-1, 0, 3]),
}


@pytest.mark.parametrize("implementation", ["dflash_blocks", "sdpa", "eager"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_training_block_equals_inference_block(tmp_path, kind, implementation):
    """Features, masks, positions and embeddings of a padded training batch give what generation would compute."""
    target = tiny_target()
    drafter = tiny_drafter(target, **DRAFTERS[kind])
    trainer = make_trainer(
        tmp_path,
        target=target,
        drafter=drafter,
        train=rows([30, 13, 9]),
        num_anchors=7,
        attn_implementation=implementation,
    )
    batch = collate(trainer)
    drafter.eval()
    with torch.no_grad():
        hidden = trainer.draft_hidden_states(drafter, batch)
    assert batch["attention_mask"].sum(dim=1).tolist() == [30, 13, 9] and not batch["keep"].all()
    compared = 0
    for row in range(3):
        ids = batch["input_ids"][row, : int(batch["attention_mask"][row].sum())]
        for number in batch["keep"][row].nonzero().flatten().tolist():
            anchor = int(batch["anchors"][row, number])
            expected = inference_block(target, drafter, ids, anchor, pieces=1 + number % 3)
            torch.testing.assert_close(hidden[row, number], expected, rtol=0, atol=1e-5)
            compared += 1
    assert compared == 7 + 7 + 4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_right_padding_does_not_change_features(family):
    """The target's features of a padded row equal those of the row alone."""
    target = tiny_target(family)
    ids = torch.randint(4, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    with FeatureCapture(target, [0, 3]) as capture:
        both = compute_features(target, capture, ids, mask)
        alone = compute_features(target, capture, ids[1:, :8])
    torch.testing.assert_close(both[1, :8], alone[0], rtol=0, atol=1e-5)


def test_a_block_does_not_depend_on_what_follows(tmp_path):
    """Changing every token after the anchor leaves the block's hidden states alone (no look-ahead through any path)."""
    target = tiny_target()
    trainer = make_trainer(tmp_path, target=target, train=rows([24]), num_anchors=1)
    batch = collate(trainer)
    anchor = 9
    batch["anchors"] = torch.tensor([[anchor]])
    other = dict(batch, input_ids=batch["input_ids"].clone())
    other["input_ids"][0, anchor + 1 :] = (other["input_ids"][0, anchor + 1 :] + 11) % 97
    at_anchor = dict(batch, input_ids=batch["input_ids"].clone())
    at_anchor["input_ids"][0, anchor] = 50 if int(batch["input_ids"][0, anchor]) != 50 else 51
    trainer.model.eval()
    with torch.no_grad():
        hidden, same, changed = (trainer.draft_hidden_states(trainer.model, b) for b in (batch, other, at_anchor))
    torch.testing.assert_close(hidden, same, rtol=0, atol=1e-6)
    assert (hidden - changed).abs().max() > 1e-2, "the anchor's own embedding must matter"


def test_blocks_of_one_row_do_not_see_each_other(tmp_path):
    """A block alone and the same block among overlapping neighbours and padding blocks: equal."""
    target = tiny_target()
    trainer = make_trainer(tmp_path, target=target, train=rows([24]), num_anchors=5)
    batch = collate(trainer)
    batch["anchors"] = torch.tensor([[8, 9, 10, 15, 0]])
    batch["keep"] = torch.tensor([[True, True, True, True, False]])
    trainer.model.eval()
    with torch.no_grad():
        together = trainer.draft_hidden_states(trainer.model, batch)
        for number in range(4):
            alone = dict(batch, anchors=batch["anchors"][:, number : number + 1], keep=torch.tensor([[True]]))
            single = trainer.draft_hidden_states(trainer.model, alone)
            torch.testing.assert_close(together[:, number], single[:, 0], rtol=0, atol=1e-5)
    assert together.isfinite().all()
