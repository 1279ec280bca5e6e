"""Known fault A19: target, drafter and parts of the target on different devices."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from fuzz_targets import build_target
from generation_helpers import drafter_for
from knowing_drafter import padded_batch

from dflash_hf.target import decoder_layers

NEW = 20


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_a19_a_device_that_is_pretended(name):
    """Every tensor move, on any machine: operations that mix the devices raise (in a process of its own)."""
    script = Path(__file__).parent / "two_devices.py"
    run = subprocess.run([sys.executable, str(script), name], capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "equal", run.stderr[-3000:]


ACCELERATORS = torch.accelerator.device_count()
PLACES = {"drafter on the CPU": 1, "target on the CPU": 1, "half of the target offloaded": 1, "target split": 2}


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "gpt2"])
@pytest.mark.parametrize("where", PLACES)
def test_a19_two_devices(where, name):
    """Target, drafter and the target's layers need not be on one device."""
    if PLACES[where] > ACCELERATORS:
        pytest.skip(f"needs {PLACES[where]} accelerators beside the CPU")
    accelerator = torch.accelerator.current_accelerator()
    target = copy.deepcopy(build_target(name))
    inputs = padded_batch([7, 3])
    drafter = drafter_for(target)
    if where == "target on the CPU":
        drafter.to(accelerator)
    elif where == "drafter on the CPU":
        target.to(accelerator)
    else:
        second = "cpu" if where == "half of the target offloaded" else torch.device(accelerator.type, 1)
        target = dispatch_model(target, halves(target, torch.device(accelerator.type, 0), second))
    inputs = {key: value.to(target.device) for key, value in inputs.items()}
    for options in ({}, {"repetition_penalty": 1.3}, {"return_dict_in_generate": True, "output_hidden_states": True}):
        options = {**options, "do_sample": False, "max_new_tokens": NEW}
        expected = target.generate(**inputs, **options)
        output = target.generate(**inputs, **options, assistant_model=drafter)
        assert getattr(output, "sequences", output).tolist() == getattr(expected, "sequences", expected).tolist()
    sampled = target.generate(**inputs, do_sample=True, top_k=1, max_new_tokens=NEW, assistant_model=drafter)
    assert sampled.tolist() == expected.sequences.tolist()


def halves(target, first, second) -> dict:
    """A device map: the second half of the layers on `second`, everything else on `first`."""
    layers = list(decoder_layers(target))
    device_map = {}
    for name, module in target.named_modules():
        covered = any(name.startswith(f"{parent}.") for parent in device_map)
        if module in layers:
            device_map[name] = second if layers.index(module) >= len(layers) // 2 else first
        elif not covered and not any(layer in module.modules() for layer in layers) and name:
            device_map[name] = first
    return device_map
