"""The chunked loss against one dense cross-entropy."""

import math
import weakref

import pytest
import torch
from training_helpers import tiny_drafter

from dflash_hf.target import OutputHead
from dflash_hf.training.losses import chunked_losses, dpace_weights

ROWS, WIDTH, VOCAB = 37, 12, 53


def case(rows=ROWS):
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(rows, WIDTH, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    labels = torch.randint(0, VOCAB, (rows,), generator=generator)
    labels[::3] = (hidden @ weight.T).argmax(-1)[::3]  # some hits
    weights = torch.rand(rows, generator=generator)
    weights[::5] = 0
    return hidden, weight, labels, weights


def softcapped(weight, cap):
    return lambda rows: torch.tanh(rows @ weight.T / cap) * cap


def linear(weight):
    return lambda rows: rows @ weight.T


def dense(hidden, labels, weights, logits_of):
    """The same numbers from fp64 log-probabilities of all rows at once."""
    hidden = hidden.detach().double().requires_grad_()
    logits = logits_of(hidden)
    losses = torch.logsumexp(logits, -1) - logits[torch.arange(len(labels)), labels]
    total = (losses * weights).sum()
    (gradient,) = torch.autograd.grad(total, hidden)
    return total, losses, logits.argmax(-1) == labels, gradient


@pytest.mark.parametrize("chunk_rows", [1, 2, 7, 36, 37, 38, 1000])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_equal_to_a_dense_cross_entropy(chunk_rows, cap):
    """Value, per-row losses, hits and gradient, for chunks that do and do not divide the rows; weights 0 included."""
    hidden, weight, labels, weights = case()
    make = linear if cap is None else lambda table: softcapped(table, cap)
    rows = hidden.clone().requires_grad_()
    terms = chunked_losses(rows=rows, labels=labels, logits_of=make(weight), chunk_rows=chunk_rows)
    total_loss = (terms.losses * weights).sum()
    (3.0 * total_loss).backward()
    total, losses, hits, gradient = dense(hidden, labels, weights.double(), make(weight.double()))
    torch.testing.assert_close((terms.losses * weights).sum().double(), total, rtol=2e-6, atol=0)
    torch.testing.assert_close(terms.cross_entropy.double(), losses, rtol=1e-5, atol=1e-5)
    assert torch.equal(terms.hits, hits) and hits.any() and not hits.all()
    torch.testing.assert_close(rows.grad.double(), 3 * gradient, rtol=1e-5, atol=1e-5)
    assert rows.grad[::5].eq(0).all(), "a row of weight 0 gets no gradient"
    assert not terms.cross_entropy.requires_grad


def test_no_rows_give_zero_and_a_usable_gradient():
    """An empty batch still takes part in the step: loss 0, gradient of the empty shape."""
    rows = torch.zeros(0, WIDTH, requires_grad=True)
    empty = torch.zeros(0)
    terms = chunked_losses(rows=rows, labels=empty.long(), logits_of=linear(torch.ones(VOCAB, WIDTH)), chunk_rows=4)
    terms.losses.sum().backward()
    assert terms.losses.shape == (0,) and terms.hits.shape == (0,) and rows.grad.shape == (0, WIDTH)


def test_logits_of_one_chunk_exist_at_once():
    """The head never sees more rows than a chunk, every row once, and the logits of earlier chunks are freed."""

    hidden, weight, labels, weights = case()
    seen, alive = [], []

    def spy(rows):
        logits = rows @ weight.T
        seen.append(len(rows))
        alive.append(sum(reference() is not None for reference in references))
        references.append(weakref.ref(logits))
        return logits

    references = []
    rows = hidden.clone().requires_grad_()
    terms = chunked_losses(rows=rows, labels=labels, logits_of=spy, chunk_rows=8)
    (terms.losses * weights).sum().backward()
    assert seen == [8, 8, 8, 8, 5]
    assert max(alive) <= 1, "logits of earlier chunks are still held"


def test_without_gradient_no_graph_is_built():
    """Evaluation runs the same function under no_grad."""
    hidden, weight, labels, weights = case()
    with torch.no_grad():
        terms = chunked_losses(rows=hidden, labels=labels, logits_of=linear(weight), chunk_rows=8)
    total, *_ = dense(hidden, labels, weights.double(), linear(weight.double()))
    torch.testing.assert_close((terms.losses * weights).sum().double(), total, rtol=2e-6, atol=0)
    assert not terms.losses.requires_grad


def test_frozen_head_gets_no_gradient(target):
    """The target's head is read, never trained, even when its parameters ask for a gradient."""
    head = OutputHead(target, tiny_drafter(target).config)
    rows = torch.randn(5, 32).requires_grad_()
    terms = chunked_losses(rows=rows, labels=torch.arange(5), logits_of=head, chunk_rows=2)
    terms.losses.sum().backward()
    assert target.get_output_embeddings().weight.grad is None and rows.grad.abs().sum() > 0


def test_half_precision_rows_are_summed_in_fp32():
    """bf16 rows: losses and their sum are fp32 (a bf16 sum of 37 terms would be off by percents)."""
    hidden, weight, labels, weights = case()
    terms = chunked_losses(
        rows=hidden.bfloat16(),
        labels=labels,
        logits_of=lambda rows: rows @ weight.bfloat16().T,
        chunk_rows=8,
    )
    logits = (hidden.bfloat16() @ weight.bfloat16().T).double()
    losses = torch.logsumexp(logits, -1) - logits[torch.arange(ROWS), labels]
    assert terms.losses.dtype == torch.float32
    torch.testing.assert_close((terms.losses * weights).sum().double(), (losses * weights).sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("chunk_rows", [5, 100])
@pytest.mark.parametrize("objective", ["target_argmax", "target_kl"])
@pytest.mark.parametrize("shared", [False, True], ids=["a state a row", "rows that share states"])
def test_objectives_that_follow_the_target(objective, chunk_rows, shared):
    """The target's choice, and the divergence from its distribution, against fp64 over all rows at once."""
    hidden, weight, labels, weights = case()
    generator = torch.Generator().manual_seed(9)
    target_rows, target_weight = (torch.randn(n, 7, generator=generator) for n in (ROWS, VOCAB))
    row_of = torch.randint(0, ROWS // 2, (ROWS,), generator=generator) if shared else None
    rows = hidden.clone().requires_grad_()
    terms = chunked_losses(
        rows=rows,
        labels=labels,
        logits_of=softcapped(weight, 3.0),
        chunk_rows=chunk_rows,
        objective=objective,
        target_rows=target_rows,
        target_row_of=row_of,
        target_logits_of=linear(target_weight),
    )
    (terms.losses * weights).sum().backward()
    target_rows = target_rows if row_of is None else target_rows[row_of]
    exact = hidden.double().requires_grad_()
    log_q = softcapped(weight.double(), 3.0)(exact).log_softmax(-1)
    log_p = (target_rows.double() @ target_weight.double().T).log_softmax(-1)
    wanted = labels if objective == "target_kl" else log_p.argmax(-1)
    cross_entropy = -log_q[torch.arange(ROWS), wanted]
    losses = (log_p.exp() * (log_p - log_q)).sum(-1) if objective == "target_kl" else cross_entropy
    (losses * weights.double()).sum().backward()
    torch.testing.assert_close(terms.losses.double(), losses.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(terms.cross_entropy.double(), cross_entropy.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(terms.hits, log_q.argmax(-1) == labels), "hits are of the data's token, whatever is learnt"


def test_divergence_from_oneself_is_zero():
    """KL(p || p) = 0 with zero gradient: the optimum is the target's own distribution."""
    hidden, weight, labels, _ = case()
    rows = hidden.clone().requires_grad_()
    terms = chunked_losses(
        rows=rows,
        labels=labels,
        logits_of=linear(weight),
        chunk_rows=8,
        objective="target_kl",
        target_rows=hidden,
        target_logits_of=linear(weight),
    )
    terms.losses.sum().backward()
    assert terms.losses.abs().max() < 1e-5 and rows.grad.abs().max() < 1e-5


@pytest.mark.parametrize("seed", range(5))
def test_dpace_weights_equal_loops(seed):
    """Sum over later slots of the chance that all slots up to there are right; unsupervised slots are passed over."""
    generator = torch.Generator().manual_seed(seed)
    cross_entropy = torch.rand(3, 4, 6, generator=generator) * 3
    supervised = torch.rand(3, 4, 6, generator=generator) < 0.7
    weights = dpace_weights(cross_entropy=cross_entropy, supervised=supervised, alpha=0.5)
    for block, given, mask in zip(weights.view(-1, 6), cross_entropy.view(-1, 6), supervised.view(-1, 6)):
        for slot in range(6):
            expected, chance = 0.0, 1.0
            for later in range(6):
                if mask[later]:
                    chance *= 0.5 * math.exp(-given[later]) + 0.5
                    expected += chance if later >= slot else 0.0
            assert float(block[slot]) == pytest.approx(expected if mask[slot] else 0.0, rel=1e-5)


def test_dpace_weights_are_the_derivative_of_the_expected_length():
    """Without smoothing: d (expected number of accepted proposals) / d (log confidence of a slot), by autograd."""
    log_confidence = (-torch.rand(5, dtype=torch.float64)).requires_grad_()
    log_confidence.exp().cumprod(0).sum().backward()
    weights = dpace_weights(cross_entropy=-log_confidence, supervised=torch.ones(5, dtype=torch.bool), alpha=1e-12)
    torch.testing.assert_close(weights, log_confidence.grad, rtol=1e-9, atol=1e-9)
    assert not weights.requires_grad


def test_no_tensor_holds_all_logits():
    """Forward and backward: nothing larger than a chunk's logits is allocated, and few of those live at once."""
    from torch.utils._python_dispatch import TorchDispatchMode

    rows_count, vocabulary, chunk = 320, 1000, 16

    class Allocations(TorchDispatchMode):
        largest = live = peak = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, (tuple, list)) else [output]:
                # views share their base's memory
                if isinstance(tensor, torch.Tensor) and tensor._base is None and tensor.numel() >= vocabulary:
                    size = tensor.numel()
                    self.largest = max(self.largest, size)
                    self.live += size
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(tensor, self.free, size)
            return output

        def free(self, size):
            self.live -= size

    generator = torch.Generator().manual_seed(0)
    head = torch.randn(vocabulary, 8, generator=generator)
    rows = torch.randn(rows_count, 8, generator=generator).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows_count,), generator=generator)
    for objective in ("data", "target_argmax", "target_kl"):
        with Allocations() as seen:
            terms = chunked_losses(
                rows=rows,
                labels=labels,
                logits_of=linear(head),
                chunk_rows=chunk,
                objective=objective,
                target_rows=rows.detach(),
                target_logits_of=linear(head),
            )
            terms.losses.sum().backward()
        assert seen.largest == chunk * vocabulary
        assert seen.peak <= 10 * chunk * vocabulary, (objective, seen.peak)  # all logits are 20 chunks
