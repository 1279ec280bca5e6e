"""One draft forward pass over all blocks of a batch, and the rows of it that the loss reads."""

from __future__ import annotations

import torch
from torch import nn

from ..configuration_dflash import DFlashConfig
from ..target import embed_tokens
from .masks import training_masks


def draft_blocks(
    model: nn.Module,
    *,
    config: DFlashConfig,
    target: nn.Module,
    batch: dict[str, torch.Tensor],
    features: torch.Tensor,
    implementation: str,
) -> torch.Tensor:
    """Hidden states of all blocks, `[b, N, B, H]`.

    Args:
        model: the drafter, wrapped or not.
        config: the drafter's.
        target: lends its embedding.
        batch: of `DFlashDataCollator`.
        features: `[b, S, K * H_t]`.
        implementation: attention, one of `masks.IMPLEMENTATIONS`.
    """
    input_ids, anchors, positions = batch["input_ids"], batch["anchors"], batch["position_ids"]
    batch_size, context_length = input_ids.shape
    slots = config.block_size
    noise_ids = torch.full((*anchors.shape, slots), config.mask_token_id, device=input_ids.device)
    noise_ids[:, :, 0] = input_ids.gather(1, anchors)
    noise = embed_tokens(target, noise_ids.flatten(1), scale=config.input_embedding_scale)
    starts = positions.gather(1, anchors)
    block_positions = (starts[:, :, None] + torch.arange(slots, device=input_ids.device)).flatten(1)
    documents = batch.get("document_ids")
    output = model(
        noise_embeds=noise.to(input_ids.device),
        context_hidden_states=features,
        position_ids=torch.cat([positions, block_positions], dim=1),
        attention_mask=training_masks(
            config=config,
            anchors=anchors,
            keep=batch["keep"],
            context_length=context_length,
            implementation=implementation,
            document_ids=documents,
            document_starts=None if documents is None else anchors - starts,
        ),
    )
    return output.last_hidden_state.view(batch_size, anchors.shape[1], slots, -1)
