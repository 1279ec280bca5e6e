"""Training numbers recorded from SpecForge and speculators: hidden states, labels, weights, loss and gradients."""

import pytest
import torch
from torch.nn import functional

from dflash_hf import DFlashDraftModel
from dflash_hf.training.anchors import block_labels, slot_weights
from dflash_hf.training.losses import chunked_losses
from dflash_hf.training.masks import training_masks

WITH_LOSS = ["train_full", "train_swa", "train_gamma7", "train_full_padded_slots"]
IMPLEMENTATIONS = ["dflash_blocks", "sdpa", "eager"]


def load(case):
    return DFlashDraftModel.from_pretrained(case.path, dtype=torch.float32)


def hidden_states(model, case, implementation):
    """All blocks of a recorded row in one forward pass, as DFlashTrainer.draft_hidden_states builds it."""
    io, config = case.io, model.config
    ids, anchors = io["input_ids"], io["anchors"]
    slots, length = config.block_size, ids.shape[1]
    documents = io.get("document_ids")
    keep = io.get("block_keep_mask", torch.ones_like(anchors, dtype=torch.bool))
    noise_ids = torch.full((*anchors.shape, slots), config.mask_token_id)
    noise_ids[:, :, 0] = ids.gather(1, anchors)
    block_positions = io.get("block_position_ids", anchors[:, :, None] + torch.arange(slots)).flatten(1)
    context_positions = io.get("position_ids", torch.arange(length)[None])
    starts = None
    if documents is not None:
        starts = (documents[:, None, :] == documents.gather(1, anchors)[:, :, None]).int().argmax(dim=-1)
    output = model(
        noise_embeds=functional.embedding(noise_ids.flatten(1), io["embed_weight"]),
        context_hidden_states=io["target_hidden"],
        position_ids=torch.cat([context_positions, block_positions], dim=1),
        attention_mask=training_masks(
            config=config,
            anchors=anchors,
            keep=keep,
            context_length=length,
            implementation=implementation,
            document_ids=documents,
            document_starts=starts,
        ),
    )
    return output.last_hidden_state.view(1, anchors.shape[1], slots, -1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [*WITH_LOSS, "train_packed_two_docs"])
def test_hidden_states_of_every_block(golden, name, implementation):
    """Context strictly before the anchor, blocks isolated, windows, documents and positions: all at once."""
    case = golden(name)
    keep = case.io.get("block_keep_mask", torch.ones_like(case.io["anchors"], dtype=torch.bool))
    with torch.no_grad():
        hidden = hidden_states(load(case), case, implementation)
    assert hidden.isfinite().all(), "padding blocks must not be NaN"
    tolerance = case.meta["tolerance_suggested"]
    torch.testing.assert_close(hidden[keep], case.io["hidden"][keep], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", WITH_LOSS)
def test_labels_and_weights(golden, name):
    """Labels are exact, weights are exp(-(k-1)/gamma) on the same slots."""
    case = golden(name)
    labels = block_labels(
        input_ids=case.io["input_ids"][0],
        loss_mask=case.io["loss_mask"][0],
        anchors=case.io["anchors"][0],
        keep=case.io["block_keep_mask"][0],
        block_size=case.meta["block_size"],
    )
    weights = slot_weights(labels=labels, gamma=case.meta["gamma"])
    assert torch.equal(labels, case.io["labels"])
    torch.testing.assert_close(weights, case.io["weights"], rtol=1e-6, atol=1e-7)
    assert weights.sum().item() == pytest.approx(case.meta["loss_den"], rel=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", WITH_LOSS)
def test_loss_and_gradients(golden, name, implementation):
    """Per-slot cross-entropy, loss, five recorded gradients and the gradient norm of every tensor."""
    case = golden(name)
    model = load(case)
    hidden = hidden_states(model, case, implementation)
    weights = case.io["weights"].flatten()
    active = weights.nonzero().flatten()
    terms = chunked_losses(
        rows=hidden.flatten(0, -2)[active],
        labels=case.io["labels"].flatten()[active],
        logits_of=lambda rows: functional.linear(rows, case.io["lm_head_weight"]),
        chunk_rows=5,
    )
    loss = (terms.losses * weights[active]).sum() / weights.sum()
    loss.backward()
    tolerance = case.meta["loss_tolerance_suggested"]
    torch.testing.assert_close(terms.cross_entropy, case.io["ce"].flatten()[active], rtol=0, atol=5 * tolerance)
    assert loss.item() == pytest.approx(case.meta["loss"], abs=tolerance)
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert set(gradients) == set(case.meta["grad_norms"])
    for key, norm in case.meta["grad_norms"].items():
        assert gradients[key].norm().item() == pytest.approx(norm, rel=1e-4), key
    for key in ("fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.k_proj.weight"):
        torch.testing.assert_close(gradients[key], case.io[f"grad.{key}"], rtol=0, atol=2e-5)
    torch.testing.assert_close(
        gradients["layers.0.self_attn.q_norm.weight"],
        case.io["grad.layers.0.self_attn.q_norm.weight"],
        rtol=0,
        atol=2e-5,
    )
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    assert total == pytest.approx(case.meta["total_grad_norm"], rel=1e-5)


def test_shifted_labels_of_drafters_that_sample_from_the_anchor(golden):
    """DeepSpec's convention: slot 0 predicts the token after the anchor, supervision stops at the first hole."""
    case = golden("train_deepspec_shifted")
    io = case.io
    labels = block_labels(
        input_ids=io["input_ids"][0],
        loss_mask=io["loss_mask"][0],
        anchors=io["anchors"][0],
        keep=torch.ones_like(io["anchors"][0], dtype=torch.bool),
        block_size=case.meta["block_size"],
        first_slot=0,
        contiguous_prefix=True,
    )
    weights = slot_weights(labels=labels, gamma=case.meta["gamma"], first_slot=0)
    torch.testing.assert_close(weights, io["weights"], rtol=1e-6, atol=1e-7)
    assert torch.equal(labels[weights > 0], io["labels"][weights > 0])
    active = weights.flatten().nonzero().flatten()
    losses = chunked_losses(
        rows=io["hidden"].flatten(0, -2)[active],
        labels=labels.flatten()[active],
        logits_of=lambda rows: functional.linear(rows, io["lm_head_weight"]),
        chunk_rows=5,
    )
    loss = (losses.losses * weights.flatten()[active]).sum() / weights.sum()
    assert loss.item() == pytest.approx(case.meta["loss"], abs=case.meta["tolerance_suggested"])
