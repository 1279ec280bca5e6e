"""speculation_type="dflash" asks for transformers' own loop: the same drafter, not our decoding."""

import pytest
import torch
from generation_helpers import assisted, drafter_for, plain, prompt, small_target
from transformers import GenerationConfig

from dflash_hf.generation import decoding


@pytest.fixture
def target():
    """A tiny Llama."""
    return small_target()


@pytest.fixture
def ours_fails(monkeypatch):
    """Our loop raises when it runs."""

    def run(self):
        raise AssertionError("our loop ran")

    monkeypatch.setattr(decoding.DFlashDecoding, "run", run)


def test_the_trained_pair_on_the_stock_loop(golden, trained_pair, ours_fails):
    """The recorded ids, and as many target passes as the recording says stock transformers makes."""
    target, drafter = trained_pair
    before = drafter.last_generation_stats
    case = golden("generation")
    for index, facts in enumerate(case.meta["prompts"]):
        calls = []
        handle = target.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        try:
            output = assisted(
                target,
                drafter,
                case.io[f"p{index}.input_ids"],
                max_new_tokens=facts["max_new_tokens"],
                eos_token_id=None,
                speculation_type="dflash",
            )
        finally:
            handle.remove()
        assert output.tolist() == case.io[f"p{index}.output_ids"].tolist()
        recorded = case.meta["stock_transformers"]["prompts"][index]["tokens_per_main_model_call"]
        assert len(calls) == len(recorded)
    assert drafter.last_generation_stats is before


def test_a_random_drafter_on_the_stock_loop(target, ours_fails):
    """Named on the call or on the generation config."""
    drafter = drafter_for(target)
    expected = plain(target, prompt(6), max_new_tokens=21)
    output = assisted(target, drafter, prompt(6), max_new_tokens=21, speculation_type="dflash")
    assert output.tolist() == expected.tolist()
    config = GenerationConfig(do_sample=False, max_new_tokens=21, speculation_type="dflash")
    output = target.generate(prompt(6), assistant_model=drafter, generation_config=config)
    assert output.tolist() == expected.tolist()
    assert drafter.last_generation_stats is None


def test_stock_sampling_runs(target, ours_fails):
    """Its sampling takes the drafter too."""
    torch.manual_seed(0)
    output = target.generate(
        prompt(6), assistant_model=drafter_for(target), do_sample=True, max_new_tokens=12, speculation_type="dflash"
    )
    assert output.shape[1] == 18


def test_ours_runs_without_it(target, ours_fails):
    """The fixture of this file would notice."""
    with pytest.raises(AssertionError, match="our loop ran"):
        assisted(target, drafter_for(target), prompt(6), max_new_tokens=5)
