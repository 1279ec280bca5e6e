"""Evaluation of a drafter: generation pooled over prompts, blocks against a count by generation, the callback."""

import pytest
import torch
from conftest import Golden, tiny_drafter, tiny_target
from datasets import Dataset
from transformers import TrainerCallback

from dflash_hf import AcceptanceLengthCallback, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.errors import DFlashError
from dflash_hf.evaluation.drafter import evaluate_blocks, generate_greedily, prompts_of


def golden_prompts():
    """Prompts of the recorded grammar."""
    io = Golden("generation").io
    return [io[name][0].tolist() for name in sorted(io) if name.endswith(".input_ids")]


def test_generation_pools_the_rounds_of_all_prompts(trained_pair):
    """Totals are the sums of single calls, the drafter is left as it was, and the acceptance length is over rounds."""
    target, drafter = trained_pair
    prompts, produced, proposed, tokens = golden_prompts()[:3], [], [], 0
    for prompt in prompts:
        target.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), assistant_model=drafter,
            max_new_tokens=20, do_sample=False,
        )  # fmt: skip
        stats = drafter.last_generation_stats
        produced, proposed, tokens = produced + stats.produced, proposed + stats.proposed, tokens + stats.new_tokens
    seen = []
    drafter.train()
    total = generate_greedily(
        target, drafter, prompts, max_new_tokens=20, on_prompt=lambda number, stats: seen.append((number, stats.rounds))
    )
    assert drafter.training
    drafter.eval()
    assert (total.produced, total.proposed, total.new_tokens) == (produced, proposed, tokens)
    assert [number for number, _ in seen] == [0, 1, 2] and seen[-1][1] == len(produced)
    with_proposals = [made for made, tried in zip(produced, proposed) if tried]
    assert (
        total.acceptance_length == pytest.approx(sum(with_proposals) / len(with_proposals))
        and total.acceptance_length > 2
    )


def test_blocks_agree_with_generation_on_the_target_s_own_text(trained_pair):
    """A teacher-forced block on greedy text is the round that generation would run there, at every place."""
    target, drafter = trained_pair
    prompt = golden_prompts()[0]
    text = target.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=40, do_sample=False
    )[0].tolist()
    mask = [0] * len(prompt) + [1] * (len(text) - len(prompt))
    row = Dataset.from_dict({"input_ids": [text], "loss_mask": [mask]})
    measured = evaluate_blocks(drafter, target, row)
    slots = drafter.config.block_size
    accepted = []
    for anchor in range(len(prompt), len(text) - 1):
        # The prefill gives the anchor itself, the first round its block.
        target.generate(
            torch.tensor([text[:anchor]]), attention_mask=torch.ones(1, anchor), assistant_model=drafter,
            max_new_tokens=slots + 1, do_sample=False,
        )  # fmt: skip
        accepted.append(min(drafter.last_generation_stats.produced[0] - 1, len(text) - 1 - anchor))
    assert measured["block_acceptance_length"] > 2
    assert measured["block_acceptance_length"] == pytest.approx(1 + sum(accepted) / len(accepted))
    assert {"loss", "slot_accuracy", "slot_accuracy_1", f"slot_accuracy_{slots - 1}"} <= set(measured)


def test_prompts_end_before_the_answer():
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3, 4], [5, 6, 7, 8]], "loss_mask": [[0, 0, 1, 1], [0, 1, 0, 1]]})
    assert prompts_of(rows) == [[1, 2], [5]]


class Logs(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((state.global_step, dict(logs)))


def train(folder, *, every=None, steps=5, **more):
    """A short run of a tiny drafter, with or without the callback; the drafter and its logs."""
    target = tiny_target()
    drafter = tiny_drafter(target, target_layer_ids=[0, 2])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 97, (6, 24), generator=generator).tolist()
    logs = Logs()
    trainer = DFlashTrainer(
        model=drafter,
        target_model=target,
        args=DFlashTrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            num_anchors=4,
            per_device_train_batch_size=2,
            max_steps=steps,
            dataloader_pin_memory=False,
            **more,
        ),  # fmt: skip
        train_dataset=Dataset.from_dict({"input_ids": ids, "loss_mask": [[0] * 4 + [1] * 20] * 6}),
        callbacks=[logs],
    )
    if every is not None:
        trainer.add_callback(
            AcceptanceLengthCallback(trainer, prompts=[[5, 6, 7], [8, 9]], every=every, max_new_tokens=9)
        )
    trainer.train()
    return trainer, [(step, entry) for step, entry in logs.seen if "generation_rounds" in entry]


def test_the_callback_logs_a_real_run_every_n_steps(tmp_path):
    """At every second step and at the last; the last numbers are those of the finished drafter."""
    trainer, runs = train(tmp_path, every=2)
    assert [step for step, _ in runs] == [2, 4, 5]
    stats = generate_greedily(trainer.target_model, trainer.model, [[5, 6, 7], [8, 9]], max_new_tokens=9)
    assert runs[-1][1]["generation_acceptance_length"] == pytest.approx(stats.acceptance_length)
    assert runs[-1][1]["generation_rounds"] == sum(1 for tried in stats.proposed if tried) > 0


def test_the_callback_does_not_disturb_training(tmp_path):
    """Weights of a run with it equal those of a run without, and the drafter is in training mode again."""
    with_it, _ = train(tmp_path / "a", every=1)
    without, _ = train(tmp_path / "b")
    for (name, one), (_, other) in zip(with_it.model.named_parameters(), without.model.named_parameters()):
        assert torch.equal(one, other), name


def test_the_callback_refuses_nothing_to_ask(tmp_path):
    trainer, _ = train(tmp_path, steps=1)
    for more in (dict(prompts=[], every=1), dict(prompts=[[1]], every=0)):
        with pytest.raises(DFlashError, match="needs prompts"):
            AcceptanceLengthCallback(trainer, **more)
    with pytest.raises(DFlashError, match="processing_class"):
        AcceptanceLengthCallback(trainer, prompts=["hi"], every=1)
