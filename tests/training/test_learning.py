"""A drafter trained from nothing by DFlashTrainer speeds up real generation, and does not change it."""

import copy

import torch
from conftest import in_whole_blocks
from datasets import Dataset
from training_helpers import arguments

from dflash_hf import DFlashConfig, DFlashDraftModel, DFlashTrainer

PROMPT, ANSWER = 5, 59


def prompts(count, seed):
    """Random prompts: the BOS token, then random words of the target's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, 105, (count, PROMPT - 1), generator=generator)
    return torch.cat([torch.ones(count, 1, dtype=torch.long), words], dim=1)


def answers(target, ids):
    """Plain greedy generation, batched."""
    with torch.no_grad():
        return target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=ANSWER,
            min_new_tokens=ANSWER,
            pad_token_id=0,
        )


def test_trained_drafter_accepts_more_than_three_tokens_a_round(trained_pair, tmp_path):
    """256 greedy answers, a fresh two-layer drafter, half a minute: pooled acceptance length on unseen prompts above 3.

    With untrained weights it is about 1, so training is what does it; every output equals plain generate.
    """
    target = copy.deepcopy(trained_pair[0])
    torch.manual_seed(0)
    config = DFlashConfig.from_target(
        target.config, mask_token_id=127, num_hidden_layers=2, block_size=8, target_layer_ids=[0, 1, 2]
    )
    drafter = in_whole_blocks(DFlashDraftModel(config))
    text = answers(target, prompts(288, seed=1))
    data = Dataset.from_dict(
        {"prompt_ids": text[:, :PROMPT].tolist(), "response_ids": text[:, PROMPT:].tolist()},
    )
    trainer = DFlashTrainer(
        model=drafter,
        target_model=target,
        args=arguments(
            tmp_path,
            max_steps=STEPS,
            learning_rate=3e-3,
            warmup_steps=0.05,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=16,
            num_anchors=16,
            features="memory",
        ),
        train_dataset=data.select(range(256)),
        eval_dataset=data.select(range(256, 288)),
    )
    before = acceptance(target, drafter.eval(), prompts(4, seed=2))
    trainer.train()
    metrics = trainer.evaluate()
    after = acceptance(target, drafter.eval(), prompts(16, seed=3))
    print(
        f"acceptance length {before:.2f} -> {after:.2f}, teacher-forced {metrics['eval_block_acceptance_length']:.2f}"
    )
    assert before < 1.5
    assert after > 3
    assert metrics["eval_block_acceptance_length"] > 3


STEPS = 160


def acceptance(target, drafter, unseen):
    """Pooled tokens a round of real generation; asserts that its output is the target's own."""
    expected = answers(target, unseen)
    produced = []
    for row, plain in zip(unseen, expected):
        output = target.generate(
            row[None],
            assistant_model=drafter,
            do_sample=False,
            max_new_tokens=ANSWER,
            min_new_tokens=ANSWER,
            pad_token_id=0,
        )
        assert output[0].tolist() == plain.tolist()
        produced += drafter.last_generation_stats.produced
    return sum(produced) / len(produced)
