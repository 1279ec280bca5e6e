"""A drafter on its way to the Hub: weights, config and card in one upload."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from transformers import PreTrainedModel
from transformers.utils import logging

from .model_card import card_data, card_for_repository, fill_card, layout_of, sealed
from .token_index import FILE_NAME

logger = logging.get_logger(__name__)

# Files of an earlier upload. Left beside new shards, an old model.safetensors would be loaded in their place.
EARLIER_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", FILE_NAME)


def push_drafter(
    drafter: PreTrainedModel,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: list[str] | None = None,
    card: ModelCard | None = None,
    overwrite_card: bool = False,
    local_card: str | None = None,
) -> CommitInfo:
    """Upload a drafter. See `DFlashDraftModel.push_to_hub`.

    Args:
        local_card: text of a README.md that lies with the drafter on disk; used where a person edited it.
    """
    api = HfApi(library_name="dflash_hf", token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        drafter.save_pretrained(folder, max_shard_size=max_shard_size)
        generated = default_card(drafter, name=repo_id, folder=Path(folder), tags=tags or ()) if card is None else card
        head = api.model_info(repo_id, revision=revision).sha
        text, warning = card_for_repository(
            generated=sealed(generated),
            local=local_card,
            remote=remote_card(repo_id, revision=head, token=token),
            overwrite=overwrite_card,
        )
        if warning is not None:
            logger.warning(f"{repo_id}: {warning}")
        if text is not None:
            (Path(folder) / "README.md").write_text(text, encoding="utf-8")
        return commit_folder(
            api,
            repo_id=repo_id,
            folder=Path(folder),
            head=head,
            revision=revision,
            commit_message=commit_message or "Upload drafter",
            commit_description=commit_description,
            create_pr=create_pr,
        )


def commit_folder(
    api: HfApi,
    *,
    repo_id: str,
    folder: Path,
    head: str,
    ignored: Sequence[str] = (),
    removed: Sequence[str] = EARLIER_WEIGHTS,
    **options: Any,
) -> CommitInfo | Future[CommitInfo]:
    """Upload the files of a folder (not its subfolders) in one commit, so that weights and config never part.

    Args:
        head: the commit that was looked at; the Hub refuses the upload if somebody has committed since.
        ignored: patterns of names that stay at home.
        removed: patterns of names in the repository that go unless they are uploaded anew.
        options: of `HfApi.create_commit`.
    """
    names = [path.name for path in sorted(folder.iterdir()) if path.is_file()]
    added = list(filter_repo_objects(names, ignore_patterns=list(ignored)))
    there = api.list_repo_files(repo_id, revision=head)
    gone = [name for name in filter_repo_objects(there, allow_patterns=list(removed)) if name not in added]
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in added]
    operations += [CommitOperationDelete(path_in_repo=name) for name in gone]
    return api.create_commit(repo_id, operations, parent_commit=head, **options)


def remote_card(repo_id: str, *, revision: str | None, token: bool | str | None) -> str | None:
    """README.md of a repository as it is there; None if there is none."""
    try:
        path = hf_hub_download(repo_id, "README.md", revision=revision, token=token)
    except EntryNotFoundError:
        return None
    # Not through ModelCard: that would spell the metadata anew, and a person's card would no longer be theirs.
    return Path(path).read_text(encoding="utf-8")


def default_card(drafter: PreTrainedModel, *, name: str, folder: Path, tags: Any = ()) -> ModelCard:
    """The card that a drafter's own config can fill.

    Args:
        name: repository id.
        folder: where it is saved; its config.json says in which layout.
        tags: further tags.
    """
    on_disk = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return fill_card(
        data=card_data(name=name, base_model=drafter.config.target_name_or_path, tags=tags),
        config=drafter.config,
        num_parameters=drafter.num_parameters(),
        dtype=str(drafter.dtype).removeprefix("torch."),
        layout=layout_of(on_disk),
        frequent_tokens=drafter.num_frequent_tokens,
    )
