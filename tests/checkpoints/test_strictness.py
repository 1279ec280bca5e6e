"""Nothing half-understood loads: every tensor and every key of every layout is dropped, renamed and reshaped."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints import FAMILIES, name_from_disk, read_config
from dflash_hf.errors import CheckpointError, DFlashConfigError, DFlashError

# One case a layout and variant that brings tensors or keys of its own.
LAYOUTS = [
    "zlab_one_layer",
    "zlab_swa_mixed",
    "dflash2_muse_like",
    "domino_like",
    "dspark_specforge_like",
    "dspark_gated",
    "dspark_rnn",
    "deepspec_block7",
    "deepspec_dspark_markov",
    "deepspec_gemma4_block7",
    "deepspec_gemma4_markov",
    "muse_assistant_mixed",
    "speculators_dflash_swa_noncausal",
    "speculators_dflash_selfcontained",
    "speculators_dflash_trimmed",
    "speculators_dflash2",
]
# Layouts whose tensors are those of another one in the list.
SAME_TENSORS = {"zlab_swa_mixed", "dspark_specforge_like", "deepspec_block7", "speculators_dflash_trimmed"}
SAME_TENSORS |= {"speculators_dflash_swa_noncausal", "speculators_dflash2"}
# 0.9.0 stores no embedding, so without this tensor the checkpoint is a complete one of that release.
OPTIONAL_TENSORS = {"speculators_dflash_selfcontained": {"embed_tokens.weight"}}
BACKBONE = {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
    "head_dim",
}
# Keys that change what is computed and whose absence has a meaning in the format itself.
ABSENCE_MEANS = {
    "zlab": {"is_causal", "dflash_config.output_multiplier", "dflash_config.final_logit_softcapping", "layer_types"}
    | {"block_size", "dflash_config.block_size", "dflash_config.target_layer_ids", "use_sliding_window"},
    "dspark": {"dflash_config.markov_head_type", "block_size", "dflash_config.target_layer_ids"},
    "deepspec": {"markov_head_type"},
    "deepspec_gemma4": {"markov_head_type", "final_logit_softcapping"},
    "muse_assistant": set(),
    "speculators": {"transformer_layer_config.layer_types", "transformer_layer_config.use_sliding_window"},
}
ABSENCE_MEANS["dflash2"] = ABSENCE_MEANS["domino"] = ABSENCE_MEANS["zlab"]


@pytest.fixture(autouse=True)
def _quiet():
    """transformers prints a table for each of the many loads that fail here on purpose."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def config_of(case: str) -> dict:
    return json.loads((GOLDEN / case / "config.json").read_text())


def write(folder: Path, on_disk: dict, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(on_disk))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def failure_of(folder: Path) -> str:
    """The message of a load that fails on purpose; "" if it succeeds."""
    try:
        DFlashDraftModel.from_pretrained(folder)
    except DFlashError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", [case for case in LAYOUTS if case not in SAME_TENSORS])
def test_every_tensor_counts(tmp_path, case):
    """Dropped, renamed, or with a row more: each is an error that names the tensor."""
    on_disk, weights = config_of(case), load_file(GOLDEN / case / "model.safetensors")
    family = read_config(on_disk, weights)["family"]
    slipped = []
    for name, tensor in weights.items():
        rest = {other: value for other, value in weights.items() if other != name}
        for what, mutated in (
            ("dropped", rest),
            ("renamed", {**rest, f"{name}_": tensor}),
            ("longer", {**rest, name: torch.cat([tensor, tensor[:1]])}),
        ):
            if what == "dropped" and name in OPTIONAL_TENSORS.get(case, ()):
                continue
            message = failure_of(write(tmp_path / "mutated", on_disk, mutated))
            if not any(repr(spelling) in message for spelling in (name, f"{name}_", name_from_disk(name, family))):
                slipped.append((name, what, message))
    assert slipped == []


def test_an_embedding_that_0_9_0_does_not_store_is_optional(tmp_path):
    """Without it the file is a complete one of that release; the drafter then borrows the target's."""
    on_disk = config_of("speculators_dflash_selfcontained")
    weights = load_file(GOLDEN / "speculators_dflash_selfcontained" / "model.safetensors")
    del weights["embed_tokens.weight"]
    model = DFlashDraftModel.from_pretrained(write(tmp_path / "newer", on_disk, weights))
    assert (model.config.own_embedding, model.config.own_head) == (False, True)


def keys_of(on_disk: dict) -> list[tuple[str, ...]]:
    nested = [("dflash_config", key) for key in on_disk.get("dflash_config", {})]
    nested += [("transformer_layer_config", key) for key in on_disk.get("transformer_layer_config", {})]
    return [(key,) for key in on_disk] + nested


def without(on_disk: dict, path: tuple[str, ...], new_name: str | None = None) -> dict:
    changed = json.loads(json.dumps(on_disk))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    value = inner.pop(path[-1])
    if new_name is not None:
        inner[new_name] = value
    return changed


def required_keys(case: str, on_disk: dict) -> set[tuple[str, ...]]:
    """What the layout cannot do without, each to be named by the error."""
    where = ("transformer_layer_config",) if case.startswith("speculators") else ()
    backbone = {(*where, key) for key in BACKBONE}
    nested = {
        "zlab": {"mask_token_id"},
        "dflash2": {"mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"},
        "domino": {"mask_token_id", "gru_hidden_dim", "emb_dim", "pure_draft_prefix_len", "shift_label"},
        "dspark": {"mask_token_id", "markov_rank"},
    }
    top = {
        "deepspec_gemma4": {"block_size", "mask_token_id", "target_layer_ids", "markov_rank", "layer_types"}
        | {"hidden_activation", "attention_k_eq_v", "rope_parameters"},
        "deepspec": {"block_size", "mask_token_id", "target_layer_ids", "markov_rank"},
        "muse": {"block_size", "mask_token_id", "target_layer_ids", "layer_types"},
        "speculators": {"block_size", "mask_token_id", "aux_hidden_state_layer_ids", "draft_vocab_size"},
    }
    for prefix, keys in nested.items():
        if case.startswith(prefix):
            return {key for key in backbone if key != ("head_dim",)} | {("dflash_config", key) for key in keys}
    keys = {(key,) for key in next(keys for prefix, keys in top.items() if case.startswith(prefix))}
    if case.startswith("muse"):
        backbone.discard(("vocab_size",))
    if case == "deepspec_gemma4_block7":  # its layers have the global head size, and not this one
        backbone = {("global_head_dim",) if key == ("head_dim",) else key for key in backbone}
    if case == "speculators_dflash2":
        keys |= {("conv_kernel_size",), ("conv_group_size",), ("selector_rank",), ("selector_top_k",)}
    if case.startswith("speculators_dflash_swa"):
        keys |= {("sliding_window_non_causal",)}
    return backbone | keys


@torch.no_grad()
def draft_of(model: DFlashDraftModel) -> list:
    """What a drafter computes, in numbers and in the facts that are used outside the forward pass."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    noise = torch.randn(1, config.block_size, config.hidden_size, generator=generator)
    width = len(config.target_layer_ids) * config.target_hidden_size
    features = torch.randn(1, 20, width, generator=generator)
    outside = ("mask_token_id", "target_layer_ids", "sample_from_anchor", "own_embedding", "own_head", "selector_top_k")
    outside += ("output_multiplier", "final_logit_softcapping", "input_embedding_scale", "pure_draft_prefix_len")
    return [model.eval()(noise, features).last_hidden_state, [getattr(config, name) for name in outside]]


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_key_counts(tmp_path, case):
    """Dropped or renamed, a required key is an error that names it; any other one is an error, or nothing changes."""
    on_disk, weights = config_of(case), load_file(GOLDEN / case / "model.safetensors")
    original = DFlashDraftModel.from_pretrained(GOLDEN / case)
    hidden, facts = draft_of(original)
    required = required_keys(case, on_disk)
    assert required <= set(keys_of(on_disk))
    meant = ABSENCE_MEANS[original.config.family]
    slipped = []
    for path in keys_of(on_disk):
        for new_name in (None, f"{path[-1]}_x"):
            folder = write(tmp_path / "mutated", without(on_disk, path, new_name), weights)
            try:
                model = DFlashDraftModel.from_pretrained(folder)
            except DFlashError as error:
                if path in required and path[-1] not in str(error):
                    slipped.append((path, new_name, str(error)))
                continue
            if path in required:
                slipped.append((path, new_name, "loads"))
            elif ".".join(path) not in meant:
                other, other_facts = draft_of(model)
                if other.shape != hidden.shape or not torch.equal(other, hidden) or other_facts != facts:
                    slipped.append((path, new_name, "drafts otherwise"))
    assert slipped == []


# Families by name


def test_each_layout_is_told_by_its_config():
    """Every recorded case, whatever class name it shares."""
    expected = {"zlab": "zlab", "train": None, "generation": None, "muse": "muse_assistant"}
    seen = set()
    for folder in sorted(GOLDEN.iterdir()):
        prefix = folder.name.split("_")[0]
        family = "deepspec_gemma4" if "gemma4" in folder.name else expected.get(prefix, prefix)
        if family is not None:
            assert DFlashConfig.from_pretrained(folder).family == family
            seen.add(family)
    assert seen == set(FAMILIES)


REFUSED = [
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"attention_sink_bias": True}}, "MiMo"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"attention_value_scale": 0.7}}, "MiMo"),
    ({"architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna"}, "Laguna"),
    ({"architectures": ["DFlashDraftModel"], "gating": True}, "Laguna"),
    ({"architectures": ["DFlashDraftModel"], "has_embed_tokens": True}, "Nemotron"),
    ({"architectures": ["DFlashDraftModel"], "quantization_config": {"quant_algo": "W4A16_NVFP4"}}, "Nemotron"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "other"}}, "'other'"),
    ({"architectures": ["DFlashDraftModel"], "attention_type": "linear"}, "`attention_type` = 'linear'"),
    ({"speculators_model_type": "eagle3", "architectures": ["Eagle3"]}, "'eagle3'"),
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM"),
    ({}, "None"),
]


@pytest.mark.parametrize(("on_disk", "word"), REFUSED)
def test_what_cannot_run_is_refused_by_name(on_disk, word):
    """With a whole z-lab config around the marker, so that nothing else could be the reason."""
    if "DFlashDraftModel" in on_disk.get("architectures", []):
        base = config_of("zlab_qwen3_full")
        on_disk = base | on_disk | {"dflash_config": base["dflash_config"] | on_disk.get("dflash_config", {})}
    with pytest.raises(CheckpointError, match=re.escape(word)):
        read_config(on_disk)


@pytest.mark.parametrize("case", ["domino_like", "dspark_specforge_like", "dflash2_qwen_like", "deepspec_block7"])
def test_another_family_under_z_lab_s_config_does_not_load(tmp_path, case):
    """The class name shared, the marker gone: the tensors tell."""
    on_disk, weights = config_of(case), load_file(GOLDEN / case / "model.safetensors")
    base = {key: value for key, value in on_disk.items() if key not in ("dflash_config", "markov_rank")}
    inner = on_disk.get("dflash_config", on_disk)
    base["dflash_config"] = {key: inner[key] for key in ("mask_token_id", "target_layer_ids")}
    base["architectures"] = ["DFlashDraftModel"]
    with pytest.raises(CheckpointError, match="is unknown"):
        DFlashDraftModel.from_pretrained(write(tmp_path / "plain", base, weights))


def test_an_unknown_key_of_speculators_is_named(tmp_path):
    """A later release may change the mathematics."""
    on_disk = config_of("speculators_dflash_full") | {"attention_sinks": 4}
    with pytest.raises(CheckpointError, match="`attention_sinks` = 4"):
        read_config(on_disk)


@pytest.mark.parametrize(
    ("case", "edit", "words"),
    [
        ("dflash2_qwen_like", lambda c: c["dflash_config"].update(conv_group_size=7), "conv_group_size 7"),
        ("dflash2_qwen_like", lambda c: c["dflash_config"].update(selector_top_k=105), "selector_top_k is 105"),
        ("dflash2_qwen_like", lambda c: c["dflash_config"].update(selector_rank=-1), "selector_rank is -1"),
        ("dspark_gated", lambda c: c["dflash_config"].update(markov_head_type="lstm"), "markov_head_type 'lstm'"),
        ("dspark_gated", lambda c: c["dflash_config"].update(markov_rank=0), "confidence_head_with_markov"),
        ("speculators_dflash_trimmed", lambda c: c.update(draft_vocab_size=200), "draft_vocab_size is 200"),
        ("zlab_qwen3_full", lambda c: c.update(rope_scaling={"rope_type": "spiral"}), "rope_type 'spiral'"),
    ],
)
def test_values_that_cannot_work_are_refused(case, edit, words):
    """By the config's own checks, naming value and limit."""
    on_disk = config_of(case)
    edit(on_disk)
    with pytest.raises(DFlashConfigError, match=words):
        DFlashConfig(**read_config(on_disk))


def test_maps_of_a_trimmed_vocabulary_that_disagree(tmp_path):
    """Draft ids would become other words."""
    on_disk, weights = (
        config_of("speculators_dflash_trimmed"),
        load_file(GOLDEN / "speculators_dflash_trimmed" / "model.safetensors"),
    )
    weights["d2t"] = weights["d2t"].clone()
    weights["d2t"][5] += 1
    with pytest.raises(CheckpointError, match="'d2t' and 't2d'"):
        DFlashDraftModel.from_pretrained(write(tmp_path / "maps", on_disk, weights))


# Files


def test_a_truncated_shard_is_named(tmp_path):
    """Whole folder or one of several shards."""
    DFlashDraftModel.from_pretrained(GOLDEN / "zlab_qwen3_full").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{shard.name}.*corrupt"):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_pickled_weights_need_to_be_asked_for(tmp_path):
    """A repository with only .bin weights is refused, unless the caller allows it."""
    case = GOLDEN / "zlab_one_layer"
    (tmp_path / "config.json").write_bytes((case / "config.json").read_bytes())
    torch.save(load_file(case / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="use_safetensors=False"):
        DFlashDraftModel.from_pretrained(tmp_path)
    model = DFlashDraftModel.from_pretrained(tmp_path, use_safetensors=False)
    assert torch.equal(model.fc.weight, DFlashDraftModel.from_pretrained(case).fc.weight)
