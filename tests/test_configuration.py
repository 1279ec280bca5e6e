"""`DFlashConfig`: what it refuses, what it derives from a target, and how it survives copies and files."""

import copy
import json
import os
import pickle

import pytest
import torch
from conftest import GOLDEN, tiny_drafter, tiny_target
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.configuration_dflash import default_target_layer_ids
from dflash_hf.errors import DFlashConfigError, DFlashError

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "mask_token_id": 3,
    "target_layer_ids": [1, 2],
    "num_target_layers": 4,
    "block_size": 8,
}


def small(**changes) -> DFlashConfig:
    return DFlashConfig(**{**SMALL, **changes})


def facts(config) -> dict:
    """All fields, without the marks that reading from a file leaves."""
    ignored = {"transformers_version", "source_config", "_name_or_path", "architectures", "dtype"}
    return {key: value for key, value in config.to_dict().items() if key not in ignored}


REFUSED = [
    ({"block_size": 1}, ["block_size is 1", "at least 2", "Use 8 or 16"]),
    ({"block_size": 0}, ["block_size is 0", "at least 2"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers is 0", "at least 1"]),
    ({"mask_token_id": None}, ["mask_token_id is not set", "reserved id"]),
    ({"mask_token_id": 50}, ["mask_token_id 50", "50 rows", "between 0 and 49"]),
    ({"mask_token_id": -1}, ["mask_token_id -1", "50 rows", "between 0 and 49"]),
    ({"target_layer_ids": []}, ["target_layer_ids is empty", "Pass target_layer_ids"]),
    ({"target_layer_ids": None, "num_target_layers": None}, ["target_layer_ids is empty", "num_target_layers"]),
    ({"target_layer_ids": [1, 4]}, ["Tap id 4", "[1, 4]", "4 layers", "to 3"]),
    ({"target_layer_ids": [-2, 1]}, ["Tap id -2", "-1 (the embedding output)"]),
    ({"target_layer_ids": [-2], "num_target_layers": None}, ["Tap id -2", "unknown number"]),
    ({"layer_types": ["full_attention"]}, ["1 entries for 2 draft layers", "one entry a layer"]),
    (
        {"layer_types": ["full_attention", "linear_attention"]},
        ["linear_attention", "full_attention, sliding_attention"],
    ),
    ({"layer_types": ["sliding_attention", "full_attention"]}, ["sliding_window is None", "Set it"]),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, ["sliding_window is 0", "Set it"]),
    ({"num_attention_heads": 6, "num_key_value_heads": 4}, ["num_attention_heads 6", "num_key_value_heads 4"]),
    ({"num_key_value_heads": 0}, ["num_key_value_heads", "0"]),
    ({"target_layer_ids": None, "num_target_layers": 4, "num_hidden_layers": 9}, ["9 taps", "4 target layers"]),
    ({"no_such_field": 1}, ["does not know `no_such_field`", "block_size"]),
    ({"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}, ["auto_map"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[str(changes)[:60] for changes, _ in REFUSED])
def test_what_cannot_work_is_refused(changes, words):
    """Each message names the value, the limit and the remedy."""
    with pytest.raises(DFlashConfigError) as caught:
        small(**changes)
    assert [word for word in words if word not in str(caught.value)] == []
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, DFlashError)


WRONG_TYPES = {
    "block_size": "8",
    "hidden_size": 32.0,
    "mask_token_id": "3",
    "target_layer_ids": "1",
    "is_causal": "no",
    "rms_norm_eps": "1e-6",
    "sliding_window": 4.5,
    "layer_types": "full_attention",
}


@pytest.mark.parametrize("field", WRONG_TYPES)
def test_a_wrong_type_is_refused_by_name(field):
    """The config is typed: `is_causal="no"` would be true, `block_size=8.0` an index error far away."""
    with pytest.raises((StrictDataclassError, DFlashConfigError), match=field):
        small(**{field: WRONG_TYPES[field]})


def test_a_float_tap_is_refused():
    """The types inside lists count too."""
    with pytest.raises((StrictDataclassError, DFlashConfigError), match="target_layer_ids"):
        small(target_layer_ids=[1.5])


@pytest.mark.parametrize("field", ["input_embedding_scale", "output_multiplier", "final_logit_softcapping"])
@pytest.mark.parametrize("value", [None, 2, 2.5])
def test_numbers_may_be_whole(field, value):
    """JSON writes 30.0 as 30 in some tools."""
    assert getattr(small(**{field: value}), field) == value


def test_minus_one_is_a_tap():
    """-1 is the embedding output."""
    assert small(target_layer_ids=[-1, 3]).target_layer_ids == [-1, 3]


def test_defaults_are_filled_in():
    """Layer types, taps and the target's width."""
    config = small(target_layer_ids=None, num_target_layers=12, num_hidden_layers=3)
    assert config.layer_types == ["full_attention"] * 3
    assert config.target_layer_ids == [1, 5, 9]
    assert config.target_hidden_size == 32
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}


def test_two_configs_share_no_list():
    """Mutable fields are built anew."""
    first, second = small(), small()
    first.layer_types.append("x")
    assert second.layer_types == ["full_attention"] * 2


@pytest.mark.parametrize(
    ("is_causal", "expected"), [(None, [True, False]), (True, [True, True]), (False, [False, False])]
)
def test_causality_of_layers(is_causal, expected):
    """is_causal if set, else sliding means causal (z-lab 0.1.0, vLLM, SGLang)."""
    config = small(layer_types=["sliding_attention", "full_attention"], sliding_window=4, is_causal=is_causal)
    assert [config.layer_is_causal(i) for i in range(2)] == expected


# Taps


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (30, 5, [1, 8, 14, 20, 27]),  # SmolLM2-135M: ties to even
        (36, 5, [1, 9, 17, 25, 33]),  # Qwen3-4B and 8B
        (32, 5, [1, 8, 15, 22, 29]),  # Llama 3.1 8B
        (40, 5, [1, 10, 19, 28, 37]),
        (64, 5, [1, 16, 31, 46, 61]),
        (61, 6, [1, 12, 24, 35, 47, 58]),  # Kimi K2.5
        (48, 5, [1, 12, 23, 34, 45]),
        (32, 1, [16]),
        (9, 1, [4]),
        (1, 1, [0]),
    ],
)
def test_default_taps(layers, taps, expected):
    """The published lists."""
    assert default_target_layer_ids(num_target_layers=layers, num_taps=taps) == expected


def test_default_taps_are_distinct_and_in_range_or_refused():
    """All small targets: no tap below 0, none twice, none past the last layer."""
    for layers in range(1, 20):
        for taps in range(1, 8):
            try:
                ids = default_target_layer_ids(num_target_layers=layers, num_taps=taps)
            except DFlashConfigError as error:
                assert f"{taps} taps" in str(error) and f"{layers} target layers" in str(error)
                assert taps > max(1, layers - 3)
            else:
                assert len(set(ids)) == taps and ids == sorted(ids)
                assert ids[0] >= 0 and ids[-1] < layers


@pytest.mark.parametrize("taps", [0, -1])
def test_no_taps_are_refused(taps):
    """At least one."""
    with pytest.raises(DFlashConfigError, match=f"at least 1, got {taps}"):
        default_target_layer_ids(num_target_layers=12, num_taps=taps)


# From a target


def text(**changes):
    return {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        **changes,
    }


def from_target(config, **changes) -> DFlashConfig:
    return DFlashConfig.from_target(config, **{"mask_token_id": 3, **changes})


def test_from_llama():
    """Width, heads, MLP, norm, RoPE base, vocabulary and special tokens are the target's."""
    config = from_target(
        LlamaConfig(**text(), rms_norm_eps=1e-5, rope_theta=5e5, eos_token_id=[2, 7], max_position_embeddings=777)
    )
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, 100)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 777)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert (config.num_target_layers, config.target_layer_ids) == (12, [1, 3, 5, 7, 9])
    assert (config.num_hidden_layers, config.block_size, config.mask_token_id) == (5, 16, 3)
    assert config.layer_types == ["full_attention"] * 5
    assert config.input_embedding_scale == 1.0
    assert config.eos_token_id == [2, 7]
    assert not config.attention_bias
    assert config.source_config is None


def test_from_qwen3():
    """head_dim is explicit there, and not hidden / heads."""
    config = from_target(Qwen3Config(**text(head_dim=32)), num_hidden_layers=2, num_taps=3, block_size=8)
    assert (config.head_dim, config.hidden_size, config.num_attention_heads) == (32, 64, 4)
    assert (config.num_hidden_layers, config.block_size, len(config.target_layer_ids)) == (2, 8, 3)


def test_from_gemma2():
    """Gemma's embedding module multiplies by sqrt(H); no key of its config says so."""
    assert from_target(Gemma2Config(**text(head_dim=16))).input_embedding_scale == pytest.approx(8.0)


def test_from_granite():
    """Granite's embedding_multiplier."""
    assert from_target(GraniteConfig(**text(), embedding_multiplier=12.0)).input_embedding_scale == 12.0


def test_an_explicit_embedding_scale_wins():
    """Trained with raw rows for a Gemma target."""
    assert from_target(Gemma2Config(**text(head_dim=16)), input_embedding_scale=1.0).input_embedding_scale == 1.0


def test_from_gpt2():
    """Other names (n_embd, n_layer), learned positions, no kv heads, no MLP width."""
    config = from_target(GPT2Config(n_embd=64, n_layer=12, n_head=4, vocab_size=100))
    assert (config.hidden_size, config.num_target_layers, config.vocab_size) == (64, 12, 100)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 4, 16)
    assert config.intermediate_size == 256
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("config_class", [MixtralConfig, Qwen3MoeConfig])
def test_from_a_mixture_of_experts(config_class):
    """The dense MLP width by default, another one on request."""
    target = config_class(**text())
    assert from_target(target).intermediate_size == 96
    assert from_target(target, intermediate_size=50).intermediate_size == 50


def test_from_qwen2_5_vl():
    """The text decoder of a multimodal config; M-RoPE is not inherited."""
    mrope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    target = Qwen2_5_VLConfig(text_config=text(rope_parameters=mrope))
    config = from_target(target)
    assert (config.hidden_size, config.num_target_layers) == (64, 12)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_from_gemma3():
    """RoPE parameters a layer type: the global layers' see the whole context."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    config = from_target(Gemma3Config(text_config=text(head_dim=16, rope_parameters=rope)))
    assert config.hidden_size == 64
    assert config.input_embedding_scale == pytest.approx(8.0)
    assert config.rope_parameters == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}


def test_partial_rotary_is_not_inherited():
    """A drafter rotates whole heads, at the target's base frequency."""
    rope = {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25}
    config = from_target(StableLmConfig(**text(), rope_parameters=rope))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 2e4}
    assert DFlashDraftModel(config).rotary_emb.inv_freq.shape == (config.head_dim // 2,)


YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "rope_theta": 1e6,
}


def test_yarn_is_inherited():
    """The drafter sees the target's positions, so it needs the target's scaling; and a copy of it."""
    target = Qwen3Config(**text(head_dim=16), rope_parameters=dict(YARN), max_position_embeddings=512)
    config = from_target(target)
    assert config.rope_parameters == YARN
    assert config.rope_parameters is not target.rope_parameters
    scaling = DFlashDraftModel(config).rotary_emb.attention_scaling
    assert scaling == pytest.approx(1.2079441541679836)  # 0.1 ln 8 + 1


def test_longrope_factors_are_inherited_for_whole_heads():
    """Phi-3's lists have one entry a rotated pair; without partial rotary they fit the drafter's heads."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    }
    target = Phi3Config(**text(), rope_parameters=rope, max_position_embeddings=128, pad_token_id=0)
    assert from_target(target).rope_parameters["long_factor"] == [2.0] * 8


def test_sliding_layers_of_a_new_drafter():
    """Passed through, and checked."""
    types = ["sliding_attention", "full_attention"]
    config = from_target(LlamaConfig(**text()), num_hidden_layers=2, layer_types=types, sliding_window=32)
    assert (config.layer_types, config.sliding_window) == (types, 32)
    with pytest.raises(DFlashConfigError, match="sliding_window"):
        from_target(LlamaConfig(**text()), num_hidden_layers=2, layer_types=types)


def test_from_target_checks_taps_and_mask():
    """Too many taps, taps past the end, a mask outside the vocabulary."""
    target = LlamaConfig(**text())
    with pytest.raises(DFlashConfigError, match="10 taps do not fit.*12 target layers"):
        from_target(target, num_taps=10)
    with pytest.raises(DFlashConfigError, match="Tap id 12"):
        from_target(target, target_layer_ids=[1, 12])
    with pytest.raises(DFlashConfigError, match="mask_token_id 100"):
        from_target(target, mask_token_id=100)
    assert from_target(target, target_layer_ids=(2, 5)).target_layer_ids == [2, 5]


def test_from_target_records_the_target():
    """The config says which target the drafter was made for."""
    target = LlamaConfig(**text())
    assert from_target(target).target_name_or_path is None
    target._name_or_path = "org/name"
    assert from_target(target).target_name_or_path == "org/name"


def test_a_config_without_a_decoder_is_refused():
    """Named, with the remedy."""

    class VisionOnly(PreTrainedConfig):
        model_type = "vision_only"

    with pytest.raises(DFlashConfigError, match="VisionOnly.*hidden_size.*by hand"):
        from_target(VisionOnly())


def test_from_target_does_not_touch_the_target_s_config():
    """Same dictionary before and after."""
    target = BertConfig(is_decoder=True)
    before = copy.deepcopy(target.to_dict())
    from_target(target)
    assert target.to_dict() == before


# Copies, files, Auto classes


def test_pickle_and_deepcopy():
    """Configs and models travel to workers."""
    config = small(is_causal=False, input_embedding_scale=2.0)
    for clone in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert clone == config and clone is not config
        clone.layer_types.append("x")
        assert len(config.layer_types) == 2
    model = DFlashDraftModel(config).eval()
    noise, features = torch.randn(1, 8, 32), torch.randn(1, 5, 64)
    with torch.no_grad():
        expected = model(noise, features).last_hidden_state
        for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(clone(noise, features).last_hidden_state, expected)
            clone.norm.weight.data.zero_()
    assert model.norm.weight.abs().max() > 0


def test_dict_round_trip():
    """to_dict and from_dict, through JSON."""
    config = small(is_causal=True, rope_parameters=dict(YARN))
    again = DFlashConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert facts(again) == facts(config)


def test_repr_and_diff():
    """Printing a config builds no default config, which would have no mask token."""
    assert '"mask_token_id": 3' in repr(small())
    assert small().to_diff_dict()["block_size"] == 8


def test_auto_classes_read_a_config_that_says_dflash(tmp_path):
    """model_type `dflash` is registered."""
    config = small()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is DFlashConfig
    assert facts(read) == facts(config)
    model = AutoModel.from_config(read)
    assert type(model) is DFlashDraftModel
    # with weights beside it
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config.to_dict()))
    loaded = AutoModel.from_pretrained(tmp_path / "model")
    assert type(loaded) is DFlashDraftModel
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values()))


def test_an_unknown_key_of_our_own_layout_is_refused(tmp_path):
    """A misspelt field in a hand-written config.json."""
    (tmp_path / "config.json").write_text(json.dumps({**small().to_dict(), "blok_size": 4}))
    with pytest.raises(DFlashError, match="blok_size"):
        DFlashConfig.from_pretrained(tmp_path)


def test_overrides_while_loading():
    """Keywords of from_pretrained change fields."""
    config = DFlashConfig.from_pretrained(GOLDEN / "zlab_swa_mixed", block_size=4)
    assert (config.block_size, config.sliding_window) == (4, 8)


def test_save_is_atomic(tmp_path, monkeypatch):
    """A save that dies half-way leaves the old file whole, and no half file under its name."""
    small(block_size=4).save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()

    def full_disk(*args, **kwargs):
        args[1].write("{")
        raise OSError("No space left on device")

    monkeypatch.setattr("dflash_hf.configuration_dflash.json.dump", full_disk)
    with pytest.raises(OSError, match="No space"):
        small().save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == before
    monkeypatch.undo()
    inode = (tmp_path / "config.json").stat().st_ino
    small().save_pretrained(tmp_path)
    assert (tmp_path / "config.json").stat().st_ino != inode  # renamed into place, not written over
    assert json.loads((tmp_path / "config.json").read_text())["block_size"] == 8
    assert os.listdir(tmp_path) == ["config.json"]


def test_save_creates_the_folder_and_checks_first(tmp_path):
    """An invalid config is not written over a valid one."""
    config = small()
    config.save_pretrained(tmp_path / "a" / "b")
    config.block_size = 1
    with pytest.raises(DFlashConfigError, match="block_size is 1"):
        config.save_pretrained(tmp_path / "a" / "b")
    assert DFlashConfig.from_pretrained(tmp_path / "a" / "b").block_size == 8


def test_drafter_of_a_tiny_target_is_initialised():
    """Normal weights with initializer_range, norms at one."""
    model = tiny_drafter(tiny_target(layers=6), initializer_range=0.05)
    assert model.fc.weight.std().item() == pytest.approx(0.05, rel=0.1)
    assert model.layers[0].self_attn.q_proj.weight.std().item() == pytest.approx(0.05, rel=0.1)
    assert torch.equal(model.hidden_norm.weight, torch.ones(32))
