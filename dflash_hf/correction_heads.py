"""Heads that correct the draft logits of a slot by the tokens chosen before it, one slot after the other.

All have `step(logits, hidden=, previous=, embed=, index=, state=)`: from the draft logits `[b, V]` of a proposal, the
hidden states `[b, H]` of its slot and the token before it `[b]`, the corrected scores `[b, V]` (a token that cannot
be proposed has -inf) and the state for the next call, which is None at first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .configuration_dflash import DFlashConfig

Embed = Callable[[torch.LongTensor], torch.Tensor]


class CandidateSelector(nn.Module):
    """DFlash 2's selector: only the most likely tokens stay, each scored by how well it follows the one before.

    `score(b | a) = logit(b) + <predecessor[a] * projection(hidden), successor[b]>` over the `selector_top_k` tokens b
    with the largest logits. Source: z-lab's `dflash` 0.1.0.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def step(self, logits, *, hidden, previous, embed: Embed, index: int, state):
        """See the module; the state stays None."""
        unary, candidates = logits.topk(self.top_k, dim=-1)
        query = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        scores = unary + torch.einsum("br,bkr->bk", query, self.successor_codebook[candidates]).to(unary.dtype)
        return torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores), None


class MarkovHead(nn.Module):
    """DSpark's low-rank bias of the previous token: `logits + w2(f(w1[previous]))`.

    f is the identity (`vanilla`), a gate from the hidden states (`gated`), or a recurrent cell over the block (`rnn`).
    Source: DeepSpec; the same in SpecForge and speculators 0.9.0.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        rank = config.markov_rank
        self.kind = config.markov_head_type
        # vLLM 0.33.0 caps both terms of a Gemma 4 drafter's sum; no other implementation has a cap next to this head.
        self.softcap = config.final_logit_softcapping if config.decoder_type == "gemma4" else None
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def step(self, logits, *, hidden, previous, embed: Embed, index: int, state):
        """See the module; `logits` cover the rows of `markov_w2`, and the state `[b, rank]` is the recurrent cell's."""
        latent = self.markov_w1(previous)
        if self.kind == "gated":
            latent = torch.sigmoid(self.gate_proj(torch.cat([hidden, latent], dim=-1))) * latent
        elif self.kind == "rnn":
            state = torch.zeros_like(latent) if state is None else state
            gate, update, output = self.joint_proj(torch.cat([state, latent, hidden], dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(update)
            latent = torch.tanh(output)
        bias = self.markov_w2(latent)
        if self.softcap:
            bias = torch.tanh(bias / self.softcap) * self.softcap
        return logits + _rows_of(bias, logits), state


class ConfidenceHead(nn.Module):
    """DSpark's predictor of a slot's acceptance: the checkpoint's tensors, kept so that it is saved whole.

    Decoding does not read it: which proposals stay is decided by the target alone.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        width = config.hidden_size + (config.markov_rank if config.confidence_head_with_markov else 0)
        self.proj = nn.Linear(width, 1)


class GRUCorrection:
    """Domino: a GRU reads the embeddings of the tokens chosen so far; its state and the slot's give a logit correction.

    The first `pure_draft_prefix_len` proposals stay as they are, but the GRU reads their tokens too. Source: SpecForge
    0.2.0.

    Args:
        gru: batch-first `nn.GRU` over token embeddings.
        projection: `[b, H + gru_hidden_dim] -> [b, V]`.
        pure_draft_prefix_len: proposals without a correction.
    """

    def __init__(self, gru: nn.GRU, projection: nn.Module, pure_draft_prefix_len: int):
        self.gru, self.projection, self.prefix = gru, projection, pure_draft_prefix_len

    def step(self, logits, *, hidden, previous, embed: Embed, index: int, state):
        """See the module; the state `[1, b, gru_hidden_dim]` is the GRU's."""
        output, state = self.gru(embed(previous)[:, None].to(hidden.dtype), state)
        if index < self.prefix:
            return logits, state
        return logits + _rows_of(self.projection(torch.cat([hidden, output[:, 0]], dim=-1)), logits), state


def _rows_of(bias: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`bias [b, v]` for the rows that `logits` has: a target's table may be padded less than the drafter's."""
    return bias[..., : logits.shape[-1]].to(logits.dtype)
