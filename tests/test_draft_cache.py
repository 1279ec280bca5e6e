"""`DraftCache` against a reference that concatenates and slices."""

import random

import pytest
import torch

from dflash_hf.draft_cache import DraftCache


class Reference:
    """The same contract with torch.cat and slices, nothing shared."""

    def __init__(self, num_layers):
        self.rows = [None] * num_layers

    def update(self, keys, values, layer):
        new = torch.stack([keys, values]).clone()
        self.rows[layer] = new if self.rows[layer] is None else torch.cat([self.rows[layer], new], dim=3)
        return self.rows[layer][0], self.rows[layer][1]

    def crop(self, length):
        self.rows = [None if rows is None else rows[:, :, :, :length] for rows in self.rows]

    def length(self, layer):
        return 0 if self.rows[layer] is None else self.rows[layer].shape[3]


def rows(number, *, batch=2, heads=2, dim=4, seed=None):
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    return torch.randn(batch, heads, number, dim, generator=generator)


@pytest.mark.parametrize("seed", range(6))
def test_random_updates_and_crops_equal_concatenation(seed):
    """Growth by doubling, crops and rewrites of cropped rows never lose, keep or mix a row."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cache, reference = DraftCache(num_layers=3), Reference(3)
    for _ in range(60):
        if rng.random() < 0.35:
            length = rng.randint(0, reference.length(0) + 3)
            cache.crop(length)
            reference.crop(length)
        else:
            number = rng.choice([0, 1, 2, 7, 16, 100, 300])
            for layer in range(3):
                keys, values = rows(number), rows(number)
                got, expected = cache.update(keys, values, layer), reference.update(keys, values, layer)
                assert torch.equal(got[0], expected[0])
                assert torch.equal(got[1], expected[1])
        assert [cache.get_seq_length(layer) for layer in range(3)] == [reference.length(layer) for layer in range(3)]


def test_a_new_cache_is_empty_and_layers_count_for_themselves():
    """The length is that of the layer asked for: inside a forward pass the first layer is ahead of the second."""
    cache = DraftCache(num_layers=2)
    assert cache.get_seq_length() == 0
    cache.update(rows(5), rows(5), 0)
    assert (cache.get_seq_length(0), cache.get_seq_length(1)) == (5, 0)


def test_crop_beyond_the_end_keeps_everything():
    """Cropping to a length that was never reached is no growth."""
    cache = DraftCache(num_layers=2)
    cache.update(rows(5), rows(5), 0)
    cache.crop(50)
    assert (cache.get_seq_length(0), cache.get_seq_length(1)) == (5, 0)


def test_update_returns_views_and_buffers_grow_by_doubling():
    """One round writes its own rows only: within the capacity no buffer is allocated and none is copied."""
    cache = DraftCache(num_layers=1)
    first, _ = cache.update(rows(10), rows(10), 0)
    second, _ = cache.update(rows(100), rows(100), 0)
    assert first.data_ptr() == second.data_ptr()
    allocations = set()
    for _ in range(200):
        keys, _ = cache.update(rows(20), rows(20), 0)
        allocations.add(keys.data_ptr())
    assert len(allocations) <= 6  # log2(4110 / 256), rounded up, plus the first


def test_views_handed_out_before_a_growth_keep_their_rows():
    """A growth moves to a new buffer; what an earlier call returned is not overwritten by it."""
    cache = DraftCache(num_layers=1)
    keys = rows(200, seed=1)
    held, _ = cache.update(keys, keys, 0)
    cache.update(rows(400), rows(400), 0)
    assert torch.equal(held, keys)


def test_the_dtype_is_that_of_the_rows():
    """bf16 drafters cache bf16."""
    cache = DraftCache(num_layers=1)
    keys, values = cache.update(rows(3).bfloat16(), rows(3).bfloat16(), 0)
    assert keys.dtype == values.dtype == torch.bfloat16
