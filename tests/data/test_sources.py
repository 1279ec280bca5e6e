"""Local data sets by name."""

import json

import pytest
from datasets import Dataset, DatasetDict

from dflash_hf.data.sources import load_rows
from dflash_hf.errors import DatasetError

ROWS = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4, 5], "loss_mask": [1, 1]}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """`datasets` caches what its builders read; not in the user's folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, kind):
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    else:
        Dataset.from_list(ROWS).to_parquet(str(path))


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_files(tmp_path, kind):
    """Rows in order, whatever the split is called."""
    path = tmp_path / f"rows.{kind}"
    write(path, kind)
    assert load_rows(str(path)).to_list() == ROWS
    assert load_rows(str(path), split="validation").to_list() == ROWS


def test_folder_of_one_dataset(tmp_path):
    """save_to_disk of a Dataset."""
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert load_rows(str(tmp_path / "saved")).to_list() == ROWS


def test_folder_of_splits(tmp_path):
    """save_to_disk of a DatasetDict: the split is chosen."""
    parts = {"train": Dataset.from_list(ROWS[:1]), "test": Dataset.from_list(ROWS[1:])}
    DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert load_rows(str(tmp_path / "saved")).to_list() == ROWS[:1]
    assert load_rows(str(tmp_path / "saved"), split="test").to_list() == ROWS[1:]


def test_a_split_that_is_not_there_is_refused(tmp_path):
    """The error names the split and those in the folder."""
    DatasetDict({"test": Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DatasetError, match="train.*test"):
        load_rows(str(tmp_path / "saved"))


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    """A plain folder gives the package's own error with its name."""
    (tmp_path / "plain").mkdir()
    with pytest.raises(DatasetError, match="plain"):
        load_rows(str(tmp_path / "plain"))


@pytest.mark.parametrize("name", ["rows.csv", "rows.txt", "rows"])
def test_other_suffixes_are_refused(tmp_path, name):
    """The error names the file and the kinds that are read."""
    (tmp_path / name).write_text("x")
    with pytest.raises(DatasetError) as caught:
        load_rows(str(tmp_path / name))
    for word in (name, ".json", ".jsonl", ".parquet"):
        assert word in str(caught.value)


def test_anything_else_is_a_hub_name(monkeypatch):
    """Split and revision reach `load_dataset` (not called for real: nothing is downloaded)."""
    calls = []
    monkeypatch.setattr("dflash_hf.data.sources.load_dataset", lambda *names, **more: calls.append((names, more)))
    load_rows("someone/some-data", split="test", revision="abc")
    assert calls == [(("someone/some-data",), {"split": "test", "revision": "abc"})]
