"""The output head and the loss of active rows, a chunk of rows at a time; logits of one chunk exist at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

# What a slot learns: the token of the data, the target's own choice there, or the target's distribution.
OBJECTIVES = ("data", "target_argmax", "target_kl")


@dataclass(frozen=True)
class RowLosses:
    """Losses of active rows.

    Attributes:
        losses: fp32 `[R]`, of the objective; carries the gradient.
        cross_entropy: fp32 `[R]`, of the label (of the target's choice with `target_argmax`), without gradient.
        hits: bool `[R]`, whether the largest logit is the data token's.
    """

    losses: torch.Tensor
    cross_entropy: torch.Tensor
    hits: torch.Tensor


class _ChunkedLosses(torch.autograd.Function):
    """Computes each row's gradient in the forward pass, so that no chunk's logits are kept or made twice.

    The head is frozen, so the rows are the only input that needs a gradient, and a row's loss depends on that row
    alone: backward only scales what is stored. The weights may therefore follow from the losses (`dpace_weights`).
    """

    @staticmethod
    def forward(ctx, rows, labels, logits_of, chunk_rows, objective, target_rows, target_row_of, target_logits_of):
        needs_gradient = ctx.needs_input_grad[0]
        losses = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        cross_entropy = torch.empty_like(losses)
        hits = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        gradient = torch.empty_like(rows) if needs_gradient else None
        wanted = labels
        if objective == "target_argmax":
            wanted = _choices(target_rows, target_logits_of, chunk_rows).to(rows.device)[target_row_of]
        for start in range(0, len(rows), chunk_rows):
            part = slice(start, start + chunk_rows)
            teacher = None
            if objective == "target_kl":
                with torch.no_grad():
                    teacher = target_logits_of(target_rows[target_row_of[part]]).float().to(rows.device)
            with torch.set_grad_enabled(needs_gradient):
                chunk = rows[part].detach().requires_grad_(needs_gradient)
                parts, cross_entropy[part], hits[part] = _losses_of_chunk(
                    logits_of(chunk).float().to(rows.device), labels[part], wanted[part], teacher
                )
                losses[part] = parts.detach()
                if needs_gradient:
                    (gradient[part],) = torch.autograd.grad(parts.sum(), chunk)
            del teacher, parts  # before the next chunk's logits are made
        if needs_gradient:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(cross_entropy, hits)
        return losses, cross_entropy, hits

    @staticmethod
    def backward(ctx, row_gradients, *_):
        (gradient,) = ctx.saved_tensors
        return (row_gradients[:, None] * gradient).to(gradient.dtype), *[None] * 7


def _choices(rows: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor], chunk_rows: int) -> torch.Tensor:
    """The likeliest token `[U]` of each row, a chunk at a time."""
    with torch.no_grad():
        chosen = [logits_of(part).argmax(dim=-1) for part in rows.split(chunk_rows)]
    return torch.cat(chosen)


def _losses_of_chunk(
    logits: torch.Tensor, labels: torch.Tensor, wanted: torch.Tensor, teacher: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses `[r]` with gradient, cross-entropy `[r]` and hits `[r]` without, of logits `[r, V]`."""
    hits = logits.detach().argmax(dim=-1) == labels
    if teacher is not None:
        log_q = functional.log_softmax(logits, dim=-1)
        log_p = functional.log_softmax(teacher, dim=-1)
        losses = functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
        return losses, -log_q.detach().gather(1, labels[:, None])[:, 0], hits
    losses = functional.cross_entropy(logits, wanted, reduction="none")
    return losses, losses.detach(), hits


def chunked_losses(
    *,
    rows: torch.Tensor,
    labels: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    chunk_rows: int,
    objective: str = "data",
    target_rows: torch.Tensor | None = None,
    target_row_of: torch.Tensor | None = None,
    target_logits_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> RowLosses:
    """Losses of hidden rows under a frozen head.

    Args:
        rows: `[R, H]` hidden states of the active slots.
        labels: int64 `[R]`, tokens of the data, as columns of the logits.
        logits_of: `[r, H] -> [r, V]`; its parameters get no gradient.
        chunk_rows: rows whose logits exist at once; 128 and more keep the matrix products efficient.
        objective: `data`: cross-entropy of the label. `target_argmax`: cross-entropy of the target's likeliest token.
            `target_kl`: Kullback-Leibler divergence of the drafter's distribution from the target's, KL(p || q).
        target_rows: `[U, H_t]`, the target's final hidden states that predict the labels; not with `data`.
        target_row_of: int64 `[R]`, which of them is a row's, as blocks overlap; None where each row has its own.
        target_logits_of: `[r, H_t] -> [r, V]`, the target's head; not with `data`.
    """
    if target_row_of is None:
        target_row_of = torch.arange(len(rows), device=rows.device)
    losses, cross_entropy, hits = _ChunkedLosses.apply(
        rows, labels, logits_of, chunk_rows, objective, target_rows, target_row_of, target_logits_of
    )
    return RowLosses(losses=losses, cross_entropy=cross_entropy, hits=hits)


def dpace_weights(*, cross_entropy: torch.Tensor, supervised: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """Loss weights from the drafter's own confidence along each block; without gradient.

    Slot k weighs as much as the expected number of proposals that stand or fall with it: the sum over j >= k of the
    chance that the first j proposals are all right, with confidences smoothed to `(1 - alpha) q + alpha`. This is the
    derivative of the expected acceptance length by the logarithm of slot k's confidence. Source: D-PACE (arXiv
    2605.18810).

    Args:
        cross_entropy: `[..., B]`, minus the logarithm of the label's probability; any value where not supervised.
        supervised: bool `[..., B]`; other slots are passed over and weigh 0.
        alpha: smoothing in (0, 1]; with 1 only the number of later slots counts.
    """
    confidence = (1 - alpha) * torch.exp(-cross_entropy.detach()) + alpha
    survival = torch.where(supervised, confidence, 1.0).cumprod(dim=-1) * supervised
    return survival.flip(-1).cumsum(dim=-1).flip(-1) * supervised


def head_over_tokens(head: Any, token_ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The logits `[r, v]` that an `OutputHead` gives to some tokens `[v]` only."""
    weight, bias = head.rows(token_ids)

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        return head.transform(functional.linear(rows.to(weight.dtype), weight, bias))

    return logits_of
