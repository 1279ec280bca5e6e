"""What a folder holds after saving, and what loading says about damaged, missing or pickled weights."""

import json

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.errors import CheckpointError
from dflash_hf.model_card import card_for_repository, sealed


@pytest.fixture
def folder(drafter, tmp_path):
    """A drafter in six shards."""
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 6
    return tmp_path


def test_other_ranks_write_nothing(tmp_path):
    drafter = tiny_drafter(tiny_target())
    drafter.generation_config.block_size = 4
    drafter.save_pretrained(tmp_path, False)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("length", [0, 7, 200, -1])
def test_a_truncated_shard_is_named(folder, length):
    """Empty, cut in the length field, in the header, in the data."""
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=rf"{shard.name}.*truncated"):
        DFlashDraftModel.from_pretrained(folder)


def test_a_corrupted_header_is_named(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[20] ^= 255
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=shard.name):
        DFlashDraftModel.from_pretrained(folder)


def test_a_missing_shard_is_named(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing"):
        DFlashDraftModel.from_pretrained(folder)


def test_a_shard_without_a_tensor_that_the_index_promises_is_named(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    gone = sorted(tensors)[0]
    del tensors[gone]
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{shard.name} holds '{gone}'"):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("text", ['{"weight_map": {', "{}", "[]"])
def test_a_damaged_index_is_named(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="model.safetensors.index.json"):
        DFlashDraftModel.from_pretrained(folder)


def test_shards_over_a_single_file(drafter, folder, tmp_path):
    """Saved anew into a folder that holds the weights of another drafter, whole: the new ones are loaded."""
    other = tiny_drafter(tiny_target(), seed=5)
    other.save_pretrained(tmp_path / "out")
    drafter.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    again = DFlashDraftModel.from_pretrained(tmp_path / "out")
    assert all(theirs.equal(ours) for theirs, ours in zip(again.parameters(), drafter.parameters()))
    other.save_pretrained(tmp_path / "out")
    again = DFlashDraftModel.from_pretrained(tmp_path / "out")
    assert all(theirs.equal(ours) for theirs, ours in zip(again.parameters(), other.parameters()))
    weights = [file.name for file in (tmp_path / "out").iterdir() if "model" in file.name]
    assert weights == ["model.safetensors"]


@pytest.mark.parametrize("sharded", [False, True])
def test_pickled_weights_are_refused_unless_allowed(drafter, tmp_path, sharded):
    drafter.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = drafter.state_dict()
    torch.save(state, tmp_path / "pytorch_model.bin")
    if sharded:
        (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-00001-of-00001.bin")
        index = {"metadata": {}, "weight_map": {name: "pytorch_model-00001-of-00001.bin" for name in state}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*use_safetensors=False"):
        DFlashDraftModel.from_pretrained(tmp_path)
    again = DFlashDraftModel.from_pretrained(tmp_path, use_safetensors=False)
    assert all(theirs.equal(ours) for theirs, ours in zip(again.parameters(), drafter.parameters()))


def test_a_pickle_that_runs_code_runs_none(drafter, tmp_path):
    """Even where pickled weights are allowed."""

    class Code:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    drafter.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Code()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match="pytorch_model.bin|[Ww]eights only"):
        DFlashDraftModel.from_pretrained(tmp_path, use_safetensors=False)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_weights_says_so(drafter, tmp_path):
    drafter.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no weights"):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_a_drafter_that_was_quantised_says_so_on_disk(drafter, tmp_path):
    """The key that tells transformers how to read the packed tensors, added to a config that is otherwise unchanged."""
    drafter.save_pretrained(tmp_path)
    config = DFlashConfig.from_pretrained(tmp_path)
    plain = json.loads((tmp_path / "config.json").read_text())
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    config.save_pretrained(tmp_path)
    on_disk = json.loads((tmp_path / "config.json").read_text())
    assert on_disk == plain | {"quantization_config": config.quantization_config}
    again = DFlashConfig.from_pretrained(tmp_path)
    assert again.quantization_config["load_in_8bit"]
    del again.quantization_config
    again.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == plain


OURS, NEWER, HAND, OTHER = sealed("ours"), sealed("newer"), "by hand", "by another hand"


@pytest.mark.parametrize(
    ("local", "remote", "uploaded", "warned"),
    [
        (None, None, NEWER, False),
        (OURS, None, NEWER, False),
        (HAND, None, HAND, False),
        (None, OURS, NEWER, False),
        (HAND, OURS, HAND, False),
        (None, HAND, None, True),
        (OURS, HAND, None, True),
        (HAND, HAND, HAND, False),
        (OTHER, HAND, None, True),
    ],
)
def test_which_card_is_uploaded(local, remote, uploaded, warned):
    text, warning = card_for_repository(generated=NEWER, local=local, remote=remote)
    assert text == uploaded and (warning is not None) == warned
    text, warning = card_for_repository(generated=NEWER, local=local, remote=remote, overwrite=True)
    assert text == (local if local in (HAND, OTHER) else NEWER) and warning is None
