"""The faults of transformers' own assisted generation, one test each: what a user does, and what must happen.

A19, target and drafter on different devices, is in test_devices.py.
"""

import pytest
import torch
from accelerate import cpu_offload
from fuzz_cases import words
from fuzz_targets import build_target, image_inputs
from generation_helpers import CACHE_NAME, cache_of, drafter_for, needs_static_rollback, prompt, small_target
from knowing_drafter import padded_batch, same_as_plain
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

from dflash_hf.errors import DFlashConfigError, TargetMismatchError, UnsupportedGenerationError
from dflash_hf.target import OutputHead

NEW = 20
RECURRENT = [
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe", "mamba2", "falcon_h1", "bamba",
    "granitemoehybrid",
]  # fmt: skip


@pytest.fixture(scope="module")
def target():
    """A tiny Llama; nothing here changes it."""
    return small_target()


def asked(target, drafter, **options):
    return target.generate(prompt(6), assistant_model=drafter, **{"max_new_tokens": 4, **options})


def test_a01_batch(target):
    """Prompts of different length, left-padded: every row as in its own single run."""
    inputs = padded_batch([9, 4, 1, 7])
    for seed in range(4):  # other rows are ahead
        text, drafter = same_as_plain(target, inputs, seed=seed, make_options=lambda: {"max_new_tokens": NEW})
    for row, mask, said in zip(inputs["input_ids"], inputs["attention_mask"], text):
        alone = target.generate(row[mask.bool()][None], max_new_tokens=NEW, do_sample=False)
        assert said[-NEW:].tolist() == alone[0, -NEW:].tolist()
    assert drafter.last_generation_stats.rounds < NEW - 1


def test_a02_num_return_sequences(target):
    """Sampled sequences of one prompt differ; where only one token is possible they are the greedy ones."""
    drafter = drafter_for(target)
    inputs = padded_batch([6, 3])
    options = {"assistant_model": drafter, "do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12}
    greedy = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert target.generate(**inputs, **options, top_k=1).tolist() == greedy.repeat_interleave(3, dim=0).tolist()
    torch.manual_seed(0)
    output = target.generate(**inputs, **options)
    assert output[:, :6].tolist() == inputs["input_ids"].repeat_interleave(3, dim=0).tolist()
    assert len(set(map(tuple, output.tolist()))) == 6


def test_a03_stop_strings(target):
    """A string that completes inside an accepted block ends the text there."""
    plain = target.generate(prompt(6), do_sample=False, max_new_tokens=NEW)[0, 6:].tolist()
    for place in (4, 5, 9):
        string = f"w{plain[place]} w{plain[place + 1]}"
        options = {"max_new_tokens": NEW, "stop_strings": [string], "tokenizer": words()}
        text, _ = same_as_plain(target, {"input_ids": prompt(6)}, right=1.0, make_options=lambda o=options: o)
        assert text.shape[1] <= 6 + place + 2


class Watching(StoppingCriteria):
    """Keeps the prefixes that it was asked about; stops at the twelfth."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores, **kwargs):
        self.prefixes.append(input_ids.tolist())
        return torch.full((len(input_ids),), len(self.prefixes) == 12)


def test_a04_stopping_criteria(target):
    """Asked about every accepted prefix, in order, and obeyed at once."""
    asked_about = []

    def options():
        asked_about.append(Watching())
        return {"max_new_tokens": NEW, "stopping_criteria": StoppingCriteriaList([asked_about[-1]])}

    text, _ = same_as_plain(target, {"input_ids": prompt(6)}, right=1.0, make_options=options)
    assert text.shape[1] == 6 + 12
    assert asked_about[0].prefixes == asked_about[1].prefixes


@needs_static_rollback
def test_a05_static_cache(target):
    """Every length, also where a whole block would not fit any more."""
    for new in range(2, 20):
        options = {"max_new_tokens": new, "cache_implementation": "static"}
        same_as_plain(target, {"input_ids": prompt(6)}, make_options=lambda o=options: o)
    same_as_plain(target, padded_batch([5, 2, 7]), make_options=lambda: options)


def test_a06_learned_positions():
    """Up to the last row of GPT-2's table."""
    gpt2 = build_target("gpt2")
    for inputs in ({"input_ids": prompt(60)}, padded_batch([60, 50, 57])):
        for right in (0.0, 1.0):
            text, _ = same_as_plain(gpt2, inputs, right=right, make_options=lambda: {"max_length": 80})
            assert text.shape[1] == 80


def earlier_turn(target, inputs: dict, **options):
    """Output and cache of a first turn, and the ids and mask of a second one."""
    turn = target.generate(**inputs, do_sample=False, max_new_tokens=7, return_dict_in_generate=True, **options)
    new = torch.randint(4, 90, (len(turn.sequences), 5), generator=torch.Generator().manual_seed(9))
    ids = torch.cat([turn.sequences, new], dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 12), value=1)
    return turn, ids, mask


@pytest.mark.parametrize("lengths", [[6], [9, 4, 6]])
def test_a07_cache_of_an_earlier_turn_with_all_ids(lengths, target):
    """The cached part of the prompt is not run again."""
    inputs = padded_batch(lengths)
    turn, ids, mask = earlier_turn(target, inputs)
    expected = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    again, _, _ = earlier_turn(target, inputs)
    ran = []
    handle = target.get_input_embeddings().register_forward_hook(lambda _, inputs, __: ran.append(inputs[0].shape[1]))
    drafter = drafter_for(target)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW, CACHE_NAME: cache_of(again)}
    try:
        output = target.generate(ids, assistant_model=drafter, **options)
    finally:
        handle.remove()
    assert output.tolist() == expected.tolist()
    assert max(ran) < ids.shape[1], "the whole prompt was run on top of the cache"


@pytest.mark.parametrize("lengths", [[6], [9, 4, 6]])
@pytest.mark.parametrize("all_ids", [True, False])
def test_a08_the_drafter_sees_the_earlier_turn(all_ids, lengths, target):
    """Context of the first turn is kept for the second: as many rows as the target's cache has, real ones only."""
    drafter = drafter_for(target)
    turn, ids, mask = earlier_turn(target, padded_batch(lengths), assistant_model=drafter)
    expected = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    seen = []

    def look(module, args, kwargs):
        seen.append(kwargs["cache"].get_seq_length() + args[1].shape[1])

    handle = drafter.register_forward_pre_hook(look, with_kwargs=True)
    given = ids if all_ids else ids[:, -6:]
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW, CACHE_NAME: cache_of(turn)}
    try:
        output = target.generate(given, assistant_model=drafter, **options)
    finally:
        handle.remove()
    assert output[:, -NEW:].tolist() == expected[:, -NEW:].tolist()
    assert seen[0] >= max(lengths) + 12


def test_a09_output_hidden_states(target):
    """The same entries and shapes as plain generate, in one row and in a batch."""
    for inputs in ({"input_ids": prompt(6)}, padded_batch([6, 3])):
        options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_hidden_states": True}
        expected = target.generate(**inputs, **options, do_sample=False).hidden_states
        output = target.generate(**inputs, **options, do_sample=False, assistant_model=drafter_for(target))
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        assert len(output.hidden_states) == NEW
        for step, (ours, theirs) in enumerate(zip(output.hidden_states, expected)):
            for mine, plain in zip(ours, theirs):
                assert mine.shape == plain.shape
                rows = real if step == 0 else slice(None)
                torch.testing.assert_close(mine[rows], plain[rows], atol=1e-4, rtol=1e-4)


def test_a10_inputs_embeds(target):
    """Embeddings for a prompt, without ids."""
    inputs = padded_batch([6, 3])
    embeds = target.get_input_embeddings()(inputs.pop("input_ids")).detach()
    options = {"max_new_tokens": NEW}
    text, drafter = same_as_plain(target, {**inputs, "inputs_embeds": embeds}, make_options=lambda: options)
    assert text.shape == (2, NEW) and drafter.last_generation_stats.acceptance_length > 2
    same_as_plain(target, {"inputs_embeds": embeds[:1]}, make_options=lambda: options)


def test_a11_guidance_scale(target):
    """Classifier-free guidance, whose processor runs the target itself and keeps a cache."""
    for inputs in ({"input_ids": prompt(6)}, padded_batch([6, 3])):
        for negative in ({}, {"negative_prompt_ids": torch.tensor([[9, 8, 7]])}):
            options = {"max_new_tokens": NEW, "do_sample": False, "guidance_scale": 1.5}
            if negative:
                options["negative_prompt_ids"] = negative["negative_prompt_ids"].expand(len(inputs["input_ids"]), -1)
            expected = target.generate(**inputs, **options)
            output = target.generate(**inputs, **options, assistant_model=drafter_for(target))
            assert output.tolist() == expected.tolist()


class Counting(LogitsProcessor):
    """Keeps state; what it does depends on how often it was called."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids.tolist())
        return scores.roll(len(self.prefixes) % 3, dims=-1)


@pytest.mark.parametrize("lengths", [[6], [6, 2, 4]])
def test_a12_stateful_processor(lengths, target):
    """Called with the very prefixes of plain generate, in their order."""
    counting = []

    def options():
        counting.append(Counting())
        return {"max_new_tokens": NEW, "logits_processor": LogitsProcessorList([counting[-1]])}

    same_as_plain(target, padded_batch(lengths), make_options=options)
    assert counting[0].prefixes == counting[1].prefixes


class Argmaxes(TorchDispatchMode):
    """Counts choices of a token."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += "argmax" in str(function)
        return function(*args, **(kwargs or {}))


def test_a13_no_loop_over_the_slots(target):
    """Without processors one draft and one verification choose all tokens of a round at once."""
    drafter = drafter_for(target, block_size=16)
    with Argmaxes() as counted:
        asked(target, drafter, max_new_tokens=NEW)
    stats = drafter.last_generation_stats
    assert max(stats.proposed) == 15
    assert counted.calls <= 2 * stats.rounds + 1


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("lengths", [[7], [9, 4, 1]])
def test_a14_recurrent_state(name, lengths):
    """Rejected proposals leave no trace in a recurrent state."""
    target = build_target(name)
    for right in (0.0, 0.7, 1.0):
        _, drafter = same_as_plain(
            target, padded_batch(lengths), right=right, make_options=lambda: {"max_new_tokens": NEW}
        )
        if right == 1.0:
            assert drafter.last_generation_stats.acceptance_length > 4


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a15_mrope(name, image):
    """Positions of three kinds, for text alone and with images of different size in a batch."""
    target = build_target(name)
    for lengths in ([7], [9, 4, 1]):
        inputs = padded_batch(lengths)
        if image:
            inputs = image_inputs(name, inputs["input_ids"], inputs["attention_mask"], seed=3)
        for right in (0.0, 0.8):
            same_as_plain(target, inputs, right=right, make_options=lambda: {"max_new_tokens": NEW})


def test_a16_target_without_position_ids():
    """BLOOM derives its ALiBi positions from the mask."""
    for inputs in ({"input_ids": prompt(6)}, padded_batch([6]), padded_batch([8, 3, 6])):
        same_as_plain(build_target("bloom"), inputs, make_options=lambda: {"max_new_tokens": NEW})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a17_dtypes(dtype, target):
    """A drafter in another dtype than the target."""
    drafter = drafter_for(target).to(dtype)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 1}):
        expected = target.generate(prompt(6), do_sample=False, max_new_tokens=NEW)
        assert asked(target, drafter, max_new_tokens=NEW, **options).tolist() == expected.tolist()


def test_a18_offloaded_target():
    """Weights on the meta device between calls."""
    target = small_target()
    inputs = padded_batch([6, 3])
    expected = target.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    cpu_offload(target, execution_device=torch.device("cpu"))
    assert target.get_input_embeddings().weight.is_meta and target.get_output_embeddings().weight.is_meta
    output = target.generate(**inputs, do_sample=False, max_new_tokens=NEW, assistant_model=drafter_for(target))
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("num_assistant_tokens", 2),
        ("num_assistant_tokens_schedule", "heuristic"),
        ("assistant_confidence_threshold", 0.999),
    ],
)
def test_a20_length_of_a_draft(knob, value, target):
    """The drafter's own settings decide how much is verified, never what is said."""
    drafter = drafter_for(target)
    setattr(drafter.generation_config, knob, value)
    expected = target.generate(prompt(6), do_sample=False, max_new_tokens=NEW)
    assert asked(target, drafter, max_new_tokens=NEW).tolist() == expected.tolist()
    assert max(drafter.last_generation_stats.proposed[2:6]) < 7, "without it seven are proposed until the last rounds"


def test_a21_beam_search(target):
    """Refused, not ignored."""
    with pytest.raises(UnsupportedGenerationError, match="num_beams=2.*Set num_beams=1"):
        asked(target, drafter_for(target), num_beams=2)


def test_a22_what_does_not_fit_is_named(target):
    """Wrong hidden size, tap, mask id and block size."""
    wider = small_target(hidden=48)
    with pytest.raises(TargetMismatchError, match="width 48.*hidden size 32"):
        asked(target, drafter_for(wider))
    with pytest.raises(TargetMismatchError, match="layer 5.*4 layers"):
        asked(target, drafter_for(small_target(layers=6), target_layer_ids=[5]))
    with pytest.raises(TargetMismatchError, match="mask_token_id 110.*97 rows"):
        asked(target, drafter_for(small_target(vocab=120), mask_token_id=110))
    with pytest.raises(DFlashConfigError, match="block_size is 1.*at least 2"):
        drafter_for(target, block_size=1)


def test_a23_statistics(target):
    """On the drafter after each call."""
    _, drafter = same_as_plain(target, {"input_ids": prompt(6)}, make_options=lambda: {"max_new_tokens": NEW})
    stats = drafter.last_generation_stats
    assert stats.new_tokens == NEW == sum(stats.produced) + 1
    assert stats.acceptance_length == sum(stats.produced) / stats.rounds > 2
    asked(target, drafter, max_new_tokens=3)
    assert drafter.last_generation_stats.new_tokens == 3


@pytest.mark.parametrize("rows", [90, 128])
def test_a24_padded_vocabulary(rows, target):
    """Fewer or more rows in the target's embedding than the drafter's config says."""
    drafter = drafter_for(small_target(vocab=rows))
    expected = target.generate(prompt(6), do_sample=False, max_new_tokens=NEW)
    assert asked(target, drafter, max_new_tokens=NEW).tolist() == expected.tolist()


@pytest.mark.parametrize(("setting", "factor"), [(None, 32**0.5), (1.0, 1.0), (2.0, 2.0)])
def test_a25_embedding_scale(setting, factor):
    """Gemma's embedding multiplies by sqrt(hidden); whether a drafter wants that is its own setting."""
    target = build_target("gemma")
    drafter = drafter_for(target)
    drafter.config.input_embedding_scale = setting
    seen = []
    handle = drafter.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    asked(target, drafter, max_new_tokens=9)
    handle.remove()
    row = target.get_input_embeddings().weight[drafter.config.mask_token_id].detach()
    torch.testing.assert_close(seen[0][0, 1], row * factor)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "vaultgemma", "gemma3n_text", "cohere2"])
def test_a26_logit_transform(name):
    """Draft logits go through the target's own softcap or scale."""
    target = build_target(name)
    config = drafter_for(target).config
    states = []
    handle = target.get_output_embeddings().register_forward_pre_hook(lambda module, args: states.append(args[0]))
    with torch.no_grad():
        logits = target(prompt(6)).logits
        handle.remove()
        torch.testing.assert_close(OutputHead(target, config)(states[0]), logits)
        assert not torch.allclose(target.get_output_embeddings()(states[0]), logits), "nothing to transform"


def test_a27_clear_errors(target):
    """A target without a cache, and one that is no decoder."""
    drafter = drafter_for(target)
    with pytest.raises(UnsupportedGenerationError, match="use_cache=False.*Set use_cache=True"):
        asked(target, drafter, use_cache=False)
    torch.manual_seed(0)
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    with pytest.raises(UnsupportedGenerationError, match="T5ForConditionalGeneration is an encoder-decoder"):
        asked(T5ForConditionalGeneration(config).eval(), drafter)
    config = AutoConfig.for_model("openai-gpt", vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=64)
    gpt = AutoModelForCausalLM.from_config(config).eval()  # it has no cache, whatever a call says
    with pytest.raises(UnsupportedGenerationError, match="key-value cache"):
        asked(gpt, drafter_for(gpt))
