"""What reaches the Hub. The upload itself is huggingface_hub's; here it is replaced by a look at what it is given."""

from pathlib import Path

import pytest
from conftest import tiny_drafter, tiny_target
from huggingface_hub import ModelCard
from transformers.utils import PushToHubMixin

from dflash_hf import DFlashDraftModel


@pytest.fixture
def uploads(monkeypatch):
    """Records (repo id, files) of each upload."""
    found = []

    def upload(self, working_dir, repo_id, files_timestamps, **kwargs):
        found.append((repo_id, {file.name: file.read_bytes() for file in Path(working_dir).iterdir()}))

    class Api:
        def create_repo(self, repo_id, **kwargs):
            return type("Url", (), {"repo_id": repo_id})()

    monkeypatch.setattr(PushToHubMixin, "_upload_modified_files", upload)
    monkeypatch.setattr("transformers.utils.hub.hf_api", lambda *a, **k: Api(), raising=False)
    monkeypatch.setattr("transformers.utils.hub.create_repo", Api().create_repo, raising=False)
    # Otherwise the client would look for a card that the repository has already.
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *a, **k: ModelCard("# A card"))
    return found


def test_push_to_hub_uploads_a_drafter_that_loads(uploads, tmp_path):
    """Weights, config and the drafting settings, in the layout that from_pretrained reads."""
    drafter = tiny_drafter(tiny_target())
    drafter.generation_config.block_size = 4
    drafter.push_to_hub("me/drafter")
    ((repo_id, files),) = uploads
    assert repo_id == "me/drafter"
    assert {"config.json", "model.safetensors", "generation_config.json"} <= files.keys()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    again = DFlashDraftModel.from_pretrained(tmp_path)
    assert again.generation_config.block_size == 4
    assert all(theirs.equal(ours) for theirs, ours in zip(again.parameters(), drafter.parameters()))


def test_save_with_push_leaves_no_file_out(uploads, tmp_path):
    drafter = tiny_drafter(tiny_target())
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(tmp_path / "nice", push_to_hub=True, repo_id="me/nice")
    ((repo_id, files),) = uploads
    assert repo_id == "me/nice" and "generation_config.json" in files
    assert (tmp_path / "nice" / "model.safetensors").exists()


def test_other_ranks_write_nothing(tmp_path):
    drafter = tiny_drafter(tiny_target())
    drafter.generation_config.block_size = 4
    drafter.save_pretrained(tmp_path, False)
    assert not list(tmp_path.glob("*.json"))
