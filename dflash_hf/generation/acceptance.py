"""Accepting a draft: which proposals stay, and the target's own token after them. Pure functions on tensors."""

from __future__ import annotations

import torch
from torch.nn import functional

from .draws import draw


def accept_greedy(*, draft: torch.LongTensor, scores: torch.Tensor) -> list[list[int]]:
    """Longest prefix equal to the target's argmax, then the target's own token.

    Args:
        draft: `[b, k]` proposals.
        scores: `[b, k + 1, V]` target scores after processors.

    Returns:
        for each row 1 to k + 1 token ids.
    """
    count = draft.shape[1]
    chosen = scores.argmax(dim=-1)
    # One transfer a round: the host decides how far to go.
    rows = torch.cat([draft.to(chosen.device), chosen], dim=1).tolist()
    return [_longest_prefix(row[:count], row[count:]) for row in rows]


def _longest_prefix(proposed: list[int], chosen: list[int]) -> list[int]:
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == chosen[accepted]:
        accepted += 1
    return chosen[: accepted + 1]


def accept_sampled(
    *, draft: torch.LongTensor, draft_scores: torch.Tensor | None, scores: torch.Tensor
) -> list[list[int]]:
    """Speculative sampling (arXiv 2211.17192, algorithm 1): the tokens have the target's distribution exactly.

    Proposal x stays with probability min(1, p(x) / q(x)); the first one that does not is drawn again from
    max(0, p - q), renormalised; after k accepted ones the last token is drawn from p.

    Args:
        draft: `[b, k]` proposals, each drawn from its row of softmax(draft_scores).
        draft_scores: `[b, k, V]` after processors; None if the proposals were not drawn, so that q is 1 at each.
        scores: `[b, k + 1, V]` target scores after processors.

    Returns:
        for each row 1 to k + 1 token ids.
    """
    p = scores.softmax(dim=-1)
    if draft_scores is None:
        q = torch.zeros_like(p).scatter_(-1, functional.pad(draft[..., None], (0, 0, 0, 1)), 1.0)
        q[:, -1] = 0.0
    else:  # the row after the last proposal has q = 0, so its residual is p itself
        q = functional.pad(draft_scores.softmax(dim=-1), (0, 0, 0, 1))
    proposed = draft[..., None]
    kept = torch.rand(proposed.shape, device=p.device) * q.gather(-1, proposed) < p.gather(-1, proposed)
    accepted = kept.cumprod(dim=1, dtype=torch.long).sum(dim=1, keepdim=True)  # [b, 1, 1]
    at = accepted.expand(-1, -1, p.shape[-1])
    last = draw(_residual(p.gather(1, at), q.gather(1, at)))[:, 0]
    values = torch.cat([accepted[:, 0], draft, last], dim=1).tolist()
    return [[*row[1 : 1 + row[0]], row[-1]] for row in values]


def accept_one(
    *, draft: int | None, draft_scores: torch.Tensor | None, scores: torch.Tensor, do_sample: bool
) -> tuple[int, bool]:
    """One position of one row, for processors that must see accepted prefixes in order.

    Args:
        draft: the proposal at this position, or None after the last one.
        draft_scores: `[V]` scores it was drawn from, when sampling; None if it was not drawn, so that q is 1.
        scores: `[V]` target scores after processors.

    Returns:
        the token, and whether it is the accepted proposal.
    """
    if not do_sample:
        token = int(scores.argmax())
        return token, token == draft
    p = scores.softmax(dim=-1)
    if draft is None:
        return int(draw(p)), False
    if draft_scores is None:
        q = torch.zeros_like(p)
        q[draft] = 1.0
    else:
        q = draft_scores.softmax(dim=-1)
    if bool(torch.rand((), device=p.device) * q[draft] < p[draft]):
        return draft, True
    return int(draw(_residual(p, q))), False


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(0, p - q), not normalised; p itself where rounding leaves nothing."""
    # Next to a residual that is not 0 the share of p is far below rounding.
    return torch.add((p - q).clamp(min=0), p, alpha=1e-30)
