"""Flex attention, the default on CUDA devices, where these tests do not run.

On a CPU torch has no backward for it and needs a C++ compiler; here its compiled forward pass is compared with dense
attention, and its recompilations are counted.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_helpers import make_trainer, rows

from dflash_hf.training.masks import default_implementation

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")


def run_worker(folder, layer_type, batches):
    """Errors against dense attention, compiled graphs so far and shapes, one entry a batch."""
    worker = Path(__file__).with_name("flex_worker.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(worker), str(folder), layer_type, str(batches)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["errors"]) == batches and max(result["errors"]) < 1e-4
    return result


@needs_compiler
def test_compiled_forward_equals_dense_attention(tmp_path):
    """Two batches of one shape: equal blocks, one graph for both, though anchors differ."""
    result = run_worker(tmp_path, "sliding_attention", 2)
    assert result["graphs"] == [1, 1] and result["shapes"][0] == result["shapes"][1] == [128, 16]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_compiled_forward_does_not_recompile(tmp_path, layer_type):
    """Seven batches of five lengths, packed and not: equal blocks, and no graph after the second length."""
    result = run_worker(tmp_path, layer_type, 7)
    assert all(rows_ % 128 == 0 and slots % 16 == 0 for rows_, slots in result["shapes"])
    assert len({tuple(shape) for shape in result["shapes"]}) >= 5
    unpacked, packed = result["graphs"][:5], result["graphs"][5:]
    # a rule is compiled for its first shape, then once more for any shape
    assert unpacked[-1] == unpacked[2], result["graphs"]
    assert packed[-1] == packed[-2], result["graphs"]


def test_default_by_device_and_override(tmp_path):
    """Flex on CUDA, our own elsewhere, dense with dropout; `attn_implementation` wins."""
    assert default_implementation(torch.device("cuda")) == "flex_attention"
    assert default_implementation(torch.device("cpu")) == default_implementation(torch.device("mps")) == "dflash_blocks"
    assert default_implementation(torch.device("cuda"), attention_dropout=0.1) == "sdpa"
    assert make_trainer(tmp_path).attn_implementation == "dflash_blocks"
    assert make_trainer(tmp_path, attn_implementation="eager").attn_implementation == "eager"


def test_shapes_are_bounded_for_compiled_attention(tmp_path):
    """Rows in multiples of 128, slots in multiples of num_anchors; other implementations pay for no slot too many."""
    train = rows([20, 150, 90])
    for name, shape in (("flex_attention", (256, 32)), ("dflash_blocks", (150, 32)), ("sdpa", (150, 32))):
        trainer = make_trainer(tmp_path, train=train, attn_implementation=name, num_anchors=32)
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
        assert (batch["input_ids"].shape[1], batch["anchors"].shape[1]) == shape
        short = trainer.data_collator([trainer.train_dataset[0]])
        assert short["anchors"].shape[1] == (32 if name == "flex_attention" else 15)


def test_generation_keeps_the_drafters_own_attention(tmp_path):
    """Training with flex or our own attention leaves `drafter.config` alone: generate uses what it was loaded with."""
    trainer = make_trainer(tmp_path, train=rows([20, 30]))
    before = trainer.model.config._attn_implementation
    trainer.train()
    assert trainer.model.config._attn_implementation == before == "sdpa"
    ids = torch.tensor([[1, 5, 9, 4]])
    plain = trainer.target_model.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0)
    ours = trainer.target_model.generate(
        ids, assistant_model=trainer.model, do_sample=False, max_new_tokens=8, pad_token_id=0
    )
    assert torch.equal(plain, ours)
