"""The training loss of a batch: objective and weights over the active rows of all its blocks."""

from __future__ import annotations

import torch

from ..target import OutputHead
from .arguments import DFlashTrainingArguments
from .blocks import rows_before_labels
from .losses import chunked_losses, dpace_weights, head_over_tokens


def batch_loss(
    *,
    hidden: torch.Tensor,
    batch: dict[str, torch.Tensor],
    final_states: torch.Tensor | None,
    head: OutputHead,
    target_head: OutputHead,
    args: DFlashTrainingArguments,
    first_slot: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss of all blocks, before it is normalised.

    Args:
        hidden: `[b, N, B, H]`, of `draft_blocks`.
        batch: of `DFlashDataCollator`.
        final_states: `[b, S, H_t]`, the target's final hidden states; None with the objective `data`.
        head: for the drafter's logits.
        target_head: for the target's.
        args: the trainer's.
        first_slot: the first slot that predicts.

    Returns:
        The sum, an fp32 scalar with gradient, and hits of the data's tokens, bool `[b, N, B]`.
    """
    active = batch["active_rows"]
    labels = batch["labels"].flatten()[active]
    logits_of, target_logits_of = head, target_head
    token_ids = batch.get("loss_token_ids")
    if token_ids is not None:
        labels = torch.searchsorted(token_ids, labels)
        logits_of, target_logits_of = (head_over_tokens(each, token_ids) for each in (head, target_head))
    target_rows = None
    if final_states is not None:
        target_rows = rows_before_labels(final_states, batch=batch, first_slot=first_slot)
    losses = chunked_losses(
        rows=hidden.flatten(0, -2)[active],
        labels=labels,
        logits_of=logits_of,
        chunk_rows=args.head_chunk_rows,
        objective=args.objective,
        target_rows=target_rows,
        target_logits_of=target_logits_of,
    )
    weights = batch["loss_weights"]
    if args.loss_weighting == "dpace":
        cross_entropy = torch.zeros_like(weights)
        cross_entropy.view(-1)[active] = losses.cross_entropy
        weights = dpace_weights(cross_entropy=cross_entropy, supervised=weights > 0, alpha=args.dpace_alpha)
    hits = torch.zeros_like(weights, dtype=torch.bool)
    hits.view(-1)[active] = losses.hits
    return (losses.losses * weights.flatten()[active]).sum(), hits
