"""The feature store: its content, resuming, refusing what does not belong together, reading."""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_target
from datasets import Dataset
from test_chat import make_tokenizer
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from dflash_hf.data.feature_store import FeatureStore
from dflash_hf.data.features import build_feature_store
from dflash_hf.data.fingerprints import fingerprint_dataset, fingerprint_model, fingerprint_tokenizer
from dflash_hf.errors import FeatureStoreError

LENGTHS = [9, 3, 14, 7, 1, 11, 8]
THREE_SHARDS = 26 * 2 * 32 * 2  # bytes of 26 tokens with two taps of 32 in bf16: examples 0 to 2, 3 to 5, and 6


def dataset(seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    return Dataset.from_dict(
        {"input_ids": [torch.randint(4, 97, (length,), generator=generator).tolist() for length in lengths]}
    )


def build(path, target, data=None, **more):
    return build_feature_store(
        path,
        target=target,
        dataset=dataset() if data is None else data,
        **{"layer_ids": [0, 2], "shard_bytes": THREE_SHARDS, "tokens_per_batch": 24, **more},
    )


def oracle(target, ids, layer_ids):
    """Raw layer outputs of one example alone, read by plain hooks; -1 is the embedding."""
    seen = {}
    hooks = [
        layer.register_forward_hook(
            lambda module, inputs, output, index=index: seen.update(
                {index: output if isinstance(output, torch.Tensor) else output[0], index - 1000: inputs[0]}
            )
        )
        for index, layer in enumerate(target.model.layers)
    ]
    with torch.no_grad():
        target(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[-1000] if tap == -1 else seen[tap] for tap in layer_ids], dim=-1)[0]


@pytest.mark.parametrize("layer_ids", [[0, 2], [3], [-1, 1, 3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_content_is_each_example_alone(tmp_path, target, layer_ids, dtype):
    """Batched and padded while building, yet equal to the unpadded example; the last tap is before the final norm."""
    store = build(tmp_path, target, layer_ids=layer_ids, dtype=dtype)
    assert len(store) == len(LENGTHS)
    for index, ids in enumerate(dataset()["input_ids"]):
        expected = oracle(target, ids, layer_ids)
        assert store[index].shape == (LENGTHS[index], 32 * len(layer_ids)) and store[index].dtype == dtype
        rounding = dict(rtol=0, atol=1e-5) if dtype == torch.float32 else dict(rtol=2**-7, atol=1e-5)
        torch.testing.assert_close(store[index].float(), expected, **rounding)


def shard_bytes(path):
    return {file.name: file.read_bytes() for file in sorted(path.glob("*.safetensors"))}


def test_goes_on_at_the_missing_shard(tmp_path, target):
    """Only what is missing is computed, and it comes out byte-equal; the shards that are there are not touched."""
    build(tmp_path, target)
    before = shard_bytes(tmp_path)
    assert list(before) == [f"features-{number:05d}.safetensors" for number in range(3)]
    (tmp_path / "features-00002.safetensors").unlink()
    times = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}
    runs, progress = [], []
    hook = target.get_decoder().register_forward_pre_hook(lambda *_: runs.append(1))
    build(tmp_path, target, on_progress=lambda done, count: progress.append((done, count)))
    hook.remove()
    assert shard_bytes(tmp_path) == before and len(runs) == 1
    assert progress == [(6, 7), (7, 7)]
    assert all(file.stat().st_mtime_ns == time for file, time in times.items())


def test_a_complete_store_runs_nothing(tmp_path, target):
    """The second build opens what is there."""
    build(tmp_path, target)

    def fail(*_):
        raise AssertionError("the target ran")

    target.get_decoder().register_forward_pre_hook(fail)
    assert len(build(tmp_path, target)) == 7


def test_a_killed_run_leaves_no_half_shard(tmp_path, target, monkeypatch):
    """A crash while writing leaves a temporary name only; the next run completes the store."""
    import dflash_hf.data.feature_store as module

    def crash(tensors, file):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "save_file", crash)
        build(tmp_path, target)
    assert shard_bytes(tmp_path) == {}
    with pytest.raises(FeatureStoreError, match="holds 0 of 7 examples.*same command again"):
        FeatureStore(tmp_path)
    store = build(tmp_path, target)
    torch.testing.assert_close(
        store[0].float(), oracle(target, dataset()["input_ids"][0], [0, 2]), rtol=1e-2, atol=1e-2
    )
    assert not list(tmp_path.glob("*.tmp"))


def other_target():
    """Equal in shape, one weight differs."""
    changed = tiny_target()
    with torch.no_grad():
        changed.model.embed_tokens.weight[48, 5] += 2**-20  # far from both ends of the tensor
    return changed


REFUSED = {
    "dataset": (dict(data=dataset(seed=1)), "dataset_fingerprint"),
    "same tokens, other cuts": (dict(data=dataset(lengths=[3, 9, 14, 7, 1, 11, 8])), "dataset_fingerprint"),
    "longer dataset": (dict(data=dataset(lengths=[*LENGTHS, 4])), "dataset_fingerprint"),
    "taps": (dict(layer_ids=[0, 1]), "target_layer_ids"),
    "order of taps": (dict(layer_ids=[2, 0]), "target_layer_ids"),
    "dtype": (dict(dtype=torch.float32), "dtype"),
    "shards": (dict(shard_bytes=4096), "shard_bytes"),
    "final states": (dict(final_hidden_states=True), "final_hidden_states"),
    "tokenizer": (
        dict(tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))),
        "tokenizer_fingerprint",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_store_is_refused(tmp_path, target, kind):
    """The error names the folder, the field and the remedy, and nothing is written."""
    build(tmp_path, target, tokenizer=make_tokenizer())
    before = shard_bytes(tmp_path)
    more, field = REFUSED[kind]
    with pytest.raises(FeatureStoreError) as caught:
        build(tmp_path, target, **more)
    text = str(caught.value)
    assert str(tmp_path) in text and f" {field} " in text and "another folder" in text
    assert shard_bytes(tmp_path) == before


def test_another_target_is_refused(tmp_path, target):
    """One changed weight is another target, whatever its name says."""
    build(tmp_path, target)
    with pytest.raises(FeatureStoreError, match="target_fingerprint"):
        build(tmp_path, other_target())


def test_a_renamed_target_is_accepted(tmp_path, target):
    """The fingerprint decides, not the path that it was loaded from."""
    build(tmp_path, target)
    target.config._name_or_path = "/another/place"
    assert len(build(tmp_path, target)) == 7


def test_fingerprints(target):
    """Equal for equal weights and data; any changed token, order or dtype changes them."""
    assert fingerprint_model(target) == fingerprint_model(tiny_target()) != fingerprint_model(tiny_target(seed=1))
    assert fingerprint_model(target) != fingerprint_model(tiny_target().bfloat16())
    first = fingerprint_dataset(dataset())
    assert first == fingerprint_dataset(dataset())
    assert first != fingerprint_dataset(dataset().select([1, 0, 2, 3, 4, 5, 6]))


def test_a_missing_shard_is_named(tmp_path, target):
    """The error gives the file and how to go on."""
    build(tmp_path, target)
    (tmp_path / "features-00001.safetensors").unlink()
    with pytest.raises(FeatureStoreError) as caught:
        FeatureStore(tmp_path)
    assert "features-00001" in str(caught.value) and "again" in str(caught.value)


def test_a_cut_shard_is_refused_on_opening(tmp_path, target):
    """Both sizes are named; building again computes that shard only and the store is as before."""
    build(tmp_path, target)
    before = shard_bytes(tmp_path)
    file = tmp_path / "features-00001.safetensors"
    file.write_bytes(before[file.name][:-1])
    with pytest.raises(FeatureStoreError, match=f"features-00001.*{len(before[file.name]):,}"):
        FeatureStore(tmp_path)
    build(tmp_path, target)
    assert shard_bytes(tmp_path) == before


@pytest.mark.parametrize("place", [40, -1])
def test_a_flipped_bit_is_refused_on_first_touch(tmp_path, target, place):
    """In the header or in the numbers; the other shards still read; deleted and built again, it reads."""
    store = build(tmp_path, target)
    expected = store[4]
    file = tmp_path / "features-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    store = FeatureStore(tmp_path)
    store[0]
    with pytest.raises(FeatureStoreError) as caught:
        store[4]
    for word in ("features-00001", "SHA-256", "Delete that file"):
        assert word in str(caught.value)
    file.unlink()
    assert torch.equal(build(tmp_path, target)[4], expected)


def test_final_hidden_states(tmp_path, target):
    """After the final norm, what the head reads: the head on them gives the target's logits. Kept once asked for."""
    assert build(tmp_path / "without", target).final_hidden_states is None
    store = build(tmp_path / "with", target, final_hidden_states=True, dtype=torch.float32, shard_bytes=2**14)
    assert store.final_hidden_states is not None and len(store.final_hidden_states) == 7
    for index, ids in enumerate(dataset()["input_ids"]):
        with torch.no_grad():
            logits = target(input_ids=torch.tensor([ids])).logits[0]
        states = store.final_hidden_states[index]
        assert states.shape == (len(ids), 32)
        torch.testing.assert_close(target.lm_head(states), logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(store[index], oracle(target, ids, [0, 2]), rtol=0, atol=1e-5)
    again = build_feature_store(tmp_path / "with", target=target, dataset=dataset(), layer_ids=[0, 2])
    assert again.manifest.final_hidden_states and again.manifest.dtype == "float32"


def test_it_says_how_much_it_will_write(tmp_path, target):
    """Before it starts: the bytes of all tensors, which the files then hold with little more; 0 once it is complete."""
    said = []
    build(tmp_path, target, on_start=lambda *numbers: said.append(numbers))
    held = sum(len(content) for content in shard_bytes(tmp_path).values())
    assert said[0][0] == sum(LENGTHS) * 2 * 32 * 2 and said[0][0] < held < said[0][0] + 7 * 200
    assert said[0][1] > said[0][0]
    build(tmp_path, target, on_start=lambda *numbers: said.append(numbers))
    assert said[1][0] == 0


def test_a_full_disk_stops_it_before_it_starts(tmp_path, target, monkeypatch):
    """The error gives both sizes; the target does not run and nothing is written."""
    usage = type("Usage", (), {"free": 5000})
    monkeypatch.setattr("dflash_hf.data.features.shutil.disk_usage", lambda path: usage)
    target.get_decoder().register_forward_pre_hook(lambda *_: pytest.fail("the target ran"))
    with pytest.raises(FeatureStoreError, match=r"need 0\.00 GB more.*0\.00 GB free.*larger disk"):
        build(tmp_path / "store", target)
    assert not list((tmp_path / "store").iterdir())


def test_tokenizer_fingerprint():
    """It sees the pipeline, not what the last call padded or cut to."""
    first = make_tokenizer()
    before = fingerprint_tokenizer(first)
    first.pad_token = "<unk>"
    first(["one two", "three"], padding=True, truncation=True, max_length=2)
    assert "Padding" not in before and fingerprint_tokenizer(first) == before
    other = make_tokenizer()
    other.backend_tokenizer.pre_tokenizer = None
    assert fingerprint_tokenizer(other) != before


KILLED = """
import sys
sys.path[:0] = [{tests!r}, {here!r}]
import time
import dflash_hf.data.features as features
from conftest import tiny_target
from test_features import build
write = features.write_shard
def slow(*args, **more):
    entry = write(*args, **more)
    print("shard", flush=True)
    time.sleep({pause})
    return entry
features.write_shard = slow
build({path!r}, tiny_target(), shard_bytes=2000)
"""


@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_killed_and_started_again(tmp_path, target, pause):
    """SIGKILL between shard and manifest (pause), or right after; the store then ends with the bytes of a whole run."""
    here = Path(__file__).parent
    script = KILLED.format(tests=str(here.parent), here=str(here), path=str(tmp_path / "a"), pause=pause)
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    for _ in range(2):
        assert child.stdout.readline() == "shard\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert pause == 0.0 or 0 < len(json.loads((tmp_path / "a" / "manifest.json").read_text())["shards"]) < 4
    build(tmp_path / "a", target, shard_bytes=2000)
    build(tmp_path / "b", target, shard_bytes=2000)
    first, second = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in "ab")
    assert first == second and len(second) > 4


def test_a_folder_without_manifest_is_no_store(tmp_path):
    """The file that is missing is named."""
    with pytest.raises(FeatureStoreError, match="manifest.json"):
        FeatureStore(tmp_path)


def test_shards_without_a_manifest_are_not_adopted(tmp_path, target):
    """Nothing says whose features they are: refused, and left where they are."""
    build(tmp_path, target)
    before = shard_bytes(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FeatureStoreError, match=r"features-00000.*no manifest\.json.*delete this one"):
        build(tmp_path, target)
    assert shard_bytes(tmp_path) == before


def test_manifest_says_what_the_features_belong_to(tmp_path, target):
    """Plain JSON with everything that a check needs."""
    build(tmp_path, target)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["format_version"] == 2 and manifest["target_layer_ids"] == [0, 2] and manifest["examples"] == 7
    assert manifest["hidden_size"] == 32 and manifest["dtype"] == "bfloat16" and not manifest["final_hidden_states"]
    assert [shard["examples"] for shard in manifest["shards"]] == [3, 3, 1]
    for number, shard in enumerate(manifest["shards"]):
        content = (tmp_path / f"features-{number:05d}.safetensors").read_bytes()
        assert shard["bytes"] == len(content) and shard["sha256"] == hashlib.sha256(content).hexdigest()


def test_a_store_of_an_older_format_is_refused(tmp_path, target):
    (tmp_path / "manifest.json").write_text('{"format_version": 1, "shard_examples": [3]}')
    for use in (FeatureStore, lambda path: build(path, target)):
        with pytest.raises(FeatureStoreError, match="format 1.*reads format 2.*again"):
            use(tmp_path)


def test_reading_is_lazy(tmp_path, target):
    """Opening the store opens no shard; reading one example opens its own shard only."""
    build(tmp_path, target)
    store = FeatureStore(tmp_path)
    assert store._open == {}
    store[4]
    assert list(store._open) == [1]


def test_reading_survives_pickling(tmp_path, target):
    """An opened store travels to another process without its file handles."""
    store = build(tmp_path, target)
    expected = [store[index] for index in range(7)]
    copied = pickle.loads(pickle.dumps(store))
    assert all(torch.equal(copied[index], expected[index]) for index in range(7)) and len(copied) == 7


class Rows(torch.utils.data.Dataset):
    """Sums of the features, so that a loader worker has to read them."""

    def __init__(self, store):
        self.store = store

    def __len__(self):
        return len(self.store)

    def __getitem__(self, index):
        return self.store[index].float().sum()


@pytest.mark.parametrize("start", ["fork"])
def test_loader_workers_read_it(tmp_path, target, start):
    """Forked and spawned workers give what the main process reads, also after the store was used here."""
    store = build(tmp_path, target)
    expected = torch.stack([store[index].float().sum() for index in range(7)])
    loader = DataLoader(Rows(store), batch_size=4, num_workers=1, multiprocessing_context=start)
    assert torch.equal(torch.cat(list(loader)), expected)


def test_index_out_of_range(tmp_path, target):
    """IndexError, so that plain iteration over a store ends."""
    store = build(tmp_path, target)
    assert len(list(store)) == 7
    with pytest.raises(IndexError):
        store[7]
