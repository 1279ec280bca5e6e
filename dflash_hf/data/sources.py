"""Datasets by name: a Hub repository, a JSON, JSONL or Parquet file, or a folder saved by `datasets`."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset, load_dataset, load_from_disk

from ..errors import DatasetError

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def load_rows(name: str, *, split: str = "train", revision: str | None = None) -> Dataset:
    """Load a dataset with the `datasets` library.

    Args:
        name: `user/repository` on the Hub, a `.json`, `.jsonl` or `.parquet` file, or a folder from `save_to_disk`.
        split: split of a Hub dataset or folder.
        revision: Hub revision.

    Raises:
        DatasetError: if a local file is of another kind.
    """
    path = Path(name)
    if path.is_file():
        builder = _BUILDERS.get(path.suffix)
        if builder is None:
            raise DatasetError(f"{name} is not one of the file kinds {', '.join(_BUILDERS)}.")
        return load_dataset(builder, data_files=str(path), split="train")
    if path.is_dir():
        try:
            loaded = load_from_disk(str(path))
        except FileNotFoundError as error:
            raise DatasetError(
                f"{name} is a folder that `save_to_disk` did not write. Name such a folder, or a file of the kinds "
                f"{', '.join(_BUILDERS)}."
            ) from error
        if isinstance(loaded, Dataset):
            return loaded
        if split not in loaded:
            raise DatasetError(f"{name} has no split {split!r}; it has {', '.join(loaded)}.")
        return loaded[split]
    if path.suffix in _BUILDERS:
        raise DatasetError(f"There is no file {name}.")
    return load_dataset(name, split=split, revision=revision)
