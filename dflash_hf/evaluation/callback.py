"""A true greedy run with the drafter in the middle of its training."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from transformers import Trainer, TrainerCallback

from ..errors import DFlashError
from .drafter import generate_greedily


class AcceptanceLengthCallback(TrainerCallback):
    """Answers a list of prompts greedily every few steps and logs the acceptance length that users would see.

    Block acceptance on held-out text weighs every place alike; this weighs places as generation visits them. It does
    not disturb training: greedy generation draws no random numbers. Prompts are shared out among the ranks.

    Logs `generation_acceptance_length` (tokens per verification, bonus token included) and `generation_rounds`.

        trainer.add_callback(AcceptanceLengthCallback(trainer, prompts=["What is 2 + 2?"], every=500))

    Args:
        trainer: a `DFlashTrainer`.
        prompts: user messages as text, conversations as lists of messages, or token ids.
        every: steps between runs; one more follows at the end.
        max_new_tokens: length limit of an answer.

    Raises:
        DFlashError: without prompts, or for text without a tokenizer.
    """

    def __init__(self, trainer: Trainer, *, prompts: list[Any], every: int, max_new_tokens: int = 128):
        if not prompts or every < 1:
            raise DFlashError(f"AcceptanceLengthCallback needs prompts and a positive `every`, got {every}.")
        self.trainer = trainer
        self.every = every
        self.max_new_tokens = max_new_tokens
        self.prompts = [self._token_ids(prompt) for prompt in prompts]

    def _drafter(self):
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return model.get_base_model() if isinstance(model, PeftModel) else model

    def _token_ids(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str) and isinstance(prompt[0], int):
            return list(prompt)
        tokenizer = self.trainer.processing_class
        if tokenizer is None:
            raise DFlashError("Prompts in words need the target's tokenizer: give the trainer a `processing_class`.")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        thinking = self._drafter().config.enable_thinking
        options = {} if thinking is None else {"enable_thinking": thinking}
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **options)
        return list(encoded["input_ids"])

    def on_step_end(self, args, state, control, **kwargs):
        """Run at every `every`-th step, and at the last."""
        if state.global_step % self.every and state.global_step != state.max_steps:
            return
        accelerator = self.trainer.accelerator
        share = self.prompts[accelerator.process_index :: accelerator.num_processes]
        with accelerator.autocast():
            stats = generate_greedily(
                self.trainer.target_model, self._drafter(), share, max_new_tokens=self.max_new_tokens
            )
        made = [made for made, tried in zip(stats.produced, stats.proposed) if tried]
        sums = torch.tensor([sum(made), len(made)], dtype=torch.float32, device=accelerator.device)
        tokens, rounds = accelerator.reduce(sums, reduction="sum").tolist()
        self.trainer.log({"generation_acceptance_length": tokens / max(rounds, 1), "generation_rounds": int(rounds)})
