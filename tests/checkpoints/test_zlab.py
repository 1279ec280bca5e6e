"""Drafters on disk: what is written, what is read, and what is refused by name."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import GOLDEN, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints import read_config, write_config
from dflash_hf.checkpoints.zlab import _FOREIGN_KEYS, _NESTED_KEYS
from dflash_hf.errors import CheckpointError, DFlashConfigError
from dflash_hf.target import OutputHead

CASES = sorted(path.name for path in GOLDEN.glob("zlab_*"))
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "rope_theta": 1e6,
}


def config_on_disk(path) -> dict:
    return json.loads((Path(path) / "config.json").read_text())


def edited_copy(tmp_path, *, case="zlab_qwen3_full", config=None, tensors=None) -> Path:
    """A golden folder with its config or its tensors changed."""
    folder = tmp_path / "edited"
    folder.mkdir()
    on_disk, weights = config_on_disk(GOLDEN / case), load_file(GOLDEN / case / "model.safetensors")
    if config is not None:
        config(on_disk)
    if tensors is not None:
        weights = tensors(weights) or weights
    (folder / "config.json").write_text(json.dumps(on_disk))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def facts(config) -> dict:
    ignored = {"transformers_version", "source_config", "architectures", "dtype", "_name_or_path"}
    return {key: value for key, value in config.to_dict().items() if key not in ignored}


def inputs(config, *, context=11):
    generator = torch.Generator().manual_seed(0)
    width = len(config.target_layer_ids) * config.target_hidden_size
    noise = torch.randn(1, config.block_size, config.hidden_size, generator=generator)
    return noise, torch.randn(1, context, width, generator=generator)


# Round trips


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_drafter_is_saved_as_it_came(tmp_path, name):
    """Keys and values of config.json, names, dtypes and bits of the tensors; nothing else in the folder."""
    model = DFlashDraftModel.from_pretrained(GOLDEN / name)
    model.save_pretrained(tmp_path)
    assert config_on_disk(tmp_path) == config_on_disk(GOLDEN / name)
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (GOLDEN / name, tmp_path))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key].view(torch.uint8), tensor.view(torch.uint8))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", CASES)
def test_the_config_alone_is_saved_as_it_came(tmp_path, name):
    """Also without a model."""
    DFlashConfig.from_pretrained(GOLDEN / name).save_pretrained(tmp_path)
    assert config_on_disk(tmp_path) == config_on_disk(GOLDEN / name)


@pytest.mark.parametrize("name", CASES)
def test_the_canonical_layout_means_the_same(tmp_path, name):
    """A drafter whose source is forgotten is written in our canonical z-lab layout and reads back equal."""
    config = DFlashConfig.from_pretrained(GOLDEN / name)
    fields = {**config.to_dict(), "source_config": None}
    (tmp_path / "config.json").write_text(json.dumps(write_config(fields)))
    again = DFlashConfig.from_pretrained(tmp_path)
    expected, found = facts(config), facts(again)
    for rope in (expected["rope_parameters"], found["rope_parameters"]):
        rope.pop("type", None)
    assert found == expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 5),
        ("mask_token_id", 7),
        ("input_embedding_scale", 3.5),
        ("is_causal", True),
        ("output_multiplier", 0.5),
        ("final_logit_softcapping", 30.0),
        ("target_name_or_path", "org/target"),
        ("num_target_layers", 20),
        ("eos_token_id", [2, 5]),
    ],
)
def test_a_changed_field_is_written_and_read(tmp_path, name, field, value):
    """The old file's value must not come back, wherever it stood (top level, nested, or both)."""
    config = DFlashConfig.from_pretrained(GOLDEN / name)
    assert getattr(config, field) != value
    setattr(config, field, value)
    config.save_pretrained(tmp_path)
    again = DFlashConfig.from_pretrained(tmp_path)
    assert getattr(again, field) == value
    assert facts(again) == facts(config)
    on_disk = config_on_disk(tmp_path)
    assert on_disk["block_size"] == on_disk["dflash_config"]["block_size"] == config.block_size
    assert "auto_map" not in on_disk


def test_a_field_that_is_unset_is_written_and_read(tmp_path):
    """Back to None is a change too."""
    for name, field in (("zlab_swa_mixed_noncausal", "is_causal"), ("zlab_embed_scale", "input_embedding_scale")):
        config = DFlashConfig.from_pretrained(GOLDEN / name)
        assert getattr(config, field) is not None
        setattr(config, field, None)
        config.save_pretrained(tmp_path / name)
        assert getattr(DFlashConfig.from_pretrained(tmp_path / name), field) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["zlab_qwen3_full", "zlab_qwen3_full_bf16"])
def test_the_saved_dtype_is_the_weights(tmp_path, name, dtype):
    """Loaded in another dtype than stored: config.json says what the tensors are."""
    model = DFlashDraftModel.from_pretrained(GOLDEN / name, dtype=dtype)
    model.save_pretrained(tmp_path)
    assert config_on_disk(tmp_path)["dtype"] == str(dtype).removeprefix("torch.")
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {dtype}
    assert DFlashDraftModel.from_pretrained(tmp_path).dtype == dtype


def new_drafter(**changes) -> DFlashDraftModel:
    return tiny_drafter(tiny_target(layers=6), **changes)


def test_what_a_new_drafter_writes(tmp_path):
    """The keys that z-lab's, vLLM's and SGLang's loaders read, and no remote code."""
    drafter = new_drafter(input_embedding_scale=1.0)
    drafter.save_pretrained(tmp_path)
    on_disk = config_on_disk(tmp_path)
    assert on_disk["architectures"] == ["DFlashDraftModel"]
    assert on_disk["model_type"] == "qwen3"
    assert on_disk["dflash_config"] == {
        "block_size": 8,
        "mask_token_id": 3,
        "target_layer_ids": [1, 3],
        "input_embedding_scale": 1.0,
    }
    assert on_disk["block_size"] == 8
    assert on_disk["num_target_layers"] == 6
    assert on_disk["head_dim"] == 8
    assert on_disk["rope_theta"] == on_disk["rope_parameters"]["rope_theta"] == 10000.0
    assert on_disk["rope_scaling"] is None
    assert on_disk["layer_types"] == ["full_attention"] * 2
    assert on_disk["tie_word_embeddings"] is False
    assert on_disk["dtype"] == "float32"
    assert not {"auto_map", "source_config", "mask_token_id", "input_embedding_scale"} & set(on_disk)
    assert set(on_disk["dflash_config"]) <= _NESTED_KEYS


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
        {"input_embedding_scale": 5.5},
        {"target_layer_ids": [-1, 5]},
    ],
)
def test_a_new_drafter_reads_back_equal(tmp_path, changes):
    """Config and every bit; then saved again it is the same file."""
    drafter = new_drafter(**changes)
    drafter.save_pretrained(tmp_path / "a")
    again = DFlashDraftModel.from_pretrained(tmp_path / "a")
    assert facts(again.config) == facts(drafter.config)
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)
    again.save_pretrained(tmp_path / "b")
    assert config_on_disk(tmp_path / "a") == config_on_disk(tmp_path / "b")


def test_yarn_round_trip(tmp_path):
    """Both spellings are written (rope_parameters; rope_theta and rope_scaling) and each alone reads back."""
    target = tiny_target(layers=6, rope_parameters=dict(YARN))
    drafter = tiny_drafter(target)
    assert drafter.config.rope_parameters == YARN
    drafter.save_pretrained(tmp_path)
    on_disk = config_on_disk(tmp_path)
    assert on_disk["rope_parameters"] == YARN
    assert on_disk["rope_scaling"] == {key: value for key, value in YARN.items() if key != "rope_theta"}
    assert on_disk["rope_theta"] == 1e6
    noise, features = inputs(drafter.config)
    with torch.no_grad():
        expected = drafter(noise, features).last_hidden_state
    for dropped in ((), ("rope_parameters",), ("rope_theta", "rope_scaling")):
        reduced = {key: value for key, value in on_disk.items() if key not in dropped}
        (tmp_path / "config.json").write_text(json.dumps(reduced))
        again = DFlashDraftModel.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            assert torch.equal(again(noise, features).last_hidden_state, expected)


def test_generation_config_survives_a_round_trip(tmp_path):
    """A smaller block at inference is kept with the drafter; a drafter without one writes no file."""
    drafter = new_drafter()
    drafter.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "generation_config.json").exists()
    drafter.generation_config.block_size = 4
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    drafter.save_pretrained(tmp_path / "own")
    again = DFlashDraftModel.from_pretrained(tmp_path / "own")
    assert again.generation_config.block_size == 4
    assert again.config.block_size == 8


def test_a_drafter_in_a_subfolder(tmp_path):
    """`subfolder=` holds for weights, config and generation_config alike."""
    drafter = new_drafter()
    drafter.generation_config.block_size = 4
    drafter.save_pretrained(tmp_path / "drafter")
    again = DFlashDraftModel.from_pretrained(tmp_path, subfolder="drafter")
    assert torch.equal(again.fc.weight, drafter.fc.weight)
    assert getattr(again.generation_config, "block_size", None) == 4


def test_only_the_main_process_writes(tmp_path):
    """is_main_process=False, as a keyword."""
    drafter = new_drafter()
    drafter.generation_config.block_size = 4
    drafter.save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "generation_config.json").exists()


def test_shards(tmp_path):
    """A drafter of several files loads as one of one file."""
    model = DFlashDraftModel.from_pretrained(GOLDEN / "zlab_qwen3_full")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    again = DFlashDraftModel.from_pretrained(tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)
    shards[0].unlink()
    with pytest.raises(CheckpointError, match=shards[0].name):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("case", "rename"),
    [
        ("zlab_qwen3_full", lambda name: f"model.{name}"),
        ("zlab_one_layer", lambda name: name.replace("layers.0.", "midlayer.")),
    ],
)
def test_historic_tensor_names(tmp_path, case, rename):
    """A `model.` prefix, and `midlayer.` for the only layer."""
    folder = edited_copy(tmp_path, case=case, tensors=lambda old: {rename(k): v for k, v in old.items()})
    model, expected = (DFlashDraftModel.from_pretrained(path) for path in (folder, GOLDEN / case))
    for key, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor)


def test_output_loading_info(tmp_path):
    """transformers' keyword keeps its meaning."""
    model, info = DFlashDraftModel.from_pretrained(GOLDEN / "zlab_one_layer", output_loading_info=True)
    assert isinstance(model, DFlashDraftModel)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.parametrize("case", [*CASES, "new"])
def test_the_z_lab_package_loads_what_we_write(tmp_path, case):
    """The reference implementation, installed, on a folder that save_pretrained wrote: same hidden states."""
    zlab = pytest.importorskip("dflash.model")
    if case == "new":
        ours = new_drafter(layer_types=["sliding_attention", "full_attention"], sliding_window=6)
    else:
        ours = DFlashDraftModel.from_pretrained(GOLDEN / case, dtype=torch.float32).eval()
        ours.config.source_config = None  # so that the canonical layout is written, not the old file
    ours.save_pretrained(tmp_path)
    theirs = zlab.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    config = ours.config
    assert (theirs.block_size, theirs.mask_token_id) == (config.block_size, config.mask_token_id)
    assert list(theirs.target_layer_ids) == config.target_layer_ids
    noise, features = inputs(config)
    positions = torch.arange(11 + config.block_size)[None]
    with torch.no_grad():
        expected = theirs(position_ids=positions, noise_embedding=noise, target_hidden=features)
        found = ours(noise, features, positions).last_hidden_state
    assert torch.allclose(found, expected, atol=1e-5, rtol=0)


# Reading


def test_nested_values_win_over_the_top_level(tmp_path):
    """Retrained repositories kept an old top-level block_size beside the nested one."""
    on_disk = config_on_disk(GOLDEN / "zlab_block_conflict")
    assert (on_disk["block_size"], on_disk["dflash_config"]["block_size"]) == (16, 4)
    assert read_config(on_disk)["block_size"] == 4
    del on_disk["dflash_config"]["block_size"]
    assert read_config(on_disk)["block_size"] == 16
    del on_disk["block_size"]
    assert read_config(on_disk)["block_size"] == 16
    on_disk |= {"mask_token_id": 5, "target_layer_ids": [0]}
    assert (read_config(on_disk)["mask_token_id"], read_config(on_disk)["target_layer_ids"]) == (100, [1, 3, 5])
    del on_disk["dflash_config"]
    assert (read_config(on_disk)["mask_token_id"], read_config(on_disk)["target_layer_ids"]) == (5, [0])


@pytest.mark.parametrize(
    ("top", "nested", "expected"),
    [(None, None, None), (True, None, True), (None, True, True), (False, True, False), (None, False, False)],
)
def test_causality_precedence(top, nested, expected):
    """Top-level is_causal, then dflash_config.causal, then the layer type."""
    on_disk = config_on_disk(GOLDEN / "zlab_swa_mixed")
    if top is not None:
        on_disk["is_causal"] = top
    if nested is not None:
        on_disk["dflash_config"]["causal"] = nested
    assert read_config(on_disk)["is_causal"] is expected


def test_sliding_layers_without_a_list_of_types():
    """Qwen's older rule: layers from max_window_layers on slide."""
    on_disk = config_on_disk(GOLDEN / "zlab_swa_mixed")
    del on_disk["layer_types"]
    on_disk["max_window_layers"] = 1
    assert read_config(on_disk)["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    on_disk["use_sliding_window"] = False
    assert read_config(on_disk)["layer_types"] == ["full_attention"] * 3


def test_reading_does_not_change_the_dictionary():
    """source_config is what was read."""
    on_disk = config_on_disk(GOLDEN / "zlab_kimi_yarn_mscale")
    before = json.dumps(on_disk)
    assert read_config(on_disk)["source_config"] == json.loads(before)
    assert json.dumps(on_disk) == before


@pytest.mark.parametrize("key", ["input_embedding_scale", "output_multiplier", "final_logit_softcapping"])
def test_top_level_scales_are_not_ignored(tmp_path, key):
    """z-lab 0.1.0 (`_draft_value`) reads these three at the top level where dflash_config lacks them."""
    on_disk = config_on_disk(GOLDEN / "zlab_qwen3_full")
    on_disk[key] = 2.5
    try:
        fields = read_config(on_disk)
    except CheckpointError as error:
        assert key in str(error)  # refusing by name would do as well
    else:
        assert fields[key] == 2.5


def test_a_softcap_of_zero_means_none():
    """z-lab 0.1.0 applies the softcap only where it is positive; dividing by it gives NaN."""
    config = DFlashConfig.from_pretrained(GOLDEN / "zlab_qwen3_full")
    config.final_logit_softcapping = 0.0
    head = nn.Linear(24, 104)
    target = SimpleNamespace(get_output_embeddings=lambda: head, config=LlamaConfig())
    hidden = torch.randn(1, 3, 24)
    assert torch.equal(OutputHead(target, config)(hidden), head(hidden))


def test_a_window_that_is_switched_off_is_off(tmp_path):
    """`use_sliding_window: false` beside layer_types that say sliding: transformers' Qwen3Config, and so z-lab, drop
    the window there and keep the layer causal."""
    zlab = pytest.importorskip("dflash.model")
    folder = edited_copy(tmp_path, case="zlab_swa_mixed", config=lambda c: c.update(use_sliding_window=False))
    theirs = zlab.DFlashDraftModel.from_pretrained(folder).eval()
    assert [layer.self_attn.sliding_window for layer in theirs.layers] == [None] * 3
    try:
        ours = DFlashDraftModel.from_pretrained(folder).eval()
    except (CheckpointError, DFlashConfigError) as error:
        assert "sliding" in str(error)  # refusing the contradiction would do as well
        return
    noise, features = inputs(ours.config, context=20)
    with torch.no_grad():
        expected = theirs(position_ids=torch.arange(28)[None], noise_embedding=noise, target_hidden=features)
        assert torch.allclose(ours(noise, features).last_hidden_state, expected, atol=1e-5, rtol=0)


# Strictness


def test_a_missing_tensor_is_named(tmp_path):
    """A randomly initialised layer would accept nothing and say nothing."""
    folder = edited_copy(
        tmp_path, tensors=lambda old: {k: v for k, v in old.items() if k != "layers.1.mlp.up_proj.weight"}
    )
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight.*missing"):
        DFlashDraftModel.from_pretrained(folder)


def test_every_single_missing_tensor_is_named(tmp_path):
    """No tensor may be quietly initialised, norms included."""
    weights = load_file(GOLDEN / "zlab_one_layer" / "model.safetensors")
    shutil.copy(GOLDEN / "zlab_one_layer" / "config.json", tmp_path)
    for name in weights:
        rest = {key: value for key, value in weights.items() if key != name}
        save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"{name}.*is missing"):
            DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.self_attn.sinks",
        "layers.2.mlp.up_proj.weight",
        "embed_tokens.weight",
        "lm_head.weight",
        "prefix_gru.weight_ih_l0",
        "d2t",
        "layers.0.self_attn.q_proj.bias",
    ],
)
def test_an_unknown_tensor_is_named(tmp_path, name):
    """A tensor that is not used would have changed the result."""
    folder = edited_copy(tmp_path, tensors=lambda old: {**old, name: torch.ones(4)})
    with pytest.raises(CheckpointError, match=f"{name}.*is unknown"):
        DFlashDraftModel.from_pretrained(folder)


def test_a_missing_bias_is_named(tmp_path):
    """attention_bias asks for it, on o_proj too."""
    name = "layers.0.self_attn.o_proj.bias"
    folder = edited_copy(
        tmp_path, case="zlab_gptoss_bias_yarn", tensors=lambda old: {k: v for k, v in old.items() if k != name}
    )
    with pytest.raises(CheckpointError, match=f"{name}.*missing"):
        DFlashDraftModel.from_pretrained(folder)


def test_a_wrong_shape_is_named(tmp_path):
    """With the shape found and the shape asked for: one tap less than fc was trained with."""
    folder = edited_copy(tmp_path, config=lambda c: c["dflash_config"].update(target_layer_ids=[1, 3]))
    with pytest.raises(CheckpointError, match=r"fc\.weight.*\(24, 72\).*\(24, 48\)"):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "key",
    ["use_swa", "swa_window_size", "attention_sink_bias", "shift_label", "no_such_key", "markov_rank", "selector_rank"],
)
def test_an_unknown_nested_key_is_named(tmp_path, key):
    """Keys of dflash_config change what the drafter computes."""
    folder = edited_copy(tmp_path, config=lambda c: c["dflash_config"].update({key: 1}))
    with pytest.raises(CheckpointError, match=f"dflash_config.{key} = 1"):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("key", _FOREIGN_KEYS)
def test_a_marker_of_another_family_is_named(tmp_path, key):
    """Families that share the class name with z-lab's v1."""
    folder = edited_copy(tmp_path, config=lambda c: c.update({key: 4}))
    with pytest.raises(CheckpointError, match=f"`{key}` = 4"):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("where", ["nested", "top"])
@pytest.mark.parametrize(("projector", "word"), [("domino", "Domino"), ("dspark", "DSpark"), ("other", "'other'")])
def test_a_projector_type_is_named(tmp_path, projector, word, where):
    """Domino and DSpark would load as plain DFlash but for this key."""

    def edit(config):
        (config["dflash_config"] if where == "nested" else config)["projector_type"] = projector

    with pytest.raises(CheckpointError, match=word):
        DFlashDraftModel.from_pretrained(edited_copy(tmp_path, config=edit))


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma4ForCausalLM", None])
def test_an_unsupported_architecture_is_named(tmp_path, architecture):
    """Including the common mistake of passing the target's own folder."""
    folder = edited_copy(tmp_path, config=lambda c: c.update(architectures=architecture and [architecture]))
    with pytest.raises(CheckpointError, match=str(architecture)):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("key", ["aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"])
def test_tap_ids_under_another_name_are_not_ignored(tmp_path, key):
    """Other exporters write ids that are one higher under these names; without target_layer_ids the default spread
    would be read, and the drafter would be one layer off."""

    def edit(config):
        del config["dflash_config"]["target_layer_ids"]
        config[key] = [2, 4, 6]

    with pytest.raises(CheckpointError, match=key):
        DFlashConfig.from_pretrained(edited_copy(tmp_path, config=edit))


def test_keys_of_a_qwen3_config_are_ignored(tmp_path):
    """What does not concern the drafter is no reason to stop."""
    folder = edited_copy(tmp_path, config=lambda c: c.update(tie_word_embeddings=True, quantization=None, foo="bar"))
    assert DFlashDraftModel.from_pretrained(folder).config.block_size == 8


def test_a_folder_without_weights_is_refused(tmp_path):
    """An error, not a random drafter."""
    shutil.copy(GOLDEN / "zlab_one_layer" / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="no weights"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c["dflash_config"].update(mask_token_id=104), "mask_token_id 104"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id is not set"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 3, 8]), "Tap id 8"),
        (lambda c: c.update(block_size=1), "block_size is 1"),
        (lambda c: c.update(layer_types=["chunked_attention"] * 2), "chunked_attention"),
    ],
)
def test_values_that_cannot_work_are_refused_while_loading(tmp_path, edit, words):
    """The config's own checks."""
    with pytest.raises(DFlashConfigError, match=words):
        DFlashDraftModel.from_pretrained(edited_copy(tmp_path, config=edit))
