"""Tiny targets and drafters, built from configs; nothing is downloaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from dflash_hf import DFlashConfig, DFlashDraftModel

GOLDEN = Path(__file__).parent / "fixtures" / "golden"
VOCAB = 97


def pytest_addoption(parser):
    parser.addoption(
        "--speculators-python", help="Python of an environment with speculators 0.9.0, for the tests marked peers."
    )


class Golden:
    """One recorded case: `path`, `meta` and the tensors of `io`."""

    def __init__(self, name: str):
        self.path = GOLDEN / name
        self.meta = json.loads((self.path / "meta.json").read_text())
        self.io = load_file(self.path / "io.safetensors")


@pytest.fixture
def golden():
    """`golden(name)` reads a recorded case."""
    return Golden


def tiny_target(family: str = "llama", *, seed: int = 0, layers: int = 6, hidden: int = 32, vocab: int = VOCAB, **more):
    """A random causal language model in fp32 whose greedy text is not constant."""
    torch.manual_seed(seed)
    common = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    config_class = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family]
    if family == "qwen3":
        common["head_dim"] = hidden // 4
    return AutoModelForCausalLM.from_config(config_class(**{**common, **more})).eval()


def tiny_drafter(target, *, seed: int = 1, block_size: int = 8, layers: int = 2, mask_token_id: int = 3, **more):
    """A random drafter that fits `target`."""
    torch.manual_seed(seed)
    config = DFlashConfig.from_target(
        target.config,
        mask_token_id=mask_token_id,
        num_hidden_layers=layers,
        block_size=block_size,
        **{"num_taps": 2, "initializer_range": 0.2, **more},
    )
    return DFlashDraftModel(config).eval()


@pytest.fixture
def target():
    """A tiny Llama."""
    return tiny_target()


@pytest.fixture
def drafter(target):
    """A tiny drafter for it."""
    return tiny_drafter(target)


@pytest.fixture(scope="session")
def trained_pair():
    """The recorded trained pair: the target speaks a small grammar, the drafter follows it (about 5 tokens a round)."""
    target = AutoModelForCausalLM.from_pretrained(GOLDEN / "generation" / "target", dtype=torch.float32).eval()
    drafter = DFlashDraftModel.from_pretrained(GOLDEN / "generation" / "drafter", dtype=torch.float32).eval()
    return target, drafter
