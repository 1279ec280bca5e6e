"""Hidden states of all blocks of a batch -> the training loss, or what an evaluation counts."""

from __future__ import annotations

import torch

from ..target import OutputHead
from .anchors import IGNORE, slot_weights
from .arguments import DFlashTrainingArguments
from .losses import chunked_losses, dpace_weights, head_over_tokens
from .metrics import count_blocks


def batch_loss(
    *,
    hidden: torch.Tensor,
    batch: dict[str, torch.Tensor],
    final_states: torch.Tensor | None,
    head: OutputHead,
    target_head: OutputHead,
    args: DFlashTrainingArguments,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss of all blocks, before it is normalised.

    Args:
        hidden: `[b, N, B, H]`, of `draft_blocks`.
        batch: of `DFlashDataCollator`.
        final_states: `[b, S, H_t]`, the target's final hidden states; None with the objective `data`.
        head: for the drafter's logits.
        target_head: for the target's.
        args: the trainer's.

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
    target_rows = None if final_states is None else final_states.flatten(0, 1)[batch["label_places"]]
    losses = chunked_losses(
        rows=hidden.flatten(0, -2)[active],
        labels=labels,
        logits_of=logits_of,
        chunk_rows=args.head_chunk_rows,
        objective=args.objective,
        target_rows=target_rows,
        target_row_of=batch["label_place_of"],
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


def evaluation_sums(
    *,
    hidden: torch.Tensor,
    batch: dict[str, torch.Tensor],
    head: OutputHead,
    gamma: float,
    chunk_rows: int,
    first_slot: int,
) -> torch.Tensor:
    """What a batch adds to an evaluation: decayed cross-entropy of every label, over the whole vocabulary, and hits.

    Args:
        hidden: `[b, N, B, H]`, of `draft_blocks`.
        batch: of `DFlashDataCollator`.
        head: for the drafter's logits.
        gamma: decay constant of the weights.
        chunk_rows: rows whose logits exist at once.
        first_slot: the first slot that predicts.

    Returns:
        `[5 + 2 P]` in fp64 (fp32 on MPS, which has no other): loss sum, weight sum, examples, `BlockCounts.stacked()`.
    """
    labels = batch["labels"]
    supervised = labels != IGNORE
    active = supervised.flatten().nonzero().flatten()
    losses = chunked_losses(
        rows=hidden.flatten(0, -2)[active],
        labels=labels.flatten()[active],
        logits_of=head,
        chunk_rows=chunk_rows,
    )
    hits = torch.zeros_like(supervised)
    hits.view(-1)[active] = losses.hits
    counts = count_blocks(hits=hits, supervised=supervised, keep=batch["keep"], first_slot=first_slot)
    weights = slot_weights(labels=labels, gamma=gamma, first_slot=first_slot)
    exact = torch.float32 if labels.device.type == "mps" else torch.float64
    loss = (losses.losses.to(exact) * weights.flatten()[active]).sum()
    examples = torch.tensor(len(labels), device=labels.device)
    return torch.cat([torch.stack([loss, weights.sum(), examples]), counts.stacked()]).to(exact)
