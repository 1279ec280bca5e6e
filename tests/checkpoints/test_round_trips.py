"""Load, save, load: the same files, the same drafter; and the ways of loading that transformers offers."""

import json
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints import FAMILIES, name_from_disk, name_on_disk, read_config, write_config
from dflash_hf.errors import CheckpointError

PREFIXES = ("deepspec", "dflash2", "domino", "dspark", "muse", "speculators")
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.name.startswith(PREFIXES))
# One case a family.
EACH = ["zlab_swa_mixed", "dflash2_muse_like", "domino_shifted", "dspark_rnn", "deepspec_dspark_markov"]
EACH += ["deepspec_gemma4_block7", "muse_assistant_mixed", "speculators_dflash_selfcontained", "speculators_dflash2"]


def config_on_disk(folder) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())


def facts(config) -> dict:
    ignored = {"transformers_version", "source_config", "architectures", "dtype", "_name_or_path"}
    return {key: value for key, value in config.to_dict().items() if key not in ignored}


def assert_same_tensors(folder, other) -> None:
    before, after = (load_file(Path(path) / "model.safetensors") for path in (folder, other))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_drafter_is_saved_as_it_came(tmp_path, name):
    """Keys and values of config.json, names, dtypes and bits of the tensors; nothing else in the folder."""
    DFlashDraftModel.from_pretrained(GOLDEN / name).save_pretrained(tmp_path)
    assert config_on_disk(tmp_path) == config_on_disk(GOLDEN / name)
    assert_same_tensors(GOLDEN / name, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", CASES)
def test_the_layout_written_anew_means_the_same(tmp_path, name):
    """A drafter whose source is forgotten is written from its fields, in its own family, and reads back equal."""
    model = DFlashDraftModel.from_pretrained(GOLDEN / name)
    model.config.source_config = None
    model.save_pretrained(tmp_path)
    again = DFlashDraftModel.from_pretrained(tmp_path)
    assert facts(again.config) == facts(model.config)
    assert_same_tensors(GOLDEN / name, tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)


@pytest.mark.parametrize("name", EACH)
def test_a_changed_field_is_written_and_read(tmp_path, name):
    """The old file's value must not come back."""
    model = DFlashDraftModel.from_pretrained(GOLDEN / name)
    model.config.block_size, model.config.target_name_or_path = 3, "org/target"
    model.save_pretrained(tmp_path)
    again = DFlashConfig.from_pretrained(tmp_path)
    assert (again.block_size, again.target_name_or_path) == (3, "org/target")
    assert again.family == model.config.family
    assert DFlashDraftModel.from_pretrained(tmp_path).config.own_embedding == model.config.own_embedding


@pytest.mark.parametrize("name", EACH)
def test_a_drafter_from_its_config_saves_in_its_family(tmp_path, name):
    """Without from_pretrained, so that transformers remembers no renaming."""
    config = DFlashDraftModel.from_pretrained(GOLDEN / name).config
    torch.manual_seed(0)
    model = DFlashDraftModel(config)
    if model.d2t is not None:
        model.t2d[: len(model.d2t)] = True
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(GOLDEN / name / "model.safetensors").keys()
    again = DFlashDraftModel.from_pretrained(tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)


@pytest.mark.parametrize("name", EACH)
def test_a_saved_file_can_be_read_into_the_model(tmp_path, name):
    """As a Trainer's resume does: `load_state_dict(strict=False)` on the file, which drops other names silently."""
    model = DFlashDraftModel.from_pretrained(GOLDEN / name)
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    other = DFlashDraftModel(model.config)
    trainer = Trainer(other, TrainingArguments(tmp_path / "out", use_cpu=True))
    trainer._load_from_checkpoint(str(tmp_path))
    for key, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", CASES)
def test_tensor_names_map_both_ways(name):
    """Onto the parameters and buffers of the model, and back."""
    model = DFlashDraftModel.from_pretrained(GOLDEN / name)
    family = model.config.family
    published = set(load_file(GOLDEN / name / "model.safetensors"))
    ours = {name_from_disk(tensor, family) for tensor in published}
    assert ours == set(model.state_dict())
    assert {name_on_disk(tensor, family) for tensor in ours} == published


@pytest.mark.parametrize("name", ["domino_like", "dspark_rnn"])
def test_heads_in_a_container_of_their_own(tmp_path, name):
    """Early Domino and DSpark checkpoints wrote `logit_head.` in front of them."""
    weights = load_file(GOLDEN / name / "model.safetensors")
    heads = ("prefix_gru", "embed_proj", "markov_head", "confidence_head")
    renamed = {f"logit_head.{key}" if key.startswith(heads) else key: tensor for key, tensor in weights.items()}
    assert renamed.keys() != weights.keys()
    (tmp_path / "config.json").write_bytes((GOLDEN / name / "config.json").read_bytes())
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, expected = (DFlashDraftModel.from_pretrained(folder) for folder in (tmp_path, GOLDEN / name))
    for key, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor)


def test_an_older_speculators_checkpoint(tmp_path):
    """Full vocabulary with embedding and head stored, next to the target's copies that only training read."""
    weights = load_file(GOLDEN / "speculators_dflash_full" / "model.safetensors")
    torch.manual_seed(0)
    tables = {name: torch.randn(104, 24) for name in ("embed_tokens.weight", "lm_head.weight")}
    copies = {"verifier_lm_head.weight": torch.randn(104, 24), "verifier_norm.weight": torch.randn(24)}
    (tmp_path / "config.json").write_bytes((GOLDEN / "speculators_dflash_full" / "config.json").read_bytes())
    save_file(weights | tables | copies, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = DFlashDraftModel.from_pretrained(tmp_path)
    assert model.config.own_embedding and model.config.own_head
    assert torch.equal(model.embed_tokens.weight, tables["embed_tokens.weight"])
    model.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == (weights | tables).keys()
    save_file(weights | {"lm_head.weight": tables["lm_head.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight' is missing"):
        DFlashDraftModel.from_pretrained(tmp_path)


# Conversions that the layouts allow, and those they do not


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_another_layout_says_the_same_or_refuses(name, family):
    """Written in any family's layout and read again, a drafter computes what it did; else the reason is given."""
    config = DFlashDraftModel.from_pretrained(GOLDEN / name).config
    fields = config.to_dict() | {"source_config": None}
    try:
        on_disk = write_config(fields, family)
    except CheckpointError as error:
        assert len(str(error)) > 40
        assert family != config.family
        return
    tables = {"embed_tokens.weight": config.own_embedding, "lm_head.weight": config.own_head}
    tables["layers.0.layer_scalar"] = config.layer_scalars
    again = DFlashConfig(**read_config(on_disk, [tensor for tensor, owned in tables.items() if owned]))
    assert again.family == family
    expected, found = facts(config), facts(again)
    bookkeeping = {"family", "num_target_layers", "vocab_size", "target_name_or_path"}
    if config.own_embedding and config.decoder_type == "qwen3":  # its own rows are not scaled
        bookkeeping.add("input_embedding_scale")
    if "sliding_attention" not in config.layer_types:  # unset and False mean the same on full layers
        expected["is_causal"], found["is_causal"] = bool(expected["is_causal"]), bool(found["is_causal"])
    assert {k: v for k, v in found.items() if k not in bookkeeping} == {
        k: v for k, v in expected.items() if k not in bookkeeping
    }


@pytest.mark.parametrize(
    ("name", "family", "word"),
    [
        ("speculators_dflash_swa_causal", "zlab", "window_rule"),
        ("speculators_dflash_trimmed", "zlab", "own_head"),
        ("speculators_sample_from_anchor", "zlab", "sample_from_anchor"),
        ("dflash2_qwen_like", "zlab", "conv_kernel_size"),
        ("dflash2_muse_like", "speculators", "output_multiplier"),
        ("deepspec_block7", "zlab", "sample_from_anchor"),
        ("domino_like", "speculators", "gru_hidden_dim"),
        ("muse_assistant", "speculators", "vocab_size"),
        ("muse_assistant", "zlab", "vocab_size"),
        ("zlab_swa_mixed", "muse_assistant", "causal"),
        ("zlab_embed_scale", "speculators", "input_embedding_scale"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(name, family, word):
    """Naming the field."""
    fields = DFlashDraftModel.from_pretrained(GOLDEN / name).config.to_dict()
    with pytest.raises(CheckpointError, match=word):
        write_config(fields, family)


# Ways of loading


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(
    "options", [{"dtype": "auto"}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}]
)
def test_options_of_from_pretrained(name, options):
    """Same tensors; the maps of a trimmed vocabulary keep their dtypes, rotary frequencies stay in fp32."""
    model, expected = (
        DFlashDraftModel.from_pretrained(GOLDEN / name, **options),
        load_file(GOLDEN / name / "model.safetensors"),
    )
    dtype = torch.bfloat16 if options.get("dtype") is torch.bfloat16 else torch.float32
    for key, tensor in expected.items():
        found = model.state_dict()[name_from_disk(key, model.config.family)]
        assert torch.equal(found, tensor.to(dtype) if tensor.is_floating_point() else tensor)
    assert model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("name", EACH)
def test_shards(tmp_path, name):
    """Several files load as one of one file, and names of tables are found in all of them."""
    model = DFlashDraftModel.from_pretrained(GOLDEN / name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    again = DFlashDraftModel.from_pretrained(tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)


def test_numbers_given_as_integers(tmp_path):
    """As JSON writers do with 1.0 and 20.0."""
    for name, edit in (
        ("zlab_qwen3_full", {"rms_norm_eps": 1, "rope_theta": 10000, "initializer_range": 1, "attention_dropout": 0}),
        ("dflash2_muse_like", {"rms_norm_eps": 1}),
    ):
        on_disk = config_on_disk(GOLDEN / name) | edit
        on_disk["dflash_config"] |= {"output_multiplier": 1, "final_logit_softcapping": 20, "input_embedding_scale": 2}
        (tmp_path / "config.json").write_text(json.dumps(on_disk))
        config = DFlashConfig.from_pretrained(tmp_path)
        assert (config.rms_norm_eps, config.final_logit_softcapping, config.input_embedding_scale) == (1, 20, 2)


def test_an_explicit_config_is_taken_as_it_is(tmp_path):
    """`config=` as an object."""
    config = DFlashDraftModel.from_pretrained(GOLDEN / "muse_assistant").config
    config.target_name_or_path = "org/target"
    model = DFlashDraftModel.from_pretrained(GOLDEN / "muse_assistant", config=config)
    assert model.config.target_name_or_path == "org/target"
    assert torch.equal(model.fc.weight, DFlashDraftModel.from_pretrained(GOLDEN / "muse_assistant").fc.weight)


def test_a_quantisation_is_transformers_business(tmp_path):
    """The key reaches transformers, which quantises or says what it lacks, and is saved again."""
    on_disk = config_on_disk(GOLDEN / "zlab_qwen3_full")
    on_disk["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(on_disk))
    config = DFlashConfig.from_pretrained(tmp_path)
    assert config.quantization_config == on_disk["quantization_config"]
    config.save_pretrained(tmp_path / "same")
    assert config_on_disk(tmp_path / "same") == on_disk
    config.block_size = 4
    config.save_pretrained(tmp_path / "changed")
    assert config_on_disk(tmp_path / "changed")["quantization_config"] == on_disk["quantization_config"]
