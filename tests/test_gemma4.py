"""Draft layers of Gemma 4's kind against transformers' own Gemma 4 layers, fed with a drafter's inputs."""

import inspect

import pytest
import torch
from torch import nn
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextRotaryEmbedding

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints import read_config, write_config
from dflash_hf.errors import CheckpointError, DFlashConfigError

FIELDS = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-3,
    "vocab_size": 60,
    "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    "block_size": 5,
    "mask_token_id": 4,
    "target_layer_ids": [-1, 2],
    "num_target_layers": 6,
    "decoder_type": "gemma4",
    "attention_k_eq_v": True,
    "layer_scalars": True,
    "own_embedding": True,
    "own_head": True,
    "sample_from_anchor": True,
    "input_embedding_scale": 24**0.5,
}


class Rows:
    """Stands for a cache of transformers: gives the rows it was made with, then those of the call, and keeps both."""

    def __init__(self, keys=None, values=None):
        self.keys, self.values = keys, values

    def update(self, keys, values, *_, **__):
        if self.keys is not None:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values


def stock_hidden_states(drafter, features, noise):
    """What transformers' Gemma 4 layers with the drafter's weights make of the block, the context as rows before it."""
    config = Gemma4TextConfig(**write_config(drafter.config.to_dict()), attn_implementation="eager")
    length, width = features.shape[1], features.shape[1] + noise.shape[1]
    rotary = Gemma4TextRotaryEmbedding(config)
    cos, sin = rotary(noise, torch.arange(width)[None], "full_attention")
    context = drafter.hidden_norm(drafter.fc(features))
    hidden = noise
    for index, draft_layer in enumerate(drafter.layers):
        layer = Gemma4TextDecoderLayer(config, index).eval()
        layer.load_state_dict(draft_layer.state_dict(), strict=draft_layer.layer_scalar is not None)
        layer.self_attn.is_causal = False
        name = "cache" if "cache" in inspect.signature(layer.self_attn.forward).parameters else "past_key_values"
        rows = Rows()
        common = {"attention_mask": None, "shared_kv_states": {}}
        layer.self_attn(
            hidden_states=context, position_embeddings=(cos[:, :length], sin[:, :length]), **common, **{name: rows}
        )
        cache = Rows(rows.keys, rows.values)
        position_embeddings = cos[:, length:], sin[:, length:]
        hidden = layer(hidden, position_embeddings=position_embeddings, **common, **{name: cache})
    return drafter.norm(hidden)


def random_drafter(**more) -> DFlashDraftModel:
    torch.manual_seed(0)
    drafter = DFlashDraftModel(DFlashConfig(**{**FIELDS, **more})).eval()
    for name, parameter in drafter.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    for layer in drafter.layers:
        if layer.layer_scalar is not None:
            layer.layer_scalar.uniform_(0.5, 1.5)
    return drafter


@torch.no_grad()
@pytest.mark.parametrize("layer_scalars", [True, False])
@pytest.mark.parametrize("attention_k_eq_v", [True, False])
@pytest.mark.parametrize("attention_bias", [True, False])
def test_the_layers_are_transformers_own(attention_k_eq_v, layer_scalars, attention_bias):
    """Both ways to the values, with and without the factor of a layer; uncached, cached, and appended in pieces."""
    drafter = random_drafter(
        attention_k_eq_v=attention_k_eq_v, layer_scalars=layer_scalars, attention_bias=attention_bias
    )
    features, noise = torch.randn(1, 11, 48), torch.randn(1, 5, 24)
    expected = stock_hidden_states(drafter, features, noise)
    assert torch.allclose(drafter(noise, features).last_hidden_state, expected, atol=1e-5)
    cache = drafter.new_cache()
    drafter.append_context(features[:, :4], position_ids=torch.arange(4)[None], cache=cache)
    drafter(torch.randn(1, 5, 24), features[:, 4:7], cache=cache)
    cache.crop(7)
    assert torch.allclose(drafter(noise, features[:, 7:], cache=cache).last_hidden_state, expected, atol=1e-5)
    short = drafter(noise, features[:, :6]).last_hidden_state
    assert torch.allclose(short, stock_hidden_states(drafter, features[:, :6], noise), atol=1e-5)
    assert (short - expected).abs().max() > 0.01  # the context matters in this drafter


def test_bf16_rounds_as_transformers_does():
    """Norms compute in fp32, the rest in bf16: not a bit differs."""
    drafter = random_drafter().to(torch.bfloat16)
    drafter.set_attn_implementation("eager")
    features, noise = torch.randn(1, 11, 48).bfloat16(), torch.randn(1, 5, 24).bfloat16()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad():
            expected = stock_hidden_states(drafter, features, noise)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        found = drafter(noise, features).last_hidden_state
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder_type": "gemma3"}, "decoder_type 'gemma3'"),
        ({"decoder_type": "qwen3", "layer_scalars": False}, "attention_k_eq_v is true"),
        ({"decoder_type": "qwen3", "attention_k_eq_v": False}, "layer_scalars is true"),
        ({"conv_kernel_size": 2, "conv_group_size": 8}, "conv_kernel_size"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "layer_types is"),
        ({"own_head": False}, "own_head is false"),
        ({"own_embedding": False}, "own_embedding is false"),
        ({"sample_from_anchor": False}, "sample_from_anchor is false"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    """Each with the field's name."""
    with pytest.raises(DFlashConfigError, match=words):
        DFlashConfig(**{**FIELDS, **changes})


def on_disk(**more) -> dict:
    return write_config(DFlashConfig(**FIELDS).to_dict()) | more


def test_both_spellings_of_the_head_sizes():
    """transformers before and since `per_layer_config`; without shared values key-value heads are the plain ones."""
    older = on_disk(head_dim=8, num_key_value_heads=4)
    names = ("global_head_dim", "num_global_key_value_heads")
    newer = {key: value for key, value in older.items() if key not in names}
    newer["per_layer_config"] = {str(layer): {"head_dim": 16, "num_key_value_heads": 2} for layer in range(2)}
    for config, heads in ((older, 2), (newer, 2), (older | {"attention_k_eq_v": False}, 4)):
        fields = read_config(config)
        stock = Gemma4TextConfig(**config).per_layer_config[1]
        assert (fields["head_dim"], fields["num_key_value_heads"]) == (16, heads)
        assert (stock.head_dim, stock.num_key_value_heads) == (16, heads)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "full attention only"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"per_layer_config": {"0": {"head_dim": 16}}, "head_dim": 8}, "different sizes"),
        ({"per_layer_config": {"0": {"intermediate_size": 1}, "1": {"intermediate_size": 1}}}, "others than heads"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional"}}}, "rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_type"),
    ],
)
def test_a_config_of_other_layers_is_refused(changes, words):
    """Instead of a drafter that computes something else."""
    with pytest.raises(CheckpointError, match=words):
        read_config(on_disk(**changes))


def test_another_embedding_scale_cannot_be_saved():
    """The layout has no key for it."""
    config = DFlashConfig(**{**FIELDS, "input_embedding_scale": 2.0})
    with pytest.raises(CheckpointError, match="input_embedding_scale"):
        write_config(config.to_dict())


def test_a_new_drafter_for_a_gemma_4_target():
    """The heads are those of the sliding layers; asking such a config as a whole is an error in transformers."""
    target = Gemma4TextConfig(
        num_hidden_layers=12, hidden_size=64, head_dim=16, num_key_value_heads=4, attention_k_eq_v=True,
        global_head_dim=32, num_global_key_value_heads=1,
    )  # fmt: skip
    config = DFlashConfig.from_target(target, mask_token_id=4)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 16)
    assert config.input_embedding_scale == 8.0
