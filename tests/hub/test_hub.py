"""Publishing and loading through a real HTTP server that speaks the Hub's protocol, with the real client.

The client runs in one process of its own, because it reads HF_ENDPOINT when it is imported.
"""

import io
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import hub_client as client
import pytest
import torch
from hub_server import Hub
from huggingface_hub import ModelCard

from dflash_hf.model_card import is_untouched

MINE = b"---\nlicense: mit   # ours\n---\n# Written by hand\n"


@pytest.fixture(scope="module")
def hub():
    server = Hub()
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def user(hub, tmp_path_factory):
    """`user(function, ...)` runs it in the client's process."""
    home = tmp_path_factory.mktemp("hf_home")
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}
    hidden = ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_HUB_DISABLE_IMPLICIT_TOKEN")
    before = {key: os.environ.pop(key, None) for key in (*settings, *hidden)}
    os.environ.update(settings)
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    try:
        assert pool.submit(client.environment).result() == (hub.endpoint, True)
    finally:
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
    with pool:
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()


def test_push_then_load_by_name_and_generate(hub, user, tmp_path):
    pushed, warnings = user(client.push, "me/plain", seed=1)
    files = hub.files("me/plain")
    assert set(files) == {".gitattributes", "README.md", "config.json", "model.safetensors"} and not warnings
    assert user(client.load, "me/plain", cache_dir=tmp_path) == pushed
    drafted, plain = user(client.generates, "me/plain")
    assert drafted == plain
    # The weights came through the redirect to the other host, and the token stayed behind.
    assert [token for method, url, _, token in hub.requests if url.startswith("/cdn/") and method == "GET"]
    assert not any(token for method, url, _, token in hub.requests if url.startswith("/cdn/"))


def test_the_index_of_frequent_tokens_goes_with_the_weights(hub, user, tmp_path):
    """Pushed, named on the card, loaded, and gone when the next push has none."""
    user(client.push, "me/indexed", seed=1, index=[9, 4, 30])
    assert user(client.index_of, "me/indexed", cache_dir=tmp_path) == [9, 4, 30]
    assert user(client.index_of, "me/indexed", cache_dir=tmp_path, local_files_only=True) == [9, 4, 30]
    assert b"the 3 most frequent tokens" in hub.files("me/indexed")["README.md"]
    user(client.push, "me/indexed", seed=1)
    assert "frequent_tokens.json" not in hub.files("me/indexed")
    assert user(client.index_of, "me/indexed", cache_dir=tmp_path) is None


def test_the_card_that_a_push_writes(hub, user):
    user(client.push, "me/carded", seed=1, tags=["math"])
    text = hub.files("me/carded")["README.md"].decode()
    card = ModelCard(text)
    assert is_untouched(text)
    assert card.data.base_model == "someone/target" and card.data.library_name == "dflash_hf"
    assert {"dflash", "math"} <= set(card.data.tags)
    assert 'from_pretrained("me/carded"' in text and "num_speculative_tokens" in text and "DFLASH" in text


def test_a_moved_revision(hub, user, tmp_path):
    """main moves; the pinned commit still gives the old weights."""
    old, _ = user(client.push, "me/moving", seed=1)
    commit = hub.repos["me/moving"].branches["main"]
    assert user(client.load, "me/moving", cache_dir=tmp_path) == old
    new, _ = user(client.push, "me/moving", seed=2)
    assert old != new
    assert user(client.load, "me/moving", cache_dir=tmp_path) == new
    assert user(client.load, "me/moving", cache_dir=tmp_path, revision=commit) == old
    assert user(client.load_offline, "me/moving", cache_dir=tmp_path, revision=commit) == old
    assert user(client.load_offline, "me/moving", cache_dir=tmp_path) == new


def test_config_and_weights_come_from_one_commit(hub, user, tmp_path, monkeypatch):
    """main moves between the config and the weights: a mixture of two commits must not be loaded."""
    first, _ = user(client.push, "me/racing", seed=1)
    second, _ = user(client.push, "me/racing", seed=2)
    repo = hub.repos["me/racing"]
    before, after = list(repo.commits)[-2:]
    repo.branches["main"] = before
    resolve = repo.resolve

    def moves_after_the_first_answer(revision):
        found = resolve(revision)
        repo.branches["main"] = after
        return found

    monkeypatch.setattr(repo, "resolve", moves_after_the_first_answer)
    assert user(client.load, "me/racing", cache_dir=tmp_path) == first


def test_branches(hub, user, tmp_path):
    main, _ = user(client.push, "me/branched", seed=1)
    other, _ = user(client.push, "me/branched", seed=2, revision="v2")
    assert user(client.load, "me/branched", cache_dir=tmp_path) == main
    assert user(client.load, "me/branched", cache_dir=tmp_path, revision="v2") == other
    kinds, text = user(client.outcome, client.load, "me/branched", cache_dir=tmp_path, revision="v3")
    assert "OSError" in kinds and "v3 is not a valid git identifier" in text


def test_a_renamed_repository(hub, user, tmp_path):
    pushed, _ = user(client.push, "me/new-name", seed=1)
    hub.moved["me/old-name"] = "me/new-name"
    assert user(client.load, "me/old-name", cache_dir=tmp_path) == pushed


def test_a_private_repository(hub, user, tmp_path):
    pushed, _ = user(client.push, "me/secret", seed=1, private=True)
    assert hub.repos["me/secret"].private
    assert user(client.load, "me/secret", cache_dir=tmp_path / "a", token=client.TOKEN) == pushed
    kinds, text = user(client.outcome, client.load, "me/secret", cache_dir=tmp_path / "b")
    assert "OSError" in kinds and "me/secret" in text and "private" in text and "token" in text
    kinds, text = user(client.outcome, client.push, "me/secret", seed=2, token=False)
    assert "HfHubHTTPError" in kinds and "401" in text


def test_an_interrupted_download_is_continued(hub, user, tmp_path):
    """The line goes dead in mid-file: the client asks for the rest only."""
    pushed, _ = user(client.push, "me/cut", seed=1)
    size = len(hub.files("me/cut")["model.safetensors"])
    hub.requests.clear()
    hub.cut["model.safetensors"] = size // 2
    assert user(client.load, "me/cut", cache_dir=tmp_path) == pushed
    assert hub.downloads("model.safetensors") == [None, f"bytes={size // 2 // client.CHUNK * client.CHUNK}-"]


def test_an_interrupted_download_that_cannot_be_continued_is_never_loaded(hub, user, tmp_path):
    pushed, _ = user(client.push, "me/down", seed=1)
    hub.cut["model.safetensors"] = 1000
    hub.fail["model.safetensors"] = 500
    kinds, _ = user(client.outcome, client.load, "me/down", cache_dir=tmp_path)
    assert kinds != "ok"
    assert user(client.incomplete_files, tmp_path) == []
    kinds, text = user(client.outcome, client.load_offline, "me/down", cache_dir=tmp_path)
    assert "CheckpointError" in kinds and "The local cache of me/down holds no weights" in text
    hub.fail.clear()
    assert user(client.load, "me/down", cache_dir=tmp_path) == pushed


def test_a_short_answer_is_an_error(hub, user, tmp_path):
    """A proxy that shortens a file and calls it whole."""
    pushed, _ = user(client.push, "me/short", seed=1)
    hub.shorten["model.safetensors"] = 3000
    kinds, text = user(client.outcome, client.load, "me/short", cache_dir=tmp_path)
    hub.shorten.clear()
    assert "OSError" in kinds and "model.safetensors" in text
    assert user(client.load, "me/short", cache_dir=tmp_path) == pushed


def test_a_damaged_file_in_a_repository_is_named(hub, user, tmp_path):
    user(client.push, "me/damaged", seed=1)
    files = dict(hub.files("me/damaged"))
    files["model.safetensors"] = files["model.safetensors"][:-100]
    hub.repos["me/damaged"].commit(files, "main")
    kinds, text = user(client.outcome, client.load, "me/damaged", cache_dir=tmp_path)
    assert "CheckpointError" in kinds and "model.safetensors" in text and "truncated" in text


def test_shards(hub, user, tmp_path):
    """Pushed in shards over one file, then in one file over the shards: what is loaded is the latest."""
    old, _ = user(client.push, "me/sharded", seed=1)
    new, _ = user(client.push, "me/sharded", seed=2, max_shard_size="20KB")
    files = hub.files("me/sharded")
    assert "model.safetensors" not in files and "model.safetensors.index.json" in files
    assert sum(name.endswith(".safetensors") for name in files) > 2
    assert user(client.load, "me/sharded", cache_dir=tmp_path) == new != old
    shard = sorted(name for name in files if "-of-" in name)[1]
    hub.cut[shard] = 2 * client.CHUNK
    assert user(client.load, "me/sharded", cache_dir=tmp_path / "again") == new
    assert hub.downloads(shard)[-2:] == [None, f"bytes={2 * client.CHUNK}-"]
    back, _ = user(client.push, "me/sharded", seed=1)
    assert user(client.load, "me/sharded", cache_dir=tmp_path) == back == old
    assert not [name for name in hub.files("me/sharded") if "-of-" in name or "index" in name]


def test_a_missing_shard_is_named(hub, user, tmp_path):
    user(client.push, "me/holes", seed=2, max_shard_size="20KB")
    files = dict(hub.files("me/holes"))
    gone = sorted(name for name in files if "-of-" in name)[1]
    del files[gone]
    hub.repos["me/holes"].commit(files, "main")
    kinds, text = user(client.outcome, client.load, "me/holes", cache_dir=tmp_path)
    assert "OSError" in kinds and gone in text


def test_pickled_weights_are_refused_unless_allowed(hub, user, tmp_path):
    pushed, _ = user(client.push, "me/pickled", seed=1)
    files = dict(hub.files("me/pickled"))
    buffer = io.BytesIO()
    torch.save(client.drafter_of(1).state_dict(), buffer)
    del files["model.safetensors"]
    hub.repos["me/pickled"].commit({**files, "pytorch_model.bin": buffer.getvalue()}, "main")
    hub.requests.clear()
    kinds, text = user(client.outcome, client.load, "me/pickled", cache_dir=tmp_path)
    assert "CheckpointError" in kinds and "pytorch_model.bin" in text and "use_safetensors=False" in text
    assert not hub.downloads("pytorch_model.bin")
    assert user(client.load, "me/pickled", cache_dir=tmp_path, use_safetensors=False) == pushed


def test_a_repository_without_weights(hub, user, tmp_path):
    user(client.push, "me/empty", seed=1)
    files = {name: text for name, text in hub.files("me/empty").items() if not name.endswith(".safetensors")}
    hub.repos["me/empty"].commit(files, "main")
    kinds, text = user(client.outcome, client.load, "me/empty", cache_dir=tmp_path)
    assert "CheckpointError" in kinds and "no weights" in text


def test_a_card_in_the_repository_that_a_person_wrote_stays(hub, user):
    hub.create("me/mine", {"README.md": MINE})
    _, warnings = user(client.push, "me/mine", seed=1)
    assert hub.files("me/mine")["README.md"] == MINE
    assert "model.safetensors" in hub.files("me/mine")
    assert any("overwrite_card=True" in warning and "me/mine" in warning for warning in warnings)
    user(client.push, "me/mine", seed=1, own_card=True)
    assert hub.files("me/mine")["README.md"] == MINE
    user(client.push, "me/mine", seed=1, own_card=True, overwrite_card=True)
    text = hub.files("me/mine")["README.md"].decode()
    assert "license: mit" in text and "thinking mode | off" in text and is_untouched(text)


def test_a_card_that_is_edited_during_the_push_stays(hub, user):
    """Between the look at the card and the commit: the Hub refuses, and the next push keeps the words."""
    user(client.push, "me/hasty", seed=1)
    repo = hub.repos["me/hasty"]
    hub.before_commit = lambda: repo.commit({**hub.files("me/hasty"), "README.md": MINE}, "main")
    kinds, text = user(client.outcome, client.push, "me/hasty", seed=2)
    hub.before_commit = None
    assert "HfHubHTTPError" in kinds and "412" in text
    pushed, _ = user(client.push, "me/hasty", seed=2)
    assert hub.files("me/hasty")["README.md"] == MINE
    assert user(client.load, "me/hasty") == pushed


def test_our_own_card_is_refreshed_until_somebody_edits_it(hub, user):
    user(client.push, "me/fresh", seed=1)
    user(client.push, "me/fresh", seed=1, own_card=True)
    ours = hub.files("me/fresh")["README.md"]
    assert b"license: mit" in ours
    edited = ours.replace(b"# me/fresh", b"# My drafter")
    hub.repos["me/fresh"].commit({**hub.files("me/fresh"), "README.md": edited}, "main")
    user(client.push, "me/fresh", seed=2)
    assert hub.files("me/fresh")["README.md"] == edited


def test_a_local_card_that_a_person_wrote_is_uploaded(hub, user, tmp_path):
    folder = tmp_path / "nice"
    folder.mkdir()
    (folder / "README.md").write_bytes(MINE)
    pushed = user(client.save_and_push, folder, "me/nice", seed=1)
    files = hub.files("me/nice")
    assert files["README.md"] == MINE and (folder / "README.md").read_bytes() == MINE
    assert "generation_config.json" in files
    assert user(client.load, "me/nice", cache_dir=tmp_path) == pushed
    other = MINE + b"Edited on the web page.\n"
    hub.repos["me/nice"].commit({**files, "README.md": other}, "main")
    user(client.save_and_push, folder, "me/nice", seed=1)
    assert hub.files("me/nice")["README.md"] == other
    user(client.save_and_push, folder, "me/nice", seed=1, overwrite_card=True)
    assert hub.files("me/nice")["README.md"] == MINE


def test_trainer_push(hub, user, tmp_path):
    options = {"dataset": "a/b", "license": "mit", "command": "dflash-hf train --data a/b"}
    trained = user(client.trainer_push, tmp_path / "out", "me/trained", push_options=options)
    files = hub.files("me/trained")
    assert user(client.load, "me/trained", cache_dir=tmp_path) == trained
    assert not [name for name in files if name.endswith(".bin") or "features" in name]
    text = files["README.md"].decode()
    assert "license: mit" in text and "dflash-hf train --data a/b" in text and "- a/b" in text
    assert 'from_pretrained("me/trained"' in text and str(tmp_path) not in text


def test_trainer_keeps_a_card_that_was_edited_in_the_repository(hub, user, tmp_path):
    hub.create("me/kept", {"README.md": MINE})
    user(client.trainer_push, tmp_path / "out", "me/kept")
    assert hub.files("me/kept")["README.md"] == MINE and "model.safetensors" in hub.files("me/kept")
    user(client.trainer_push, tmp_path / "out", "me/kept", push_options={"overwrite_card": True})
    assert is_untouched(hub.files("me/kept")["README.md"].decode())


def test_trainer_keeps_it_while_checkpoints_are_pushed(hub, user, tmp_path):
    """`hub_strategy="every_save"` uploads the whole output folder, in which an earlier run left its card."""
    folder = tmp_path / "out"
    user(client.trainer_push, folder, "me/every")
    assert is_untouched((folder / "README.md").read_text())
    hub.repos["me/every"].commit({**hub.files("me/every"), "README.md": MINE}, "main")
    count = len(hub.repos["me/every"].commits)
    user(
        client.trainer_push,
        folder,
        "me/every",
        push_to_hub=True,
        hub_strategy="every_save",
        hub_always_push=True,
        save_strategy="steps",
        save_steps=1,
    )
    commits = list(hub.repos["me/every"].commits.values())[count:]
    assert len(commits) >= 2
    assert {files["README.md"] for files in commits} == {MINE}
