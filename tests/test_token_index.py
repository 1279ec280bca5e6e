"""The index of frequent tokens on disk: it goes where the drafter goes, and a bad one is refused."""

import json

import pytest
import torch
from conftest import GOLDEN, tiny_drafter, tiny_target
from datasets import Dataset

from dflash_hf import DFlashDraftModel, frequent_tokens
from dflash_hf.errors import CheckpointError, DatasetError, DFlashConfigError
from dflash_hf.hub.export import export_drafter
from dflash_hf.token_index import FILE_NAME

INDEX = [9, 4, 77, 30]


@pytest.fixture
def drafter():
    model = tiny_drafter(tiny_target())
    model.frequent_token_ids = INDEX
    return model


def test_round_trip(drafter, tmp_path):
    """Order kept, weights and config as without it, and gone when the drafter that is saved next has none."""
    drafter.save_pretrained(tmp_path)
    weights, config = ((tmp_path / name).read_bytes() for name in ("model.safetensors", "config.json"))
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.frequent_token_ids.tolist() == INDEX and loaded.frequent_token_ids.dtype == torch.int64
    loaded.save_pretrained(tmp_path)
    assert json.loads((tmp_path / FILE_NAME).read_text()) == {"token_ids": INDEX}
    loaded.frequent_token_ids = None
    loaded.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert (weights, config) == tuple((tmp_path / name).read_bytes() for name in ("model.safetensors", "config.json"))
    assert DFlashDraftModel.from_pretrained(tmp_path).frequent_token_ids is None


def test_it_is_exported(tmp_path):
    """To another layout and back."""
    drafter = DFlashDraftModel.from_pretrained(GOLDEN / "zlab_nested_block")
    drafter.frequent_token_ids = INDEX
    drafter.save_pretrained(tmp_path / "a")
    target = tiny_target(hidden=drafter.config.hidden_size, vocab=drafter.config.vocab_size, layers=8)
    target.save_pretrained(tmp_path / "target")
    export_drafter(tmp_path / "a", to="speculators", output=tmp_path / "b", target=str(tmp_path / "target"))
    assert DFlashDraftModel.from_pretrained(tmp_path / "b").frequent_token_ids.tolist() == INDEX


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"token_ids": []}', '{"token_ids": [1, 1]}', '{"token_ids": [1, 97]}', '{"token_ids": [-1]}']
    + ['{"token_ids": [1.0]}', '{"token_ids": [true]}', '{"token_ids": "12"}'],
)
def test_a_damaged_file_stops_the_load(text, drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="frequent_tokens.json is not an index"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("index", [[], [3, 3], [97], [-1], [1.5], [[1, 2]]])
def test_a_wrong_index_is_refused(index, drafter):
    """And the one before stays."""
    with pytest.raises(DFlashConfigError):
        drafter.frequent_token_ids = index
    assert drafter.frequent_token_ids.tolist() == INDEX


def test_a_trimmed_vocabulary_takes_no_index():
    drafter = DFlashDraftModel.from_pretrained(GOLDEN / "speculators_dflash_selfcontained")
    with pytest.raises(DFlashConfigError, match="56 tokens"):
        drafter.frequent_token_ids = [1]


def test_counting():
    """Response tokens alone count; fewer distinct tokens give a smaller index."""
    data = Dataset.from_dict({"prompt_ids": [[8, 8, 8, 8], [8]], "response_ids": [[5, 6, 6], [7, 6, 5]]})
    assert frequent_tokens(data, size=2).tolist() == [6, 5]
    assert frequent_tokens(data).tolist() == [6, 5, 7]
    with pytest.raises(DatasetError, match="size is 0"):
        frequent_tokens(data, size=0)
