"""How generate and the drafter find each other: the gate, wrappers, hooks, threads, and what importing does."""

import copy
import subprocess
import sys
import threading

import pytest
import torch
from conftest import in_whole_blocks, tiny_drafter, tiny_target
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModel, GenerationMixin, LogitsProcessor, LogitsProcessorList

import dflash_hf
from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.generation import decoding, integration

METHODS = ("_assisted_decoding", "_validate_generation_mode")


def small_target(**more):
    """A random target of four layers."""
    return tiny_target(**{"layers": 4, **more})


@pytest.fixture
def target():
    """A tiny Llama."""
    return small_target()


def random_drafter(target, **more):
    return in_whole_blocks(tiny_drafter(target, **{"target_layer_ids": [0, 2], **more}))


@pytest.fixture
def drafter(target):
    """A random drafter for the tiny Llama."""
    return random_drafter(target)


@pytest.fixture
def installed():
    """Whatever a test does, the drafter is installed afterwards."""
    yield
    dflash_hf.install()


def prompt(length: int = 6, seed: int = 0, vocab: int = 97) -> torch.LongTensor:
    return torch.randint(4, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


def plain(target, ids, **options):
    return target.generate(ids, **{"do_sample": False, "max_new_tokens": 20, **options})


def assisted(target, drafter, ids, **options):
    return plain(target, ids, assistant_model=drafter, **options)


def methods() -> list:
    return [vars(GenerationMixin)[name] for name in METHODS]


def hook_count(target) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())


# Installing.


def test_install_is_idempotent(installed):
    """Doing it again keeps the very same functions."""
    before = methods()
    dflash_hf.install()
    dflash_hf.install()
    assert all(now is then for now, then in zip(methods(), before))
    assert all(hasattr(method, "_dflash_original") for method in before)
    assert not any(hasattr(method._dflash_original, "_dflash_original") for method in before)


def test_uninstall_gives_the_originals_back(target, drafter, installed):
    """The exact functions; ours are gone; installing again works."""
    originals = [method._dflash_original for method in methods()]
    dflash_hf.uninstall()
    assert all(now is original for now, original in zip(methods(), originals))
    assert all(method.__module__ == "transformers.generation.utils" for method in methods())
    dflash_hf.uninstall()  # again: nothing to do
    assert all(now is original for now, original in zip(methods(), originals))
    with pytest.raises(dflash_hf.DFlashError, match=r"Call dflash_hf\.install\(\) first"):
        assisted(target, drafter, prompt())
    dflash_hf.install()
    assert [method._dflash_original for method in methods()] == originals
    assert assisted(target, drafter, prompt()).tolist() == plain(target, prompt()).tolist()


def test_wrappers_keep_name_and_signature():
    """generate reads the signature of the method that it is about to call."""
    import inspect

    for method in methods():
        assert method.__name__ == method._dflash_original.__name__
        assert inspect.signature(method) == inspect.signature(method._dflash_original)


def test_auto_classes():
    """A drafter is found by its model type."""
    assert AutoConfig.for_model("dflash", mask_token_id=3, target_layer_ids=[0]).__class__ is DFlashConfig
    config = DFlashConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, mask_token_id=3, target_layer_ids=[0],
    )  # fmt: skip
    assert type(AutoModel.from_config(config)) is DFlashDraftModel


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}, {"num_beams": 2}])
def test_ordinary_assistants_are_unaffected(options, target, installed, monkeypatch):
    """A small causal language model as assistant: the same with and without us, and our loop stays out."""
    assistant = small_target(seed=5, layers=1)
    monkeypatch.setattr(decoding.DFlashDecoding, "run", lambda self: pytest.fail("our loop ran"))
    outputs = []
    for change in (dflash_hf.install, dflash_hf.uninstall):
        change()
        torch.manual_seed(0)
        outputs.append(assisted(target, assistant, prompt(), **options).tolist())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 2}])
def test_calls_without_an_assistant_are_unaffected(options, target, installed):
    """Also batches, which the drafter refuses."""
    ids = torch.cat([prompt(), prompt(seed=1)]) if "prompt_lookup_num_tokens" not in options else prompt()
    outputs = []
    for change in (dflash_hf.install, dflash_hf.uninstall):
        change()
        torch.manual_seed(0)
        outputs.append(plain(target, ids, **options).tolist())
    assert outputs[0] == outputs[1]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_is_light():
    """Neither torch nor transformers is imported by the package alone."""
    code = (
        "import sys, dflash_hf; dir(dflash_hf); dflash_hf.__version__; dflash_hf.DFlashError\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'datasets', 'peft', 'accelerate'} & set(sys.modules)))"
    )
    assert run_python(code).strip() == "[]"


def test_importing_changes_nothing_and_using_installs():
    """The first use of a public name registers; before it transformers is as it was."""
    code = """
from transformers import AutoConfig, GenerationMixin
names = ("_assisted_decoding", "_validate_generation_mode")
before = [vars(GenerationMixin)[name] for name in names]
import dflash_hf
same = lambda: all(vars(GenerationMixin)[name] is method for name, method in zip(names, before))
print(same())
dflash_hf.DFlashConfig
print(same(), [vars(GenerationMixin)[name]._dflash_original is method for name, method in zip(names, before)])
dflash_hf.uninstall()
print(same())
"""
    assert run_python(code).split("\n")[:3] == ["True", "False [True, True]", "True"]


def test_unknown_names():
    """As for any module."""
    with pytest.raises(AttributeError, match="no attribute 'DFlashNothing'"):
        _ = dflash_hf.DFlashNothing
    assert set(dir(dflash_hf)) == set(dflash_hf.__all__)


# Wrapped models.


def lora(model, **more):
    """Random LoRA weights, so that the adapter changes what the model says."""
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False, **more))


def test_peft_drafter(trained_pair):
    """The gate looks through it, and its adapter is at work: the drafter proposes otherwise."""
    target, drafter = trained_pair
    ids = prompt(8, vocab=120)
    expected = plain(target, ids, max_new_tokens=60, eos_token_id=None)
    assisted(target, drafter, ids, max_new_tokens=60, eos_token_id=None)
    bare = drafter.last_generation_stats.acceptance_lengths
    wrapped = lora(copy.deepcopy(drafter))
    assert integration.as_drafter(wrapped) is wrapped.get_base_model()
    output = assisted(target, wrapped, ids, max_new_tokens=60, eos_token_id=None)
    assert output.tolist() == expected.tolist()
    assert wrapped.last_generation_stats.new_tokens == 60
    assert wrapped.last_generation_stats.acceptance_lengths != bare


def test_peft_target(target, monkeypatch):
    """Hooks see the adapter's effect on the tapped layers, since they sit on the same modules."""
    drafter = random_drafter(target)
    base = plain(target, prompt())
    wrapped = lora(target, task_type="CAUSAL_LM")
    expected = wrapped.generate(input_ids=prompt(), do_sample=False, max_new_tokens=20)
    assert expected.tolist() != base.tolist()
    output = wrapped.generate(input_ids=prompt(), do_sample=False, max_new_tokens=20, assistant_model=drafter)
    assert output.tolist() == expected.tolist()
    assert drafter.last_generation_stats.new_tokens == 20
    with wrapped.disable_adapter():
        output = wrapped.generate(input_ids=prompt(), do_sample=False, max_new_tokens=20, assistant_model=drafter)
    assert output.tolist() == base.tolist()


WRAPPERS = {
    "compile": torch.compile,
    "data_parallel": nn.DataParallel,
    "compile_data_parallel": lambda model: torch.compile(nn.DataParallel(model)),
    "compile_peft": lambda model: torch.compile(lora(model)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_drafter_passes_the_gate(wrap, target, drafter):
    """generate gets to our loop and reads the drafter inside."""
    wrapped = wrap(drafter)
    assert isinstance(integration.as_drafter(wrapped), DFlashDraftModel)
    output = assisted(target, wrapped, prompt())
    assert output.tolist() == plain(target, prompt()).tolist()
    assert integration.as_drafter(wrapped).last_generation_stats.new_tokens == 20


@pytest.mark.parametrize("other", [None, 3, "model", nn.Linear(2, 2), nn.ModuleList()])
def test_the_gate_stays_shut(other):
    """Anything that is no drafter."""
    assert integration.as_drafter(other) is None


def test_the_gate_stays_shut_for_language_models(target):
    """Wrapped or not."""
    assert integration.as_drafter(target) is None
    assert integration.as_drafter(torch.compile(target)) is None
    assert integration.as_drafter(lora(target, task_type="CAUSAL_LM")) is None


def test_copied_and_reloaded_drafters(target, drafter, tmp_path):
    """Copies work like the original, and AutoModel loads what was saved."""
    drafter.save_pretrained(tmp_path)
    for other in (copy.deepcopy(drafter), DFlashDraftModel.from_pretrained(tmp_path)):
        assert assisted(target, other, prompt()).tolist() == plain(target, prompt()).tolist()
        assert other.last_generation_stats.new_tokens == 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_drafter_of_another_dtype(dtype, trained_pair):
    """Features and embeddings are cast to the drafter's dtype, its output to the head's."""
    target, drafter = trained_pair
    cast = copy.deepcopy(drafter).to(dtype)
    ids = prompt(8, vocab=120)
    output = assisted(target, cast, ids, max_new_tokens=50, eos_token_id=None)
    assert output.tolist() == plain(target, ids, max_new_tokens=50, eos_token_id=None).tolist()
    assert cast.last_generation_stats.acceptance_length > 2
    assert cast.norm.weight.dtype == dtype


def test_bf16_pair_runs(trained_pair):
    """Both in bf16; near ties may flip there, so only the shape is sure."""
    target, drafter = (copy.deepcopy(model).to(torch.bfloat16) for model in trained_pair)
    output = assisted(target, drafter, prompt(8, vocab=120), max_new_tokens=30, eos_token_id=None)
    assert output.shape[1] == 38
    assert drafter.last_generation_stats.acceptance_length > 2


def test_generation_under_autocast(trained_pair):
    """Autocast around the call."""
    target, drafter = trained_pair
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = assisted(target, drafter, prompt(8, vocab=120), max_new_tokens=30, eos_token_id=None)
    assert output.shape[1] == 38


def test_training_mode_of_the_drafter_is_restored(target):
    """Dropout is off while it drafts, and the mode comes back, also after an error."""
    drafter = random_drafter(target).train()
    drafter.config.attention_dropout = 0.5
    modes = []
    handle = drafter.register_forward_hook(lambda module, *_: modes.append(module.training))
    assisted(target, drafter, prompt())
    handle.remove()
    assert modes and not any(modes)
    assert drafter.training and drafter.layers[0].training
    with pytest.raises(RuntimeError, match="stop here"):
        assisted(target, drafter, prompt(), logits_processor=LogitsProcessorList([Raising(5)]))
    assert drafter.training


# Hooks.


class Raising(LogitsProcessor):
    """Raises at its n-th call."""

    def __init__(self, calls: int):
        self.left = calls

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("stop here")
        return scores


def test_hooks_are_there_during_the_call_and_gone_after_it(target, drafter):
    """The user's own hooks stay."""
    mine = target.register_forward_hook(lambda *_: None)
    during = []

    class Watch(LogitsProcessor):
        def __call__(self, input_ids, scores):
            during.append(hook_count(target))
            return scores

    assisted(target, drafter, prompt(), logits_processor=LogitsProcessorList([Watch()]))
    assert set(during) == {3}
    assert hook_count(target) == 1
    mine.remove()


@pytest.mark.parametrize("calls", [1, 2, 7])
def test_hooks_are_gone_after_an_exception(calls, target, drafter):
    """In the prefill, in the first round, later; and the next call works."""
    with pytest.raises(RuntimeError, match="stop here"):
        assisted(target, drafter, prompt(), logits_processor=LogitsProcessorList([Raising(calls)]))
    assert hook_count(target) == 0
    assert assisted(target, drafter, prompt()).tolist() == plain(target, prompt()).tolist()


def test_hooks_are_gone_after_an_interrupt(target, drafter):
    """Ctrl-C inside the streamer."""

    class Interrupting:
        left = 4

        def put(self, value):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

        def end(self):
            raise AssertionError("the text did not end")

    with pytest.raises(KeyboardInterrupt):
        assisted(target, drafter, prompt(), streamer=Interrupting())
    assert hook_count(target) == 0


class RunsTheTarget(LogitsProcessor):
    """Runs the target on another text in the middle of the call, by itself or by generate."""

    def __init__(self, run):
        self.run = run

    def __call__(self, input_ids, scores):
        self.run()
        return scores


def test_a_processor_that_runs_the_target(trained_pair):
    """Its forward passes are not taken for features: the drafter is as good as before."""
    target, drafter = trained_pair
    ids = prompt(8, vocab=120)
    options = {"max_new_tokens": 40, "eos_token_id": None}
    expected = assisted(target, drafter, ids, **options)
    lengths = drafter.last_generation_stats.acceptance_lengths
    assert max(lengths) > 3
    other = prompt(13, seed=5, vocab=120)
    for run in (lambda: target(other.expand(2, -1)), lambda: plain(target, other, max_new_tokens=3)):
        output = assisted(target, drafter, ids, logits_processor=LogitsProcessorList([RunsTheTarget(run)]), **options)
        assert output.tolist() == expected.tolist()
        assert drafter.last_generation_stats.acceptance_lengths == lengths


def test_a_call_inside_a_call(trained_pair):
    """A processor that itself generates with the same pair."""
    target, drafter = trained_pair
    ids, other = prompt(8, vocab=120), prompt(13, seed=5, vocab=120)
    options = {"max_new_tokens": 25, "eos_token_id": None}
    hooks = hook_count(target)  # transformers leaves its own on a target that gave hidden states before
    expected, inner_expected = plain(target, ids, **options), plain(target, other, **options)
    assisted(target, drafter, ids, **options)
    lengths = drafter.last_generation_stats.acceptance_lengths
    inner = []
    processor = RunsTheTarget(lambda: inner.append(assisted(target, drafter, other, **options).tolist()))
    output = assisted(target, drafter, ids, logits_processor=LogitsProcessorList([processor]), **options)
    assert output.tolist() == expected.tolist()
    assert len(inner) == 25 and all(each == inner_expected.tolist() for each in inner)
    assert drafter.last_generation_stats.acceptance_lengths == lengths
    assert hook_count(target) == hooks


# Threads.


def in_threads(calls):
    """Run functions at the same time, each in its own thread; their results in order."""
    results, barrier = [None] * len(calls), threading.Barrier(len(calls))

    def work(index):
        barrier.wait()
        results[index] = calls[index]()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_threads_do_not_see_each_other(trained_pair):
    """Different prompts on one pair at the same time: texts, acceptance and statistics are those of single runs."""
    target, drafter = trained_pair
    prompts = [prompt(8, vocab=120), prompt(15, seed=5, vocab=120)]
    options = {"max_new_tokens": 40, "eos_token_id": None}

    def run(ids):
        output = assisted(target, drafter, ids, **options)
        return output.tolist(), drafter.last_generation_stats.acceptance_lengths

    hooks = hook_count(target)
    single = [run(ids) for ids in prompts]
    assert single[0][1] != single[1][1]
    mine = drafter.last_generation_stats

    def four_times(ids):
        return [run(ids) for _ in range(4)]

    both = in_threads([lambda: four_times(prompts[0]), lambda: four_times(prompts[1])])
    assert both == [[single[0]] * 4, [single[1]] * 4]
    assert drafter.last_generation_stats is mine
    assert hook_count(target) == hooks


def test_statistics_belong_to_the_thread(target, drafter):
    """None before the first call of a thread; a new thread does not inherit those of one that ended."""
    assert drafter.last_generation_stats is None
    assisted(target, drafter, prompt())
    mine = drafter.last_generation_stats
    in_threads([lambda: assisted(target, drafter, prompt(), max_new_tokens=3)])
    assert drafter.last_generation_stats is mine
    # A thread's number is used again after its end: several are tried.
    assert [in_threads([lambda: drafter.last_generation_stats])[0] for _ in range(20)] == [None] * 20


def test_plain_generate_in_another_thread(trained_pair):
    """Forward passes of others on the same target are not recorded."""
    target, drafter = trained_pair
    ids, other = prompt(8, vocab=120), prompt(15, seed=5, vocab=120)
    options = {"max_new_tokens": 40, "eos_token_id": None}
    expected = [assisted(target, drafter, ids, **options).tolist(), plain(target, other, **options).tolist()]
    lengths = drafter.last_generation_stats.acceptance_lengths

    def with_drafter():
        output = assisted(target, drafter, ids, **options)
        return output.tolist(), drafter.last_generation_stats.acceptance_lengths

    (output, seen), others = in_threads([with_drafter, lambda: plain(target, other, **options).tolist()])
    assert [output, others] == expected
    assert seen == lengths
