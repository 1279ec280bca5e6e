"""The output head and the loss over active rows, a chunk of rows at a time; logits of one chunk exist at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class LossTerms:
    """Sums that a caller normalises.

    Attributes:
        weighted_sum: fp32 scalar, sum of weight times cross-entropy; carries the gradient.
        cross_entropy: fp32 `[R]`, unweighted, without gradient.
        hits: bool `[R]`, whether the largest logit is the label's.
    """

    weighted_sum: torch.Tensor
    cross_entropy: torch.Tensor
    hits: torch.Tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradient of the rows in the forward pass, so that no chunk's logits are kept or made twice.

    The head is frozen, so the rows are the only input that needs a gradient, and the loss is a scalar: backward only
    scales what is stored.
    """

    @staticmethod
    def forward(ctx, rows, labels, weights, logits_of, chunk_rows):
        needs_gradient = ctx.needs_input_grad[0]
        cross_entropy = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        hits = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        gradient = torch.empty_like(rows) if needs_gradient else None
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        for start in range(0, len(rows), chunk_rows):
            part = slice(start, start + chunk_rows)
            with torch.set_grad_enabled(needs_gradient):
                chunk = rows[part].detach().requires_grad_(needs_gradient)
                logits = logits_of(chunk).float().to(rows.device)
                losses = functional.cross_entropy(logits, labels[part], reduction="none")
                weighted = (losses * weights[part]).sum()
            if needs_gradient:
                (gradient[part],) = torch.autograd.grad(weighted, chunk)
            cross_entropy[part] = losses.detach()
            hits[part] = logits.detach().argmax(dim=-1) == labels[part]
            total += weighted.detach()
        if needs_gradient:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(cross_entropy, hits)
        return total, cross_entropy, hits

    @staticmethod
    def backward(ctx, total_gradient, *_):
        (gradient,) = ctx.saved_tensors
        return gradient * total_gradient.to(gradient.dtype), None, None, None, None


def chunked_cross_entropy(
    *,
    rows: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    chunk_rows: int,
) -> LossTerms:
    """Weighted cross-entropy of hidden rows against labels under a frozen head.

    Args:
        rows: `[R, H]` hidden states of the active slots.
        labels: int64 `[R]`.
        weights: fp32 `[R]`.
        logits_of: `[r, H] -> [r, V]`; its parameters get no gradient.
        chunk_rows: rows whose logits exist at once; 128 and more keep the matrix products efficient.
    """
    total, cross_entropy, hits = _ChunkedCrossEntropy.apply(rows, labels, weights, logits_of, chunk_rows)
    return LossTerms(weighted_sum=total, cross_entropy=cross_entropy, hits=hits)
