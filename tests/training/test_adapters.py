"""LoRA on a drafter, warm starts, and initialisation from the target."""

import json

import pytest
import torch
from conftest import tiny_target
from peft import LoraConfig, PeftModel
from training_helpers import make_trainer, rows, tiny_drafter, weights_of

from dflash_hf import DFlashDraftModel
from dflash_hf.errors import DFlashError
from dflash_hf.training.initialisation import initialise_from_target
from dflash_hf.training.lora import LORA_TARGET_MODULES


def lora(**more):
    return LoraConfig(**{**dict(r=4, lora_alpha=8), **more})


def lora_run(folder, *, steps=4, resume=None, drafter=None, **more):
    target = tiny_target()
    drafter = tiny_drafter(target) if drafter is None else drafter
    trainer = make_trainer(
        folder,
        target=target,
        drafter=drafter,
        peft_config=lora(),
        max_steps=steps,
        learning_rate=1e-2,
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_every_matrix_gets_an_adapter_and_nothing_else_moves(tmp_path):
    """Explicit target modules: all matrices of every layer and fc; base weights and norms stay bit-equal."""
    before = weights_of(tiny_drafter(tiny_target()))
    trainer = lora_run(tmp_path)
    base = trainer.model.get_base_model()
    adapted = {name.split(".lora_A")[0] for name, _ in trainer.model.named_modules() if name.endswith("lora_A")}
    assert {name.split(".")[-1] for name in adapted} == set(LORA_TARGET_MODULES)
    assert len(adapted) == 1 + 2 * (len(LORA_TARGET_MODULES) - 1)
    for name, parameter in base.named_parameters():
        if "lora_" in name:
            assert parameter.requires_grad
        else:
            assert not parameter.requires_grad and torch.equal(parameter, before[name.replace(".base_layer", "")])
    moved = [p.abs().max() > 0 for name, p in base.named_parameters() if "lora_B" in name]
    assert all(moved)


def test_named_modules_are_kept(tmp_path):
    """A config that names modules gets those."""
    trainer = make_trainer(tmp_path, peft_config=lora(target_modules=["q_proj"]))
    adapted = {name.split(".lora_A")[0] for name, _ in trainer.model.named_modules() if name.endswith("lora_A")}
    assert {name.split(".")[-1] for name in adapted} == {"q_proj"}


def test_adapter_is_saved_and_merged_into_the_published_format(tmp_path):
    """save_model writes the adapter; it loads onto the base; save_merged writes a whole drafter of equal outputs."""
    trainer = lora_run(tmp_path / "run")
    trainer.save_model(str(tmp_path / "adapter"))
    trainer.save_merged(tmp_path / "whole")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names and "model.safetensors" not in names
    target = trainer.target_model
    loaded = PeftModel.from_pretrained(tiny_drafter(target), tmp_path / "adapter")
    whole = DFlashDraftModel.from_pretrained(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]
    assert set(dict(whole.named_parameters())) == set(weights_of(tiny_drafter(target)))
    noise, context = torch.randn(1, 8, 32), torch.randn(1, 5, 64)
    with torch.no_grad():
        trainer.model.eval()
        outputs = [
            m(noise, context).last_hidden_state for m in (trainer.model, loaded.eval(), whole, tiny_drafter(target))
        ]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=1e-4, atol=1e-5)
    assert (outputs[3] - outputs[0]).abs().max() > 1e-3
    trainer.train()  # merging left the model as it was


def test_merging_without_an_adapter_is_refused(tmp_path):
    """By name of the method to use."""
    with pytest.raises(DFlashError, match="save_model"):
        make_trainer(tmp_path).save_merged(tmp_path)


@pytest.mark.parametrize("more", [{}, dict(optimizer="muon"), dict(packing=True, max_length=60)])
def test_adapter_run_resumes_exactly(tmp_path, more):
    """Stopped in mid-epoch and resumed afresh: the same adapter weights."""
    options = dict(save_strategy="steps", save_steps=3, per_device_train_batch_size=1, **more)
    whole = lora_run(tmp_path / "whole", steps=6, **options)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert (checkpoint / "adapter_model.safetensors").exists()
    resumed = lora_run(tmp_path / "resumed", steps=6, resume=str(checkpoint), **options)
    expected = weights_of(whole.model)
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_adapter_with_gradient_checkpointing(tmp_path):
    """Frozen layers below an adapter still pass its gradient when they are recomputed."""
    trainer = make_trainer(tmp_path, peft_config=lora(), gradient_checkpointing=True, learning_rate=1e-2)
    trainer.train()
    assert all(p.abs().max() > 0 for name, p in trainer.model.named_parameters() if "lora_B" in name)


def test_adapted_drafter_evaluates_and_generates(tmp_path):
    """Evaluation goes through the adapter, and so does generation."""
    trainer = lora_run(tmp_path, evaluation=rows([20, 14], seed=5))
    with_adapter = trainer.evaluate()["eval_loss"]
    with trainer.model.disable_adapter():
        assert trainer.evaluate()["eval_loss"] != with_adapter
    ids = torch.tensor([[1, 5, 9, 4]])
    plain = trainer.target_model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
    ours = trainer.target_model.generate(
        ids, assistant_model=trainer.model, do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("name", ["zlab_qwen3_full", "zlab_swa_mixed"])
def test_warm_start_keeps_the_published_taps(golden, tmp_path, name):
    """A published drafter trains further with its own taps, layers and windows, and is saved with them."""
    case = golden(name)
    drafter = DFlashDraftModel.from_pretrained(case.path, dtype=torch.float32)
    config = drafter.config
    target = tiny_target(
        "qwen3", layers=config.num_target_layers or 8, hidden=config.target_hidden_size, vocab=config.vocab_size
    )
    taps, types = list(config.target_layer_ids), list(config.layer_types)
    trainer = make_trainer(tmp_path / "run", target=target, drafter=drafter)
    before = weights_of(drafter)
    trainer.train()
    assert any(not torch.equal(parameter, before[name]) for name, parameter in drafter.named_parameters())
    trainer.save_model(str(tmp_path / "saved"))
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "saved")
    assert (loaded.config.target_layer_ids, loaded.config.layer_types) == (taps, types)


def test_initialisation_copies_the_targets_last_layers(tmp_path):
    """Matrices, norms and the final norm are the target's; fc passes the last tap through."""
    target = tiny_target("qwen3")
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape))
    trainer = make_trainer(tmp_path, target=target, drafter=tiny_drafter(target), init_from_target=True)
    drafter = trainer.model
    for ours, theirs in zip(drafter.layers, target.model.layers[-2:]):
        for name, parameter in ours.named_parameters():
            torch.testing.assert_close(parameter.data, theirs.get_parameter(name).data, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(drafter.norm.weight.data, target.model.norm.weight.data, rtol=1e-5, atol=1e-6)
    states = torch.randn(3, 64)
    torch.testing.assert_close(drafter.fc(states), states[:, 32:])


def test_initialisation_reads_gemma_norms():
    """Gemma's norms multiply by 1 + weight, and its MLP's norm has another name."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8, pad_token_id=0,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).eval()
    layer = target.model.layers[-1]
    with torch.no_grad():
        layer.pre_feedforward_layernorm.weight.fill_(0.5)
        layer.input_layernorm.weight.fill_(-0.25)
    drafter = tiny_drafter(target, layers=1, target_layer_ids=[0, 2])
    initialise_from_target(drafter, target)
    torch.testing.assert_close(drafter.layers[0].post_attention_layernorm.weight.data, torch.full((32,), 1.5))
    torch.testing.assert_close(drafter.layers[0].input_layernorm.weight.data, torch.full((32,), 0.75))


def test_initialisation_that_does_not_fit_changes_nothing():
    """Another MLP width, or more layers than the target has: refused by name, weights untouched."""
    target = tiny_target()
    drafter = tiny_drafter(target, intermediate_size=48)
    before = weights_of(drafter)
    with pytest.raises(DFlashError, match="mlp.gate_proj has shape"):
        initialise_from_target(drafter, target)
    assert all(torch.equal(parameter, before[name]) for name, parameter in drafter.named_parameters())
    with pytest.raises(DFlashError, match="7 layers, the target 6"):
        initialise_from_target(tiny_drafter(target, layers=7), target)
