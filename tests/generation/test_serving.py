"""Ways to call generate: in threads, with streamers, through pipelines, on wrapped, compiled and sharded models."""

import copy
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from fuzz_cases import words
from fuzz_targets import build_target
from generation_helpers import PutRecorder, drafter_for, prompt, slow, small_target
from knowing_drafter import padded_batch, same_as_plain
from peft import LoraConfig, get_peft_model
from transformers import TextIteratorStreamer, pipeline

from dflash_hf.target import decoder_layers

NEW = 24


def at_the_same_time(*calls) -> list:
    """The results of functions that run in threads of their own."""
    results, start = [None] * len(calls), threading.Barrier(len(calls))

    def work(index):
        start.wait()
        results[index] = calls[index]()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def quick_switches():
    """Threads take turns very often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("name", ["trained", "qwen3_5_text"])
def test_two_threads(name, trained_pair, quick_switches):
    """Two calls on one target and drafter: features, caches and statistics are each thread's own."""
    target, drafter = trained_pair if name == "trained" else (build_target(name), drafter_for(build_target(name)))
    batches = [padded_batch([9, 4, 7], seed=1), padded_batch([5], seed=2)]

    def several_times(inputs):
        def run():
            results = []
            for _ in range(3):
                ids = target.generate(**inputs, do_sample=False, max_new_tokens=NEW, assistant_model=drafter)
                results.append((ids.tolist(), drafter.last_generation_stats.produced))
            return results

        return run

    alone = [several_times(inputs)() for inputs in batches]
    for inputs, results in zip(batches, alone):
        assert results[0][0] == target.generate(**inputs, do_sample=False, max_new_tokens=NEW).tolist()
    assert at_the_same_time(*(several_times(inputs) for inputs in batches)) == alone


def test_text_iterator_streamer_in_a_thread(trained_pair):
    """The usual way of serving; the statistics are in the thread that generated."""
    target, drafter = trained_pair
    tokenizer = words()
    text = target.generate(prompt(6), do_sample=False, max_new_tokens=NEW, eos_token_id=None)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    new_tokens = []

    def serve():
        target.generate(
            prompt(6),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=None,
            assistant_model=drafter,
            streamer=streamer,
        )
        new_tokens.append(drafter.last_generation_stats.new_tokens)

    thread = threading.Thread(target=serve)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces).split() == tokenizer.decode(text[0, 6:]).split()
    assert new_tokens == [NEW] and len(pieces) > 5


@pytest.mark.parametrize("stops", [False, True])
def test_streamer_of_a_batch(stops):
    """A streamer that takes batches is given what plain generate gives it: a token of each row, pads for ended rows."""
    target = small_target()
    inputs = padded_batch([6, 2, 4])
    text = target.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    options = {"max_new_tokens": NEW, "eos_token_id": text[0, 6 + 5].item() if stops else None}
    recorders = []

    def make_options():
        recorders.append(PutRecorder())
        return {**options, "streamer": recorders[-1]}

    same_as_plain(target, inputs, make_options=make_options)
    assert recorders[1].puts == recorders[0].puts
    assert recorders[1].ends == 1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_pipeline(batch_size):
    """pipeline("text-generation", assistant_model=...), one text or several at once."""
    target = small_target()
    drafter = drafter_for(target)
    tokenizer = words()
    tokenizer.padding_side = "left"
    texts = ["w5 w9 w12 w7", "w8", "w20 w21"]
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": batch_size}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(texts, **options)
    drafter.config.eos_token_id = target.config.eos_token_id
    generate = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    assert generate(texts, **options) == plain
    assert drafter.last_generation_stats.rounds > 0


def compiled_module(target):
    target.compile(backend="eager")


def compiled_forward(target):
    target.forward = torch.compile(target.forward, backend="eager")


def compiled_layers(target):
    for layer in decoder_layers(target):
        layer.compile(backend="eager")


@pytest.mark.parametrize("name", ["llama", *slow("qwen3_5_text")])
@pytest.mark.parametrize("compile_it", [compiled_module, compiled_forward, compiled_layers])
def test_target_that_was_compiled_before(compile_it, name):
    """Hooks added after compilation are skipped by a graph that exists; the features must be right all the same."""
    plain = build_target(name)
    target = copy.deepcopy(plain)
    compile_it(target)
    inputs = padded_batch([6, 3])
    target.generate(**inputs, do_sample=False, max_new_tokens=8)
    options = {"max_new_tokens": NEW}
    _, drafter = same_as_plain(target, inputs, right=1.0, make_options=lambda: options, plain=plain)
    assert drafter.last_generation_stats.acceptance_length > 4


def _lora(model, **more):
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False, **more))


WRAPPERS = {
    "peft": _lora,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "both": lambda model: torch.compile(_lora(model), backend="eager"),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_drafter_of_a_batch(wrap):
    """The gate looks through wrappers."""
    target = small_target()
    inputs = padded_batch([6, 2, 4])
    options = {"do_sample": False, "max_new_tokens": NEW}
    drafter = drafter_for(target)
    output = target.generate(**inputs, **options, assistant_model=wrap(drafter))
    assert output.tolist() == target.generate(**inputs, **options).tolist()
    assert drafter.last_generation_stats.new_tokens > 0


def test_peft_target_of_a_batch():
    """The adapter's own text, whose features the drafter is given."""
    target = small_target()
    inputs = padded_batch([6, 2, 4])
    options = {"do_sample": False, "max_new_tokens": NEW}
    base = target.generate(**inputs, **options)
    adapted = _lora(target, task_type="CAUSAL_LM")
    text, _ = same_as_plain(adapted, inputs, make_options=lambda: {"max_new_tokens": NEW})
    assert text.tolist() != base.tolist()


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_clock_decides_nothing(do_sample, trained_pair):
    """Under load every round takes another time; the text and the length of each draft stay."""
    target, drafter = trained_pair
    inputs = padded_batch([6, 2, 4])
    clock = random.Random(0)
    results = []
    for loaded in (False, True, True):
        handle = target.register_forward_hook(lambda *_: time.sleep(clock.random() / 50))
        other = drafter.register_forward_hook(lambda *_: time.sleep(clock.random() / 50))
        if not loaded:
            handle.remove()
            other.remove()
        torch.manual_seed(7)
        ids = target.generate(
            **inputs, do_sample=do_sample, max_new_tokens=NEW, eos_token_id=None, assistant_model=drafter
        )
        handle.remove()
        other.remove()
        stats = drafter.last_generation_stats
        results.append((ids.tolist(), stats.proposed, stats.produced))
    assert results[0] == results[1] == results[2]


SYNCED = """
import sys
import torch
import torch.distributed as dist
sys.path[:0] = sys.argv[4:]
from conftest import tiny_drafter, tiny_target
from knowing_drafter import padded_batch
rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
target = tiny_target()
drafter = tiny_drafter(target)
inputs = padded_batch([[6, 3], [4, 7, 2]][rank], seed=rank)
options = {"do_sample": False, "max_new_tokens": [9, 30][rank]}
expected = target.generate(**inputs, **options)
calls = []
target.get_decoder().register_forward_hook(lambda *_: calls.append(1))
output = target.generate(**inputs, **options, assistant_model=drafter, synced_gpus=True)
assert output.tolist() == expected.tolist()
counts = torch.zeros(world)
counts[rank] = len(calls)
dist.all_reduce(counts)
assert counts.min() == counts.max(), counts
print("equal")
"""


@pytest.mark.parametrize("world", [*slow(1), 2])
def test_synced_gpus(world, tmp_path):
    """ZeRO-3 and FSDP: a rank that has finished goes on running the target until all have, or the others hang."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SYNCED, str(rank), str(world), str(tmp_path / "store"), *paths],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        results = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [out.strip().endswith("equal") for out, _ in results] == [True] * world, results
