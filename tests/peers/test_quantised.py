"""Drafters quantised by transformers with torchao and bitsandbytes: load, generate, save, load again.

`pip install --no-deps torchao==0.18.0 bitsandbytes==0.50.2`, then `pytest -m peers tests/peers/test_quantised.py`.
"""

import json

import pytest
import torch
from conftest import GOLDEN, Golden
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from dflash_hf import DFlashDraftModel
from dflash_hf.errors import CheckpointError
from dflash_hf.hub.export import export_drafter

pytestmark = pytest.mark.peers

PAIR = GOLDEN / "generation"


def torchao_int8():
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


SCHEMES = {
    "torchao_int8": torchao_int8,
    "bitsandbytes_8bit": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes_nf4": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
}


@torch.no_grad()
def draft(drafter):
    generator = torch.Generator().manual_seed(0)
    config = drafter.config
    context = torch.randn(1, 9, len(config.target_layer_ids) * config.hidden_size, generator=generator)
    block = torch.randn(1, config.block_size, config.hidden_size, generator=generator)
    return drafter(noise_embeds=block, context_hidden_states=context).last_hidden_state.float()


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_a_quantised_drafter_works_and_survives_saving(scheme, tmp_path):
    """On the recorded trained pair: the same text, nearly the same acceptance, the same draft after a round trip."""
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    drafter = DFlashDraftModel.from_pretrained(
        PAIR / "drafter", dtype=torch.float32, quantization_config=SCHEMES[scheme]()
    )
    plain = DFlashDraftModel.from_pretrained(PAIR / "drafter", dtype=torch.float32)
    weight = drafter.layers[0].mlp.up_proj.weight
    assert type(weight) is not torch.nn.Parameter  # packed by the library
    assert not torch.equal(draft(drafter), draft(plain))
    lengths = {}
    prompt = Golden("generation").io["p0.input_ids"].view(1, -1)
    options = {"max_new_tokens": 48, "do_sample": False}
    alone = target.generate(prompt, **options)
    for name, model in (("plain", plain), ("quantised", drafter)):
        assert target.generate(prompt, assistant_model=model, **options).equal(alone)
        lengths[name] = model.last_generation_stats.acceptance_length
    assert lengths["quantised"] > 0.7 * lengths["plain"] > 1.5
    drafter.save_pretrained(tmp_path / "out")
    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())
    again = DFlashDraftModel.from_pretrained(tmp_path / "out")
    assert torch.equal(draft(again), draft(drafter))
    with pytest.raises(CheckpointError, match="quantised"):
        export_drafter(tmp_path / "out", to="speculators", output=tmp_path / "no", target=str(PAIR / "target"))
