"""Muon with AdamW for the rest against torch's own two optimizers."""

import copy

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from dflash_hf.training.muon import MuonWithAdamW, orthogonalize


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.LayerNorm(20), torch.nn.Linear(20, 5, bias=False))


def split(net):
    matrices = [p for p in net.parameters() if p.dim() == 2]
    return matrices, [p for p in net.parameters() if p.dim() != 2]


def ours(net, **more):
    return MuonWithAdamW(*split(net), **{"lr": 0.02, "adamw_lr": 0.01, "weight_decay": 0.1, **more})


def take_steps(net, step, numbers):
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        net.zero_grad()
        net(torch.randn(6, 12, generator=generator)).pow(2).mean().backward()
        step()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


@pytest.mark.parametrize("shape", [(8, 8), (5, 20), (20, 5), (1, 7)])
def test_orthogonalize_is_torchs_iteration(shape):
    """The same coefficients and norm: equal to torch's in bf16 to its rounding, close to it in fp32."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    rounded = orthogonalize(matrix, steps=5, dtype=torch.bfloat16)
    torch.testing.assert_close(rounded.float(), expected.float(), rtol=0, atol=1e-2)
    exact = orthogonalize(matrix, steps=5, dtype=torch.float32)
    assert exact.dtype == torch.float32 and exact.shape == matrix.shape
    torch.testing.assert_close(exact, expected.float(), rtol=0, atol=3e-2)


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_singular_values_end_near_one(shape):
    """What the iteration is for, from an SVD: singular values of a random matrix land in [0.6, 1.3], vectors stay."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    matrix = u @ torch.diag(values.clamp(min=0.1 * values.max())) @ v
    out = orthogonalize(matrix, steps=5, dtype=torch.float32)
    core = u.T @ out @ v.T
    assert (core - torch.diag(core.diagonal())).abs().max() < 1e-4
    assert core.diagonal().min() > 0.6 and core.diagonal().max() < 1.3


def test_orthogonalize_of_zero_is_zero():
    """A matrix without gradient must not become NaN."""
    assert orthogonalize(torch.zeros(3, 4), steps=5, dtype=torch.float32).eq(0).all()


def test_steps_equal_torchs_muon_and_adamw():
    """Three steps of the combined optimizer equal torch.optim.Muon and torch.optim.AdamW run side by side."""
    net, reference = model(), model()
    matrices, others = split(reference)
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    take_steps(net, ours(net).step, range(3))
    take_steps(reference, lambda: (muon.step(), adamw.step()), range(3))
    start = model()
    for mine, theirs, first in zip(net.parameters(), reference.parameters(), start.parameters()):
        assert not torch.equal(mine, first)
        # bf16 iterations may round differently; an update is about 0.2 * lr * sqrt(20) per element
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-4 if mine.dim() == 2 else 2e-5)


def test_update_has_the_rms_of_adamw():
    """The scale rule: one update's RMS is about 0.2 * lr whatever the shape."""
    for shape in ((16, 64), (64, 16), (32, 32)):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        MuonWithAdamW([parameter], [], lr=1.0, adamw_lr=0.1).step()
        assert parameter.detach().pow(2).mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("iteration_dtype", [torch.bfloat16, torch.float32])
def test_state_dict_round_trip_continues_identically(iteration_dtype, tmp_path):
    """Saved and loaded into a fresh optimizer (through a file), the next steps are bit-equal."""
    net = model()
    optimizer = ours(net, iteration_dtype=iteration_dtype)
    take_steps(net, optimizer.step, range(3))
    other = copy.deepcopy(net)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    fresh = ours(other, iteration_dtype=iteration_dtype, lr=9.0, adamw_lr=9.0)
    fresh.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    take_steps(net, optimizer.step, range(3, 6))
    take_steps(other, fresh.step, range(3, 6))
    assert same(net, other)


def test_schedule_scales_both_groups():
    """LambdaLR multiplies each group's own rate; a rate of 0 leaves every parameter where it is."""
    net = model()
    optimizer = ours(net)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1.0, 0.5, 0.0)[min(step, 2)])
    rates = []
    for number in range(2):
        take_steps(net, optimizer.step, [number])
        schedule.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates == [[0.01, 0.005], [0.0, 0.0]]
    before = copy.deepcopy(net)
    take_steps(net, optimizer.step, [5])
    assert same(net, before)


def test_accelerate_prepares_it():
    """accelerate wraps and steps it (it moves the state through state_dict), with the same result as without."""
    from accelerate import Accelerator

    net, other = model(), model()
    prepared = Accelerator(cpu=True).prepare(ours(net))
    take_steps(net, prepared.step, range(3))
    take_steps(other, ours(other).step, range(3))
    assert same(net, other)


def test_parameters_without_gradient_are_skipped():
    """A frozen or unused parameter stays, and gets no state."""
    net = model()
    optimizer = ours(net)
    take_steps(net, lambda: None, [0])
    net[0].weight.grad = None
    net[1].bias.grad = None
    before = copy.deepcopy(net)
    optimizer.step()
    assert torch.equal(net[0].weight, before[0].weight) and torch.equal(net[1].bias, before[1].bias)
    assert not torch.equal(net[2].weight, before[2].weight) and not torch.equal(net[1].weight, before[1].weight)


def test_closure_runs_with_gradients():
    """`step(closure)` returns the closure's loss."""
    net = model()
    optimizer = ours(net)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(2, 12)).pow(2).mean()
        loss.backward()
        return loss

    before = copy.deepcopy(net)
    assert optimizer.step(closure).item() > 0 and not same(net, before)
