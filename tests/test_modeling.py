"""The drafter's forward pass against recorded numbers, brute force, and the faults of known_faults.md put back."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import GOLDEN, tiny_drafter, tiny_target
from torch import nn
from transformers import LlamaConfig
from transformers.cache_utils import DFlashCache

from dflash_hf import DFlashConfig, DFlashDraftModel, modeling_dflash
from dflash_hf import masks as mask_module
from dflash_hf.attention import DFlashAttention, rotate
from dflash_hf.errors import DFlashConfigError, DFlashError
from dflash_hf.masks import BlockMasks, block_visibility, to_additive
from dflash_hf.modeling_dflash import DFlashDecoderLayer
from dflash_hf.target import FeatureCapture, OutputHead, embed_tokens

CASES = sorted(path.name for path in GOLDEN.glob("zlab_*"))


def load(case, **kwargs) -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(case.path, **kwargs).eval()


@torch.no_grad()
def run_rounds(model, case, *, cache="draft", name="cache"):
    """Last hidden states of every recorded round. `cache`: ours, transformers' own, or none (all context at once)."""
    block, outputs = case.meta["block_size"], []
    if cache == "draft":
        held = model.new_cache()
    elif cache == "stock":
        held = DFlashCache(config=model.config)
        held.activate_past_recording()
    context, positions = [], []
    for index, round_ in enumerate(case.meta["rounds"]):
        features, position_ids = case.io[f"r{index}.target_hidden"], case.io[f"r{index}.position_ids"]
        noise = case.io[f"r{index}.noise_embedding"]
        if cache is None:
            context.append(features)
            positions.append(position_ids[:, : features.shape[1]])
            position_ids = torch.cat([*positions, position_ids[:, features.shape[1] :]], dim=1)
            output = model(noise, torch.cat(context, dim=1), position_ids)
        else:
            if cache == "stock":  # the order of transformers' candidate generator
                held.set_previous_accepted_tokens(features.shape[1])
                if index > 0:
                    held.crop(-block)
            output = model(noise, features, position_ids, **{name: held})
            if cache == "draft":
                held.crop(round_["anchor_position"])
        outputs.append(output.last_hidden_state)
    return outputs


def differences(model, case, **options) -> list[float]:
    """The largest deviation from the recorded hidden states, a round."""
    outputs = run_rounds(model, case, **options)
    return [(out - case.io[f"r{i}.last_hidden_state"]).abs().max().item() for i, out in enumerate(outputs)]


def random_drafter(**changes) -> DFlashDraftModel:
    """A random drafter with two sliding layers and a full one, at a scale where attention is not uniform."""
    torch.manual_seed(5)
    config = DFlashConfig(
        **{
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 6,
            "vocab_size": 50,
            "block_size": 4,
            "mask_token_id": 3,
            "target_layer_ids": [0, 2],
            "num_target_layers": 4,
            "initializer_range": 0.3,
            **changes,
        }
    )
    return DFlashDraftModel(config).eval()


def block_inputs(model, *, context=9, batch=1, seed=7):
    """Random noise embeddings and context features."""
    generator = torch.Generator().manual_seed(seed)
    width = len(model.config.target_layer_ids) * model.config.target_hidden_size
    noise = torch.randn(batch, model.config.block_size, model.config.hidden_size, generator=generator)
    return noise, torch.randn(batch, context, width, generator=generator)


# Golden cases


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_rounds_with_our_cache(golden, name, attention):
    """Every recorded round of z-lab 0.1.0: structure, RoPE, causality, windows, YaRN, biases."""
    case = golden(name)
    found = differences(load(case, attn_implementation=attention), case)
    assert len(found) == len(case.meta["rounds"])
    assert max(found) <= case.meta["tolerance_suggested"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_rounds_without_a_cache(golden, name, attention):
    """The same numbers with all context given at once."""
    case = golden(name)
    found = differences(load(case, attn_implementation=attention), case, cache=None)
    assert max(found) <= case.meta["tolerance_suggested"]


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
@pytest.mark.parametrize("name", CASES)
def test_rounds_with_the_cache_of_transformers(golden, name, argument):
    """transformers' own candidate generator passes a DFlashCache (up to 5.23 as past_key_values); sliding layers of it
    drop rows that fell out of the window."""
    case = golden(name)
    found = differences(load(case), case, cache="stock", name=argument)
    assert max(found) <= case.meta["tolerance_suggested"]


@pytest.mark.parametrize("name", CASES)
def test_position_ids_follow_the_cache_by_default(golden, name):
    """The recorded positions are contiguous from 0, which is the default."""
    case = golden(name)
    model = load(case)
    cache = model.new_cache()
    for index, round_ in enumerate(case.meta["rounds"]):
        with torch.no_grad():
            output = model(case.io[f"r{index}.noise_embedding"], case.io[f"r{index}.target_hidden"], cache=cache)
        cache.crop(round_["anchor_position"])
        recorded = case.io[f"r{index}.last_hidden_state"]
        assert (output.last_hidden_state - recorded).abs().max() <= case.meta["tolerance_suggested"]


@pytest.mark.parametrize("name", CASES)
def test_config_facts(golden, name):
    """Block size, mask, taps, causality and windows as the reference read them."""
    case = golden(name)
    model = load(case)
    meta, config = case.meta, model.config
    assert (config.block_size, config.mask_token_id) == (meta["block_size"], meta["mask_token_id"])
    assert config.target_layer_ids == meta["target_layer_ids"]
    assert [layer.self_attn.is_causal for layer in model.layers] == meta["layer_is_causal"]
    assert [layer.self_attn.sliding_window for layer in model.layers] == meta["layer_sliding_window"]
    assert model.rotary_emb.attention_scaling == pytest.approx(meta["rope_attention_scaling"], abs=1e-7)
    assert str(model.dtype).removeprefix("torch.") == meta["dtype"]


@pytest.mark.parametrize("name", CASES)
def test_rope_inverse_frequencies(golden, name):
    """Also for a bf16 checkpoint they are fp32 (rounding them costs 3e-2)."""
    case = golden(name)
    inv_freq = load(case).rotary_emb.inv_freq
    assert inv_freq.dtype == torch.float32
    assert torch.allclose(inv_freq, case.io["rope_inv_freq"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_context_feature(golden, name):
    """hidden_norm(fc(raw concat))."""
    case = golden(name)
    with torch.no_grad():
        feature = load(case).project_context(case.io["r0.target_hidden"])
    assert (feature - case.io["r0.context_feature"]).abs().max() <= case.meta["tolerance_suggested"]


@pytest.mark.parametrize("name", CASES)
def test_noise_embeddings(golden, name):
    """Raw rows of the target's table times input_embedding_scale; anchor first, then masks."""
    case = golden(name)
    config = load(case).config
    table = nn.Embedding.from_pretrained(case.io["embed_weight"])
    target = SimpleNamespace(get_input_embeddings=lambda: table)
    for index, round_ in enumerate(case.meta["rounds"]):
        ids = torch.tensor([[round_["anchor_id"], *[config.mask_token_id] * (config.block_size - 1)]])
        assert torch.equal(ids, case.io[f"r{index}.noise_ids"])
        embeds = embed_tokens(target, ids, scale=config.input_embedding_scale)
        assert torch.equal(embeds, case.io[f"r{index}.noise_embedding"])


@pytest.mark.parametrize("name", CASES)
def test_draft_logits_and_greedy_proposals(golden, name):
    """Slots 1 to B - 1 through the target's head; slot 0 is silent."""
    case = golden(name)
    model = load(case)
    weight = case.io["lm_head_weight"]
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False).to(weight.dtype)
    head.weight.data.copy_(weight)
    output_head = OutputHead(SimpleNamespace(get_output_embeddings=lambda: head, config=LlamaConfig()), model.config)
    for index, hidden in enumerate(run_rounds(model, case)):
        with torch.no_grad():
            logits = output_head(hidden[:, 1:])
        recorded = case.io[f"r{index}.draft_logits"]
        assert (logits - recorded).abs().max() <= 20 * case.meta["tolerance_suggested"]
        assert torch.equal(logits.argmax(-1), case.io[f"r{index}.greedy_proposals"])


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()])
def test_inverse_frequencies_survive_a_cast(golden, cast):
    """Module.to(dtype) casts buffers too; these two must stay exact, and the parameters must not."""
    case = golden("zlab_gptoss_bias_yarn")
    model = load(case)
    exact = model.rotary_emb.inv_freq.clone()
    cast(model)
    assert model.norm.weight.dtype in (torch.bfloat16, torch.float16)
    assert model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.rotary_emb.inv_freq, exact)
    assert torch.equal(model.rotary_emb.original_inv_freq.float(), exact)
    rounded = exact.to(model.norm.weight.dtype).float()
    assert not torch.equal(rounded, exact)  # the cast would have shown


def test_an_fp32_model_cast_to_bf16_stays_within_bf16_error(golden):
    """The whole path in bf16, from fp32 weights."""
    case = golden("zlab_qwen3_full")
    model = load(case).to(torch.bfloat16)
    outputs = run_rounds(model, case)
    assert outputs[0].dtype == torch.bfloat16
    assert max((out - case.io[f"r{i}.last_hidden_state"]).abs().max() for i, out in enumerate(outputs)) < 0.2


# Faults put back

NO_YARN = {"rope_scaling": None}


def _yarn(**changes):
    def edit(config):
        scaling = {**config["rope_scaling"], **changes}
        config["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}

    return edit


def _set(**changes):
    return lambda config: config.update(changes)


def _all_full(config):
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]


WRONG_READINGS = [
    ("zlab_qwen3_full", "causal_block", _set(is_causal=True)),
    ("zlab_qwen3_full", "rope_theta_10000", _set(rope_theta=10000)),
    ("zlab_qwen3_full", "eps_1e-5", _set(rms_norm_eps=1e-5)),
    ("zlab_nested_block", "rope_theta_10000", _set(rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})),
    ("zlab_gptoss_bias_yarn", "no_yarn", _set(**NO_YARN)),
    ("zlab_gptoss_bias_yarn", "eps_1e-6", _set(rms_norm_eps=1e-6)),
    ("zlab_gptoss_bias_yarn", "truncate_true", _yarn(truncate=True)),
    ("zlab_gptoss_bias_yarn", "attention_factor_1", _yarn(attention_factor=1.0)),
    ("zlab_kimi_yarn_mscale", "no_yarn", _set(**NO_YARN)),
    ("zlab_kimi_yarn_mscale", "ignore_mscale", _yarn(mscale=None, mscale_all_dim=None)),
    ("zlab_kimi_yarn_mscale_uneven", "ignore_mscale", _yarn(mscale=None, mscale_all_dim=None)),
    ("zlab_qwen35_122b_like", "bidirectional", _set(is_causal=False)),
    ("zlab_swa_mixed", "bidirectional_everywhere_same_window", _set(is_causal=False)),
    ("zlab_swa_mixed", "causal_everywhere", _set(is_causal=True)),
    ("zlab_swa_mixed", "window_plus_1", _set(sliding_window=9)),
    ("zlab_swa_mixed", "window_minus_1", _set(sliding_window=7)),
    ("zlab_swa_mixed", "no_window_bidirectional", _all_full),
    ("zlab_swa_mixed_noncausal", "is_causal_absent", lambda config: config.pop("is_causal")),
    ("zlab_swa_mixed_noncausal", "window_plus_1", _set(sliding_window=9)),
    ("zlab_swa_mixed_noncausal", "window_minus_1", _set(sliding_window=7)),
    ("zlab_swa_mixed_noncausal", "no_window", _all_full),
    ("zlab_swa_small_window", "is_causal_absent", lambda config: config.pop("is_causal")),
    ("zlab_swa_small_window", "window_plus_1", _set(sliding_window=6)),
]


@pytest.mark.parametrize(("name", "reading", "edit"), WRONG_READINGS, ids=[f"{n}-{r}" for n, r, _ in WRONG_READINGS])
def test_a_wrong_reading_is_off_by_what_was_recorded(golden, tmp_path, name, reading, edit):
    """Change one fact of the config: our error must be the reference's own error for that reading, round by round."""
    case = golden(name)
    config = json.loads((case.path / "config.json").read_text())
    edit(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(case.path / "model.safetensors", tmp_path)
    model = DFlashDraftModel.from_pretrained(tmp_path).eval()
    recorded = case.meta["wrong_reading_max_abs_diff_per_round"][reading]
    assert min(recorded) > 5 * case.meta["tolerance_suggested"]
    assert differences(model, case) == pytest.approx(recorded, rel=2e-2, abs=2e-5)


def test_every_recorded_wrong_reading_is_covered(golden):
    """No recorded fault is forgotten above (zlab_kimi_yarn_mscale_uneven's no_yarn repeats its sibling's)."""
    recorded = {
        (name, reading) for name in CASES for reading in golden(name).meta["wrong_reading_max_abs_diff_per_round"]
    }
    assert recorded - {(name, reading) for name, reading, _ in WRONG_READINGS} == {
        ("zlab_kimi_yarn_mscale_uneven", "no_yarn")
    }


def _mask_fault(**overrides):
    def faulty(**arguments):
        changes = {key: change(arguments[key]) for key, change in overrides.items()}
        return block_visibility(**{**arguments, **changes})

    return lambda monkeypatch: monkeypatch.setattr(mask_module, "block_visibility", faulty)


def _input_norm_on_context(monkeypatch):
    right = DFlashDecoderLayer.forward

    def faulty(self, block, context, *rest):
        return right(self, block, self.input_layernorm(context), *rest)

    monkeypatch.setattr(DFlashDecoderLayer, "forward", faulty)


def _no_key_norm_on_context(monkeypatch):
    right = DFlashAttention.keys_and_values

    def faulty(self, states, cos, sin):
        keys, values = right(self, states, cos, sin)
        shape = (*states.shape[:-1], -1, self.head_dim)
        raw = rotate(self.k_proj(states).view(shape).transpose(1, 2), cos, sin)
        context = states.shape[1] - 8
        return torch.cat([raw[:, :, :context], keys[:, :, context:]], dim=2), values

    monkeypatch.setattr(DFlashAttention, "keys_and_values", faulty)


def _block_positions_from_zero(monkeypatch):
    right = DFlashDraftModel.forward

    def faulty(self, noise, context, position_ids, *rest, **more):
        return right(self, noise, context, position_ids - position_ids[:, :1], *rest, **more)

    monkeypatch.setattr(DFlashDraftModel, "forward", faulty)


def _gemma_norm(monkeypatch):
    def faulty(self, states):
        squares = states.float().pow(2).mean(-1, keepdim=True)
        return states * torch.rsqrt(squares + self.variance_epsilon) * (1 + self.weight)

    monkeypatch.setattr(modeling_dflash.Qwen3RMSNorm, "forward", faulty)


def _taps_in_another_order(monkeypatch):
    right = DFlashDraftModel.project_context

    def faulty(self, features):
        width = self.config.target_hidden_size
        return right(self, features.roll(width, dims=-1))

    monkeypatch.setattr(DFlashDraftModel, "project_context", faulty)


def _no_hidden_norm(monkeypatch):
    monkeypatch.setattr(DFlashDraftModel, "project_context", lambda self, features: self.fc(features))


FAULTS = {
    "causality ignored": ("zlab_swa_mixed", _mask_fault(is_causal=lambda _: False)),
    "window ignored": ("zlab_swa_mixed", _mask_fault(sliding_window=lambda _: None)),
    "window plus one": ("zlab_swa_mixed_noncausal", _mask_fault(sliding_window=lambda w: w and w + 1)),
    "window minus one": ("zlab_qwen35_122b_like", _mask_fault(sliding_window=lambda w: w and w - 1)),
    "keys ahead not windowed": ("zlab_swa_small_window", None),
    "input norm on the context": ("zlab_qwen3_full", _input_norm_on_context),
    "no key norm on the context": ("zlab_qwen3_full", _no_key_norm_on_context),
    "positions from zero": ("zlab_qwen3_full", _block_positions_from_zero),
    "Gemma's 1 + w norm": ("zlab_qwen3_full", _gemma_norm),
    "taps in another order": ("zlab_qwen3_full", _taps_in_another_order),
    "no hidden_norm": ("zlab_one_layer", _no_hidden_norm),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_code_is_seen(golden, monkeypatch, fault):
    """The golden comparison fails by a thousand times its tolerance with the fault put back."""
    name, put_back = FAULTS[fault]
    case = golden(name)
    model = load(case)
    assert max(differences(model, case)) <= case.meta["tolerance_suggested"]
    if put_back is None:

        def one_sided(**arguments):
            visible = block_visibility(**arguments)
            if visible is None or arguments["is_causal"]:
                return visible
            rows, length = arguments["num_keys"], arguments["block_length"]
            ahead = torch.arange(rows)[None, :] > torch.arange(rows - length, rows)[:, None]
            return visible | ahead

        monkeypatch.setattr(mask_module, "block_visibility", one_sided)
    else:
        put_back(monkeypatch)
    assert max(differences(model, case)) > 1000 * case.meta["tolerance_suggested"]


def test_a_block_left_in_the_cache_is_seen(golden):
    """Forgetting to crop the block's rows is an error of the caller that the second round shows."""
    case = golden("zlab_qwen3_full")
    model = load(case)
    cache = model.new_cache()
    outputs = []
    for index in range(2):
        with torch.no_grad():
            inputs = [case.io[f"r{index}.{name}"] for name in ("noise_embedding", "target_hidden", "position_ids")]
            outputs.append(model(*inputs, cache=cache).last_hidden_state)
    deviations = [(out - case.io[f"r{i}.last_hidden_state"]).abs().max().item() for i, out in enumerate(outputs)]
    assert deviations[0] <= case.meta["tolerance_suggested"]
    assert deviations[1] > 1000 * case.meta["tolerance_suggested"]


def test_a_nested_block_size_that_is_ignored_is_seen(golden):
    """Reading the stale top-level 16 instead of the nested 4 puts masks in slots where the drafter knows none."""
    case = golden("zlab_block_conflict")
    model = load(case)
    assert model.config.block_size == 4
    table, anchor = case.io["embed_weight"], case.meta["rounds"][0]["anchor_id"]
    for block, wrong in ((4, False), (16, True)):
        noise = table[[anchor, *[model.config.mask_token_id] * (block - 1)]][None]
        with torch.no_grad():
            output = model(noise, case.io["r0.target_hidden"]).last_hidden_state[:, :4]
        deviation = (output - case.io["r0.last_hidden_state"]).abs().max()
        tolerance = case.meta["tolerance_suggested"]
        assert deviation > 1000 * tolerance if wrong else deviation <= tolerance


def accepted_tokens(target, drafter, text, *, layer_ids):
    """Mean length of the correct prefix of blocks drafted at every position of the target's own greedy `text`."""
    config = drafter.config
    with torch.no_grad(), FeatureCapture(target, layer_ids) as capture:
        with capture.recording():
            target(text)
        features = capture.take(torch.device("cpu"))
        head, counts = OutputHead(target, config), []
        for anchor in range(8, text.shape[1] - config.block_size):
            slots = torch.full((1, config.block_size), config.mask_token_id)
            slots[0, 0] = text[0, anchor]
            hidden = drafter(embed_tokens(target, slots, scale=None), features[:, :anchor]).last_hidden_state
            hits = head(hidden[:, 1:]).argmax(-1) == text[:, anchor + 1 : anchor + config.block_size]
            counts.append(hits.cumprod(dim=1).sum().item())
    return sum(counts) / len(counts)


def test_taps_that_are_off_by_one_are_seen(trained_pair):
    """hidden_states[id] instead of [id + 1], or one too late: the trained drafter accepts clearly less (this
    small target says much the same in every layer, so not nothing)."""
    target, drafter = trained_pair
    prompt = torch.tensor([[1, 5, 9, 13]])
    text = target.generate(prompt, max_new_tokens=60, do_sample=False, eos_token_id=None)
    taps = drafter.config.target_layer_ids
    right = accepted_tokens(target, drafter, text, layer_ids=taps)
    wrong = [accepted_tokens(target, drafter, text, layer_ids=[i + shift for i in taps]) for shift in (-1, 1)]
    assert right > 5
    assert max(wrong) < right - 1


# Masks


def visibility_oracle(block, keys, causal, window, padding):
    """Two loops over absolute rows."""
    batch = 1 if padding is None else len(padding)
    out = torch.zeros(batch, 1, block, keys, dtype=torch.bool)
    for row in range(batch):
        for slot in range(block):
            query = keys - block + slot
            for key in range(keys):
                seen = key <= query if causal else True
                if window is not None:
                    seen = seen and query - key < window and (causal or key - query < window)
                if padding is not None:
                    seen = seen and bool(padding[row][key])
                out[row, 0, slot, key] = seen
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 40])
def test_block_visibility_against_two_loops(causal, window):
    """Causality, both sides of the window and padding over random shapes."""
    generator = torch.Generator().manual_seed(window or 0)
    for _ in range(12):
        block = int(torch.randint(1, 9, (), generator=generator))
        keys = block + int(torch.randint(0, 20, (), generator=generator))
        padding = torch.randint(0, 2, (2, keys), generator=generator) if keys % 2 else None
        found = block_visibility(
            block_length=block,
            num_keys=keys,
            is_causal=causal,
            sliding_window=window,
            padding_mask=padding,
            device=torch.device("cpu"),
        )
        expected = visibility_oracle(block, keys, causal, window, padding)
        if found is None:
            assert expected.all()
        else:
            assert found.dtype == torch.bool
            assert torch.equal(found, expected)


def test_no_mask_where_everything_is_visible():
    """A full bidirectional block needs none, so the fast attention path stays open."""
    for window in (None, 12, 50):
        assert (
            block_visibility(
                block_length=4,
                num_keys=12,
                is_causal=False,
                sliding_window=window,
                padding_mask=None,
                device=torch.device("cpu"),
            )
            is None
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_to_additive(dtype):
    """0 where visible, the dtype's minimum elsewhere."""
    found = to_additive(torch.tensor([[True, False]]), dtype=dtype)
    assert found.dtype == dtype
    assert found.tolist() == [[0.0, torch.finfo(dtype).min]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("is_causal", [None, False, True])
@pytest.mark.parametrize("use", ["none", "draft", "stock"])
def test_left_padded_rows_equal_their_single_runs(attention, is_causal, use):
    """A batch of two prompts of different length, left-padded with garbage features, over three rounds."""
    model = random_drafter(is_causal=is_causal)
    model.set_attn_implementation(attention)
    block, lengths, pads = 4, (9, 14), (5, 0)
    singles = [
        [block_inputs(model, context=n, seed=10 * row + i) for i, n in enumerate((lengths[row], 2, 1))]
        for row in (0, 1)
    ]

    def caches():
        if use == "draft":
            return model.new_cache()
        if use == "stock":
            cache = DFlashCache(config=model.config)
            cache.activate_past_recording()
            return cache
        return None

    held, single_held = caches(), [caches(), caches()]
    seen = 0
    for index in range(3 if use != "none" else 1):
        features = [singles[row][index][1] for row in (0, 1)]
        if index == 0:
            garbage = 50 * torch.ones(1, pads[0], features[0].shape[-1])
            features[0] = torch.cat([garbage, features[0]], dim=1)
        batch_features = torch.cat(features)
        noise = torch.cat([singles[row][index][0] for row in (0, 1)])
        new = batch_features.shape[1]
        total = seen + new + block
        mask = torch.ones(2, total, dtype=torch.long)
        mask[0, : pads[0]] = 0
        positions = torch.stack([(torch.arange(seen, total) - pad).clamp(min=0) for pad in pads])
        for cache in (held, *single_held):
            if use == "stock":
                cache.set_previous_accepted_tokens(new)
                if index > 0:
                    cache.crop(-block)
        with torch.no_grad():
            output = model(noise, batch_features, positions, attention_mask=mask, cache=held).last_hidden_state
            for row in (0, 1):
                start = pads[row] if index == 0 else 0
                alone = model(
                    noise[row : row + 1],
                    batch_features[row : row + 1, start:],
                    positions[row : row + 1, start:],
                    cache=single_held[row],
                ).last_hidden_state
                assert torch.allclose(output[row : row + 1], alone, atol=2e-5, rtol=0)
        seen += new
        if use == "draft":
            held.crop(seen)
            for row in (0, 1):
                single_held[row].crop(seen - pads[row])


def test_a_padding_mask_matters():
    """The test above would pass if padding were ignored and its rows harmless; they are not."""
    model = random_drafter()
    noise, features = block_inputs(model, context=9)
    mask = torch.ones(1, 13, dtype=torch.long)
    mask[:, :5] = 0
    with torch.no_grad():
        difference = (
            model(noise, features).last_hidden_state - model(noise, features, attention_mask=mask).last_hidden_state
        )
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_forms_of_a_4d_mask_agree(attention):
    """Boolean, additive and by layer type; a boolean mask is not added to the scores as the number 1."""
    model = random_drafter()
    model.set_attn_implementation(attention)
    noise, features = block_inputs(model, context=9)
    arguments = dict(block_length=4, num_keys=13, padding_mask=None, device=torch.device("cpu"))
    sliding = block_visibility(is_causal=True, sliding_window=6, **arguments)
    full = torch.ones(1, 1, 4, 13, dtype=torch.bool)
    with torch.no_grad():
        expected = model(noise, features).last_hidden_state
        by_type = {"sliding_attention": sliding, "full_attention": full}
        additive = {key: to_additive(value, dtype=torch.float32) for key, value in by_type.items()}
        none_for_full = {"sliding_attention": sliding, "full_attention": None}
        for mask in (by_type, additive, none_for_full):
            assert torch.allclose(model(noise, features, attention_mask=mask).last_hidden_state, expected, atol=2e-6)
        # One mask for all layers, in both forms, and told apart from the numbers 0 and 1.
        boolean = model(noise, features, attention_mask=sliding).last_hidden_state
        added = model(noise, features, attention_mask=to_additive(sliding, dtype=torch.float32)).last_hidden_state
        as_numbers = model(noise, features, attention_mask=sliding.float()).last_hidden_state
    assert torch.allclose(boolean, added, atol=2e-6)
    assert (boolean - as_numbers).abs().max() > 1e-2
    assert (boolean - expected).abs().max() > 1e-2


def test_sdpa_and_eager_agree_on_a_random_mask():
    """Two independent attention kernels, one boolean mask with a visible key in every row."""
    model = random_drafter()
    noise, features = block_inputs(model, context=9, batch=2)
    mask = torch.rand(2, 1, 4, 13, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[..., -1] = True
    outputs = []
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            outputs.append(model(noise, features, attention_mask=mask).last_hidden_state)
    assert torch.allclose(*outputs, atol=2e-5)


def test_a_4d_mask_is_valid_with_the_cache_of_transformers():
    """The docstring's shape, cached + n + B columns, also where a sliding layer of that cache has dropped rows."""
    model = random_drafter()
    caches = [DFlashCache(config=model.config) for _ in range(2)]
    seen = 0
    for new in (12, 3):
        noise, features = block_inputs(model, context=new, seed=new)
        total = seen + new + 4
        arguments = dict(block_length=4, num_keys=total, padding_mask=None, device=torch.device("cpu"))
        masks = {
            "sliding_attention": block_visibility(is_causal=True, sliding_window=6, **arguments),
            "full_attention": torch.ones(1, 1, 4, total, dtype=torch.bool),
        }
        outputs = []
        for cache, mask in zip(caches, (None, masks)):
            cache.activate_past_recording()
            cache.set_previous_accepted_tokens(new)
            if seen:
                cache.crop(-4)
            with torch.no_grad():
                outputs.append(model(noise, features, attention_mask=mask, cache=cache).last_hidden_state)
        seen += new
        assert torch.allclose(*outputs, atol=2e-6)


def test_flash_attention_refuses_a_4d_mask_with_words():
    """Flash kernels take 2-D padding only; a dense mask must not be dropped without a word."""
    model = random_drafter()
    noise, _ = block_inputs(model)
    layer = model.layers[0].self_attn
    for mask in (torch.ones(1, 1, 4, 13, dtype=torch.bool), {"sliding_attention": torch.zeros(1, 1, 4, 13)}):
        masks = BlockMasks(mask, block=noise, total_length=13, implementation="flash_attention_2")
        with pytest.raises(DFlashError, match="flash_attention_2.*4-D mask.*sdpa"):
            masks.of_layer(layer, num_keys=13)


def test_flash_attention_gets_the_padding_mask_alone():
    """Causality and window travel as arguments; no mask stays no mask."""
    model = random_drafter()
    noise, _ = block_inputs(model)
    padding = torch.ones(1, 13, dtype=torch.long)
    given = BlockMasks(padding, block=noise, total_length=13, implementation="flash_attention_2")
    assert torch.equal(given.of_layer(model.layers[0].self_attn, num_keys=13), padding)
    none = BlockMasks(None, block=noise, total_length=13, implementation="flash_attention_2")
    assert none.of_layer(model.layers[0].self_attn, num_keys=13) is None


def test_flash_attention_gets_the_padding_of_the_keys_that_are_left():
    """A sliding layer of transformers' cache drops old rows; the padding mask must drop the same columns."""
    model = random_drafter()
    noise, _ = block_inputs(model)
    padding = torch.tensor([[0] * 6 + [1] * 14])
    masks = BlockMasks(padding, block=noise, total_length=20, implementation="flash_attention_2")
    assert masks.of_layer(model.layers[0].self_attn, num_keys=10).tolist() == padding[:, 10:].tolist()


def test_masks_are_built_once_for_the_layers_that_share_one():
    """Two sliding layers, one mask object."""
    model = random_drafter()
    noise, _ = block_inputs(model)
    masks = BlockMasks(None, block=noise, total_length=13, implementation="sdpa")
    first, second = (masks.of_layer(model.layers[i].self_attn, num_keys=13) for i in (0, 1))
    assert first is second
    assert masks.of_layer(model.layers[2].self_attn, num_keys=13) is None


# Context, cache, dtypes


@pytest.mark.parametrize("chunks", [(9,), (4, 5), (1, 1, 7), (0, 9)])
def test_append_context_then_forward(chunks):
    """Chunked prefill: features taken in without a block give the block what the whole context at once gives it."""
    model = random_drafter()
    noise, features = block_inputs(model, context=9, batch=2)
    cache, start = model.new_cache(), 0
    with torch.no_grad():
        for size in chunks:
            positions = torch.arange(start, start + size)[None]
            model.append_context(features[:, start : start + size], position_ids=positions, cache=cache)
            start += size
        assert [cache.get_seq_length(i) for i in range(3)] == [9, 9, 9]
        appended = model(noise, features[:, :0], cache=cache).last_hidden_state
        at_once = model(noise, features).last_hidden_state
    assert torch.allclose(appended, at_once, atol=2e-6)


def test_an_empty_context_is_a_context():
    """n may be 0: the block attends to itself."""
    model = random_drafter()
    noise, features = block_inputs(model)
    with torch.no_grad():
        output = model(noise, features[:, :0]).last_hidden_state
    assert output.shape == noise.shape
    assert output.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_inputs_of_another_dtype_are_cast(dtype):
    """A bf16 target with an fp32 drafter, and the other way round."""
    model = random_drafter()
    noise, features = block_inputs(model)
    with torch.no_grad():
        output = model(noise.to(dtype), features.to(dtype)).last_hidden_state
        expected = model(noise.to(dtype).float(), features.to(dtype).float()).last_hidden_state
    assert output.dtype == torch.float32
    assert torch.equal(output, expected)


def test_autocast_keeps_fp32_parameters_and_their_gradients():
    """Training: parameters in fp32 with bf16 autocast."""
    model = random_drafter().train()
    noise, features = block_inputs(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(noise, features).last_hidden_state
    output.float().pow(2).sum().backward()
    with torch.no_grad():
        expected = model(noise, features).last_hidden_state
    assert (output - expected).abs().max() < 0.2
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_target_hidden_size_may_differ():
    """fc maps K * H_t to H."""
    model = random_drafter(target_hidden_size=10)
    assert model.fc.weight.shape == (24, 20)
    noise, features = block_inputs(model)
    assert model(noise, features).last_hidden_state.shape == (1, 4, 24)


def test_the_parameters_are_z_labs():
    """11 tensors a layer and 3 more, no embedding, no head."""
    model = random_drafter(num_hidden_layers=3)
    assert len(model.state_dict()) == 11 * 3 + 3
    assert not any("embed" in name or "lm_head" in name for name in model.state_dict())


def test_the_model_checks_its_config_again():
    """A field assigned after the config was built is caught when the model is."""
    config = random_drafter().config
    config.block_size = 1
    with pytest.raises(DFlashConfigError, match="block_size is 1"):
        DFlashDraftModel(config)


# Training


@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": True}, None])
@pytest.mark.parametrize("noise_requires_grad", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(options, noise_requires_grad):
    """Recomputed activations, equal gradients in every parameter; and layers are really run again."""
    gradients = {}
    for checkpointing in (False, True):
        model = random_drafter().train()
        calls = []
        model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        if checkpointing:
            model.gradient_checkpointing_enable(options)
        noise, features = block_inputs(model, batch=2)
        noise.requires_grad_(noise_requires_grad)
        weights = torch.linspace(-1, 1, noise.numel()).view(noise.shape)
        (model(noise, features).last_hidden_state * weights).sum().backward()
        gradients[checkpointing] = {name: p.grad for name, p in model.named_parameters()}
        assert len(calls) == (2 if checkpointing else 1)
    for name, gradient in gradients[False].items():
        assert gradient is not None and gradient.abs().max() > 0, name
        assert torch.allclose(gradients[True][name], gradient, atol=1e-5, rtol=1e-5), name


def test_the_loss_of_a_block_depends_on_every_parameter():
    """No dead parameter: an unused one would break distributed training."""
    model = random_drafter().train()
    noise, features = block_inputs(model)
    model(noise, features).last_hidden_state.pow(3).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0] == []


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_new_drafter_runs_behind_its_target(family):
    """from_target's shapes fit the target's features and embeddings."""
    target = tiny_target(family, layers=6)
    model = tiny_drafter(target)
    ids = torch.arange(10)[None]
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in model.config.target_layer_ids], dim=-1)
    noise = embed_tokens(target, torch.full((1, 8), 3), scale=model.config.input_embedding_scale)
    assert model(noise, features).last_hidden_state.shape == (1, 8, 32)
