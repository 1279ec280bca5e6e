"""What we need from a target model: its layers, its embedding, its head, its hidden states."""

import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    MptConfig,
    NanoChatConfig,
    OPTConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
)

from dflash_hf import DFlashConfig
from dflash_hf.errors import TargetMismatchError
from dflash_hf.target import (
    VOCABULARY_PADDING,
    FeatureCapture,
    OutputHead,
    check_compatibility,
    decoder_layers,
    embed_tokens,
)

LAYERS, HIDDEN, VOCAB = 3, 32, 60


def sizes(**changes):
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}

CONFIGS = {
    "llama": lambda: LlamaConfig(**sizes()),
    "qwen3": lambda: Qwen3Config(**sizes(head_dim=8)),
    "mixtral": lambda: MixtralConfig(**sizes(num_local_experts=2)),
    "gemma2": lambda: Gemma2Config(**sizes(head_dim=8, final_logit_softcapping=1.5, sliding_window=8)),
    "cohere": lambda: CohereConfig(**sizes(logit_scale=0.25)),
    "cohere2": lambda: Cohere2Config(**sizes(logit_scale=0.5)),
    "granite": lambda: GraniteConfig(**sizes(logits_scaling=4.0, embedding_multiplier=3.0)),
    "nanochat": lambda: NanoChatConfig(**sizes(final_logit_softcapping=2.0)),
    "gpt2": lambda: GPT2Config(n_embd=HIDDEN, n_layer=LAYERS, n_head=4, vocab_size=VOCAB, n_positions=64),
    "opt": lambda: OPTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        ffn_dim=48,
        num_attention_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        word_embed_proj_dim=HIDDEN,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=48, num_attention_heads=4, vocab_size=VOCAB
    ),
    "bloom": lambda: BloomConfig(hidden_size=HIDDEN, n_layer=LAYERS, n_head=4, vocab_size=VOCAB),
    "falcon": lambda: FalconConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=VOCAB
    ),
    "mpt": lambda: MptConfig(d_model=HIDDEN, n_layers=LAYERS, n_heads=4, vocab_size=VOCAB, max_seq_len=64),
    "gemma3": lambda: Gemma3Config(
        text_config=sizes(head_dim=8, sliding_window=8),
        vision_config=VISION,
        mm_tokens_per_image=4,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config=sizes(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
        },
    ),
}
WHERE = {
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "gpt_neox": "gpt_neox.layers",
    "bloom": "transformer.h",
    "falcon": "transformer.h",
    "mpt": "transformer.blocks",
    "gemma3": "model.language_model.layers",
    "qwen2_5_vl": "model.language_model.layers",
}
MULTIMODAL = ("gemma3", "qwen2_5_vl")


def build(family, *, layers=None):
    """A tiny random target of a family."""
    torch.manual_seed(3)
    auto = AutoModelForImageTextToText if family in MULTIMODAL else AutoModelForCausalLM
    model = auto.from_config(CONFIGS[family]()).eval()
    assert model.config.get_text_config(decoder=True).num_hidden_layers == LAYERS
    return model


def ids(length=7, *, batch=2, seed=0):
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def drafter_config(**changes):
    return DFlashConfig(
        **{
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": VOCAB,
            "mask_token_id": 3,
            "target_layer_ids": [0, 2],
            "num_target_layers": LAYERS,
            **changes,
        }
    )


# Layers


@pytest.mark.parametrize("family", CONFIGS)
def test_decoder_layers(family):
    """The very ModuleList that the family keeps, also inside a multimodal class with a vision tower."""
    target = build(family)
    layers = decoder_layers(target)
    assert len(layers) == LAYERS
    assert layers is target.get_submodule(WHERE.get(family, "model.layers"))


def test_layers_through_wrappers():
    """LoRA on the target, and torch.compile's wrapper before it has run."""
    peft = pytest.importorskip("peft")
    target = build("llama")
    layers = decoder_layers(target)
    assert decoder_layers(torch.compile(target)) is layers
    assert decoder_layers(peft.get_peft_model(target, peft.LoraConfig(target_modules=["q_proj"]))) is layers


def test_a_target_without_decoder_layers_is_refused():
    """Named, with what is needed."""

    class Odd(nn.Module):
        config = LlamaConfig(**sizes())

        def get_decoder(self):
            return nn.Sequential(nn.Linear(2, 2))

    with pytest.raises(TargetMismatchError, match="3 decoder layers.*Odd.*decoder-only"):
        decoder_layers(Odd())


# Hidden states


@pytest.mark.parametrize("family", CONFIGS)
def test_taps_equal_hidden_states(family):
    """Tap i is hidden_states[i + 1], -1 is hidden_states[0]; the last tap is raw, before the final norm."""
    target = build(family)
    taps = [-1, 0, LAYERS - 2, LAYERS - 1]
    with torch.no_grad(), FeatureCapture(target, taps) as capture:
        with capture.recording():
            states = target(input_ids=ids(), output_hidden_states=True).hidden_states
        features = capture.take(torch.device("cpu"))
    assert features.shape == (2, 7, len(taps) * HIDDEN)
    found = features.split(HIDDEN, dim=-1)
    for tap, state in zip(taps[:-1], found):
        assert torch.equal(state, states[tap + 1])
        assert not torch.allclose(state, states[tap + 2], atol=1e-3)  # off by one would show
    if not torch.equal(states[-1], found[-1]):
        decoder = target.get_decoder()
        names = ("norm", "ln_f", "final_layer_norm", "norm_f")
        owner = decoder if any(hasattr(decoder, name) for name in names) else decoder.decoder
        norm = next(getattr(owner, name) for name in names if hasattr(owner, name))
        with torch.no_grad():
            assert torch.allclose(norm(found[-1]), states[-1], atol=1e-5)


def test_the_last_layer_of_llama_is_tapped_raw():
    """hidden_states[-1] has the final norm applied: it is not what was tapped in training."""
    target = build("llama")
    with torch.no_grad(), FeatureCapture(target, [LAYERS - 1]) as capture:
        with capture.recording():
            states = target(ids(), output_hidden_states=True).hidden_states
        raw = capture.take(torch.device("cpu"))
        assert not torch.allclose(raw, states[-1], atol=1e-2)
        assert torch.allclose(target.model.norm(raw), states[-1], atol=1e-5)


def test_taps_keep_their_order_and_may_repeat():
    """The concatenation follows the list, not the layer order."""
    target = build("llama")
    with torch.no_grad(), FeatureCapture(target, [2, 0, 2]) as capture:
        with capture.recording():
            target(ids())
        first, second, third = capture.take(torch.device("cpu")).split(HIDDEN, dim=-1)
        with capture.recording():
            states = target(ids(), output_hidden_states=True).hidden_states
    assert torch.equal(first, third)
    assert torch.equal(second, states[1])


def test_only_passes_inside_recording_are_seen():
    """A logits processor that runs the model, or a forward before the call, leaves no trace."""
    target = build("llama")
    with torch.no_grad(), FeatureCapture(target, [0]) as capture:
        target(ids(seed=1))
        with capture.recording():
            expected = target(ids(5, seed=2), output_hidden_states=True).hidden_states[1]
        target(ids(seed=3))
        assert torch.equal(capture.take(torch.device("cpu")), expected)
        with pytest.raises(TargetMismatchError, match="layer 0 gave no hidden state"):
            capture.take(torch.device("cpu"))


def test_a_new_recording_forgets_the_old_one():
    """What was recorded and not taken is dropped."""
    target = build("llama")
    with torch.no_grad(), FeatureCapture(target, [0]) as capture:
        with capture.recording():
            target(ids(seed=1))
        with capture.recording():
            expected = target(ids(4, seed=2), output_hidden_states=True).hidden_states[1]
        assert torch.equal(capture.take(torch.device("cpu")), expected)


def test_several_passes_of_one_recording_are_concatenated():
    """Chunked prefill: the chunks' features in order are the whole prompt's."""
    target = build("llama")
    prompt = ids(9)
    with torch.no_grad(), FeatureCapture(target, [-1, 0, 2]) as capture:
        with capture.recording():
            target(prompt)
        whole = capture.take(torch.device("cpu"))
        with capture.recording():
            past = None
            for start, end in ((0, 4), (4, 5), (5, 9)):
                past = target(prompt[:, start:end], past_key_values=past, use_cache=True).past_key_values
        chunks = capture.take(torch.device("cpu"))
    assert whole.shape == chunks.shape
    assert torch.allclose(whole, chunks, atol=1e-5)


def test_another_thread_is_not_seen():
    """Two generate calls on one target: each capture hears its own thread only."""
    target = build("llama")
    mine, other = ids(5, seed=1), ids(5, seed=2)
    results, entered, go_on = {}, threading.Event(), threading.Event()

    def elsewhere():
        with torch.no_grad(), FeatureCapture(target, [0]) as theirs:
            with theirs.recording():
                entered.set()
                go_on.wait(30)
                results["expected"] = target(other, output_hidden_states=True).hidden_states[1]
            results["theirs"] = theirs.take(torch.device("cpu"))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    entered.wait(30)
    with torch.no_grad(), FeatureCapture(target, [0]) as capture:
        with capture.recording():
            expected = target(mine, output_hidden_states=True).hidden_states[1]
            go_on.set()
            thread.join(30)  # the other pass runs inside this recording
        assert torch.equal(capture.take(torch.device("cpu")), expected)
    assert torch.equal(results["theirs"], results["expected"])


def hooks(target):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())


def test_hooks_are_removed():
    """On exit, and when the target raises inside; and recording stops on an exception."""
    target = build("llama")
    assert hooks(target) == 0
    with FeatureCapture(target, [-1, 0, 2, 0]):
        assert hooks(target) == 3
    assert hooks(target) == 0
    capture = FeatureCapture(target, [-1, 0])
    with pytest.raises(IndexError), capture, capture.recording():
        target(torch.full((1, 3), VOCAB + 5))
    assert hooks(target) == 0
    assert not capture._recording


def test_the_user_s_output_hidden_states_keeps_its_meaning():
    """Hooks change nothing in the target's own output."""
    target = build("llama")
    with torch.no_grad():
        before = target(ids(), output_hidden_states=True)
        with FeatureCapture(target, [-1, 0, 2]) as capture, capture.recording():
            during = target(ids(), output_hidden_states=True)
            assert target(ids()).hidden_states is None
    assert torch.equal(before.logits, during.logits)
    assert all(torch.equal(a, b) for a, b in zip(before.hidden_states, during.hidden_states, strict=True))


def test_taken_features_are_forgotten():
    """The raw concat of a long prompt is freed once it was projected."""
    target = build("llama")
    with torch.no_grad(), FeatureCapture(target, [0, 2]) as capture:
        with capture.recording():
            target(ids())
        capture.take(torch.device("cpu"))
        assert not capture._states


# Embedding


def test_embedding_of_a_gemma_target():
    """None is what the module returns (times sqrt(H)), 1.0 the raw rows, a number the rows times it."""
    target = build("gemma2")
    slots = torch.tensor([[5, 3, 3]])
    rows = target.get_input_embeddings().weight[slots]
    assert torch.equal(embed_tokens(target, slots, scale=None), target.get_input_embeddings()(slots))
    assert torch.allclose(embed_tokens(target, slots, scale=None), rows * HIDDEN**0.5)
    assert torch.equal(embed_tokens(target, slots, scale=1.0), rows)
    assert torch.equal(embed_tokens(target, slots, scale=2.5), rows * 2.5)


@pytest.mark.parametrize("family", ["gemma2", "granite", "llama", "gemma3"])
def test_the_default_scale_gives_what_the_target_s_first_layer_sees(family):
    """from_target's input_embedding_scale against the target's own embedding output."""
    target = build(family)
    scale = DFlashConfig.from_target(target.config, mask_token_id=3, num_taps=1).input_embedding_scale
    with torch.no_grad(), FeatureCapture(target, [-1]) as capture:
        with capture.recording():
            target(input_ids=ids())
        expected = capture.take(torch.device("cpu"))
        assert torch.allclose(embed_tokens(target, ids(), scale=scale), expected, rtol=1e-5)


class NormedEmbedding(nn.Embedding):
    """Muse's: the lookup, then a norm that is no part of the table."""

    def __init__(self, fails=False):
        super().__init__(VOCAB, HIDDEN)
        self.embed_norm = nn.LayerNorm(HIDDEN, elementwise_affine=False)
        self.fails = fails

    def forward(self, token_ids):
        if self.fails:
            raise RuntimeError("lookup failed")
        return self.embed_norm(super().forward(token_ids))


def test_a_norm_around_the_embedding_is_bypassed():
    """The module itself is neither called nor changed."""
    embedding = NormedEmbedding()
    norm = embedding.embed_norm
    target = SimpleNamespace(get_input_embeddings=lambda: embedding)
    assert torch.equal(embed_tokens(target, ids(), scale=None), embedding.weight[ids()])
    assert embedding.embed_norm is norm
    assert torch.equal(embed_tokens(target, ids(), scale=1.0), embedding.weight[ids()])
    assert not torch.equal(embedding(ids()), embedding.weight[ids()])
    embedding.fails = True
    assert torch.equal(embed_tokens(target, ids(), scale=None), embedding.weight[ids()])


# Head


@pytest.mark.parametrize("family", CONFIGS)
def test_the_head_equals_the_target_s_own_logits(family):
    """Softcap (Gemma), logit_scale (Cohere), logits_scaling (Granite): q uses the target's own transform."""
    target = build(family)
    head = OutputHead(target, drafter_config())
    with torch.no_grad():
        output = target(input_ids=ids(), output_hidden_states=True)
        found = head(output.hidden_states[-1])
        bare = target.get_output_embeddings()(output.hidden_states[-1])
    assert torch.allclose(found, output.logits, atol=1e-5)
    if family in ("gemma2", "cohere", "cohere2", "granite", "nanochat"):
        assert not torch.allclose(bare, output.logits, atol=1e-3)  # the transform is visible here


def test_the_head_of_a_muse_target():
    """Its config has output_multiplier and final_logit_softcapping, and its forward applies both."""
    config = LlamaConfig(**sizes())
    config.output_multiplier, config.final_logit_softcapping = 0.25, 3.0
    linear = nn.Linear(HIDDEN, VOCAB, bias=False)
    target = SimpleNamespace(get_output_embeddings=lambda: linear, config=config)
    hidden = torch.randn(2, HIDDEN)
    expected = torch.tanh(linear(hidden) * 0.25 / 3.0) * 3.0  # modeling_muse_glimmer.py, transformers 5.24
    assert torch.allclose(OutputHead(target, drafter_config())(hidden), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("multiplier", "softcap", "expected"),
    [
        (2.0, None, lambda x: x * 2),
        (None, 5.0, lambda x: torch.tanh(x / 5) * 5),
        (0.5, 4.0, lambda x: torch.tanh(x * 0.5 / 4) * 4),
    ],
)
def test_the_drafter_s_own_transform_takes_over(multiplier, softcap, expected):
    """Multiplier, then softcap; the target's own is not applied on top."""
    target = build("gemma2")
    head = OutputHead(target, drafter_config(output_multiplier=multiplier, final_logit_softcapping=softcap))
    hidden = 3 * torch.randn(2, 4, HIDDEN)
    with torch.no_grad():
        assert torch.allclose(head(hidden), expected(target.lm_head(hidden)), atol=1e-6)


def test_the_head_casts_hidden_states():
    """A bf16 drafter with an fp32 target, and the other way round."""
    target = build("llama")
    hidden = torch.randn(2, HIDDEN)
    head = OutputHead(target, drafter_config())
    with torch.no_grad():
        assert torch.equal(head(hidden.bfloat16()), target.lm_head(hidden.bfloat16().float()))
        target.to(torch.bfloat16)
        assert head(hidden).dtype == torch.bfloat16


@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_the_head(bias):
    """Logits over a part of the vocabulary equal those columns of the whole."""
    linear = nn.Linear(HIDDEN, VOCAB, bias=bias)
    target = SimpleNamespace(get_output_embeddings=lambda: linear, config=LlamaConfig(**sizes()))
    head = OutputHead(target, drafter_config())
    some, hidden = torch.tensor([7, 1, 30]), torch.randn(4, HIDDEN)
    weight, found_bias = head.rows(some)
    part = head.transform(nn.functional.linear(hidden, weight, found_bias))
    assert (found_bias is None) is not bias
    assert torch.allclose(part, head(hidden)[:, some], atol=1e-6)


def test_a_target_without_a_head_is_refused():
    """AutoModel instead of AutoModelForCausalLM is the usual cause."""
    target = AutoModel.from_config(CONFIGS["llama"]())
    with pytest.raises(TargetMismatchError, match="LlamaModel has no output head.*AutoModelForCausalLM"):
        OutputHead(target, drafter_config())


# Compatibility


def test_a_fitting_pair_passes():
    """Including the pair that from_target makes, for every family."""
    check_compatibility(drafter_config(), build("llama"))
    for family in CONFIGS:
        target = build(family)
        check_compatibility(DFlashConfig.from_target(target.config, mask_token_id=3, num_taps=1), target)
    target = tiny_target(layers=6)
    check_compatibility(tiny_drafter(target).config, target)


MISMATCHES = [
    ({"target_hidden_size": 64}, ["width 64", "LlamaForCausalLM", "hidden size 32"]),
    ({"hidden_size": 64, "target_hidden_size": 32}, ["hidden size 64", "width is 32"]),
    (
        {"target_layer_ids": [0, 3], "num_target_layers": 4},
        ["target layer 3", "LlamaForCausalLM", "3 layers", "ids 0 to 2"],
    ),
    ({"mask_token_id": 60, "vocab_size": 70}, ["mask_token_id 60", "60 rows", "LlamaForCausalLM"]),
    ({"vocab_size": VOCAB + VOCABULARY_PADDING}, [str(VOCAB + VOCABULARY_PADDING), "60", "1024"]),
]


@pytest.mark.parametrize(("changes", "words"), MISMATCHES)
def test_mismatches_are_refused_with_words(changes, words):
    """Value, limit, remedy, and the target that the drafter was trained for where it is known."""
    target = build("llama")
    for name in (None, "org/the-right-target"):
        with pytest.raises(TargetMismatchError) as caught:
            check_compatibility(drafter_config(**changes, target_name_or_path=name), target)
        message = str(caught.value)
        assert [word for word in words if word not in message] == []
        assert ("trained for org/the-right-target" in message) == (name is not None)
        assert "se the" in message or "needs the target's width" in message


def test_padding_of_the_vocabulary_is_no_mismatch():
    """Embedding tables are padded; the token ids agree."""
    target = build("llama")
    for vocabulary in (VOCAB, VOCAB - 4, VOCAB + VOCABULARY_PADDING - 1):
        check_compatibility(drafter_config(vocab_size=vocabulary), target)


def test_the_embedding_tap_needs_no_layer():
    """-1 fits every target."""
    check_compatibility(drafter_config(target_layer_ids=[-1]), build("llama"))


def compiled_as_a_whole(target):
    target.compile(backend="eager")


def compiled_forward(target):
    target.forward = torch.compile(target.forward, backend="eager")


def compiled_layers(target):
    for layer in decoder_layers(target):
        layer.compile(backend="eager")


@pytest.mark.parametrize("compile_it", [compiled_as_a_whole, compiled_forward, compiled_layers])
def test_features_of_a_target_that_was_compiled_before(compile_it):
    """Its graphs know nothing of the hooks: without a remedy they give no feature, or those of an earlier call."""
    target = tiny_target()
    with torch.no_grad():
        states = target(ids(), output_hidden_states=True).hidden_states
        compile_it(target)
        for _ in range(2):
            target(ids())
        capture = FeatureCapture(target, [0, 2])
        with capture, capture.recording():
            target(ids())
            features = capture.take(torch.device("cpu"))
    assert torch.equal(features, torch.cat([states[1], states[3]], dim=-1))
