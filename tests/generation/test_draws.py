"""Drawing by inversion: the distribution, and the two ends of the random number."""

import torch

from dflash_hf.generation import draws
from dflash_hf.generation.draws import draw


def test_frequencies():
    """Weights that are not normalised, some of them 0, in a batch of rows."""
    torch.manual_seed(0)
    weights = torch.tensor([[0.0, 3.0, 1.0, 0.0, 6.0, 0.0], [2.0, 0.0, 0.0, 1.0, 1.0, 0.0]])
    drawn = draw(weights.expand(20000, 2, 6))
    assert drawn.shape == (20000, 2, 1) and drawn.dtype == torch.int64
    for row, weight in enumerate(weights):
        counts, chance = drawn[:, row, 0].bincount(minlength=6), weight / weight.sum()
        assert counts[weight == 0].sum() == 0
        assert ((counts - 20000 * chance).abs() <= 4 * (20000 * chance * (1 - chance)).sqrt()).all()


def test_ends_of_the_random_number(monkeypatch):
    """0, and the largest double below 1: the first and the last index that have a weight."""
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    found = []
    for end in (0.0, 1.0 - 2.0**-53):
        monkeypatch.setattr(
            draws.torch, "rand", lambda *args, end=end, **more: torch.full(args[0], end, dtype=more["dtype"])
        )
        found.append(int(draw(weights)))
    assert sorted(found) == [1, 3]
