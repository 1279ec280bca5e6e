"""`DFlashTrainer`: transformers' Trainer for a drafter, with a frozen target beside it."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from ..configuration_dflash import DFlashConfig
from ..data.chat import check_token_ids, prepare_dataset
from ..data.token_counts import count_tokens, most_frequent
from ..errors import DFlashError
from ..modeling_dflash import DFlashDraftModel
from ..target import OutputHead, check_compatibility
from .anchors import default_gamma
from .arguments import DFlashTrainingArguments
from .blocks import draft_blocks
from .collator import DrafterDataset
from .curve import write_curve
from .dataset import build_collator, build_dataset
from .initialisation import initialise_from_target
from .lora import adapted, base_drafter, merged
from .masks import default_implementation
from .metrics import RunningCounts, acceptance_metrics, count_blocks
from .muon import MuonWithAdamW
from .objective import batch_loss, evaluation_sums
from .packing import keeps_documents_apart, states_of_batch
from .publishing import PublishesDrafter
from .support import require_trainable


class _TrainingRun(TrainerCallback):
    """What a run needs at its turns: the epoch of the anchors, the clock of the throughput, the curve at the end."""

    def __init__(self, trainer: DFlashTrainer):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        # accelerate's loader does not tell the data its epoch with several ranks or after skipped batches
        train_dataloader.dataset.set_epoch(int(state.epoch))

    def on_train_begin(self, args, state, control, **kwargs):
        before = [entry["training_minutes"] for entry in state.log_history if "training_minutes" in entry]
        self.trainer.counts.start_clock(minutes=before[-1] if before else 0.0)

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.trainer.save_curve()


class DFlashTrainer(PublishesDrafter, Trainer):
    """Trains a drafter against a frozen target (DFlash, arXiv 2602.06036).

    The target's features are tapped (in every step, or once: `args.features`), blocks are drawn at random anchors of
    the response, and one draft forward pass predicts all of them. The loss is a weighted sum over their slots
    (`args.objective`, `args.loss_weighting`), divided by the sum of weights over all ranks and the whole accumulation
    window, so that an update does not depend on how a batch is split.

    Args:
        model: the drafter, new or published (its own taps are kept), or a PEFT model of one. Parameters in half
            precision are cast to fp32 (under AdamW a bf16 norm stays at 1.0); use `args.bf16` for autocast.
        target_model: a causal language model, frozen here. It is not part of what is saved.
        args: `DFlashTrainingArguments`.
        train_dataset, eval_dataset: `datasets.Dataset` in a form that `prepare_dataset` takes; for evaluation also a
            dictionary of them.
        processing_class: the target's tokenizer, needed for messages.
        callbacks, optimizers: as in transformers' Trainer.
        peft_config: trains an adapter on the drafter instead of the drafter (`LoraConfig`; all matrices where it names
            no `target_modules`). `save_model` writes the adapter, `save_merged` a whole drafter.

    Attributes:
        packed_forward: whether the target runs packed rows as they are; None without packing.

    Raises:
        TargetMismatchError: if drafter and target do not fit.
        DatasetError: if there is nothing to train on.
    """

    def __init__(
        self,
        model: DFlashDraftModel,
        target_model: nn.Module,
        args: DFlashTrainingArguments,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        peft_config: PeftConfig | None = None,
    ):
        if not isinstance(args, DFlashTrainingArguments):
            raise DFlashError(f"args is a {type(args).__name__}; DFlashTrainer needs DFlashTrainingArguments.")
        drafter = base_drafter(model)
        config = getattr(drafter, "config", None)
        if not isinstance(config, DFlashConfig):
            raise DFlashError(f"model is a {type(drafter).__name__}; DFlashTrainer trains a DFlashDraftModel.")
        require_trainable(config)
        check_compatibility(config, target_model)
        target_name = target_model.config._name_or_path
        if not config.target_name_or_path and target_name and not Path(target_name).is_dir():
            config.target_name_or_path = target_name  # a local path would mean nothing to others
        self.target_model = target_model.requires_grad_(False).eval()
        if getattr(target_model, "hf_device_map", None) is None:
            self.target_model.to(args.device)
        model.float()
        self._tokenizer = processing_class
        if args.init_from_target:
            initialise_from_target(drafter, target_model)
        if peft_config is not None:
            model = adapted(model, peft_config)
        self.drafter_config = config
        self.first_slot = 0 if config.sample_from_anchor else 1
        self.decay_gamma = args.decay_gamma or default_gamma(config.block_size)
        self.attn_implementation = args.attn_implementation or default_implementation(
            args.device, attention_dropout=config.attention_dropout
        )
        self.packed_forward = keeps_documents_apart(target_model, config.target_layer_ids) if args.packing else None
        vocab_size = target_model.get_input_embeddings().weight.shape[0]

        def prepare(rows):
            if rows is None:
                return None
            prepared = prepare_dataset(
                rows, processing_class, max_length=args.max_length, enable_thinking=config.enable_thinking
            )
            check_token_ids(prepared, vocab_size)
            return prepared

        train = prepare(train_dataset)
        if isinstance(eval_dataset, dict):
            evaluation = {
                name: self._dataset(args, prepare(rows), f"eval-{name}") for name, rows in eval_dataset.items()
            }
        else:
            evaluation = self._dataset(args, prepare(eval_dataset), "eval")
        counts = None
        if train is not None and (args.loss_vocab_size or args.frequent_tokens):
            counts = count_tokens(train)
        if counts and args.frequent_tokens is not None:
            drafter.frequent_token_ids = most_frequent(counts, args.frequent_tokens)
        super().__init__(
            model=model,
            args=args,
            data_collator=build_collator(
                counts,
                args=args,
                config=config,
                gamma=self.decay_gamma,
                vocab_size=vocab_size,
                compiled=self.attn_implementation == "flex_attention",
            ),
            train_dataset=self._dataset(args, train, "train"),
            eval_dataset=evaluation,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.add_callback(_TrainingRun(self))
        self.model_accepts_loss_kwargs = True  # `_get_num_items_in_batch` gives the global normaliser
        self.loss_is_scaled_for_ga = True
        self.head = OutputHead(self.target_model, config)
        # The target's own logits: without the multiplier and softcap that a drafter's config may bring.
        plain = copy.copy(config)
        plain.output_multiplier = plain.final_logit_softcapping = None
        self.target_head = OutputHead(self.target_model, plain)
        self.counts = RunningCounts(places=config.block_size - self.first_slot, device=args.device)

    def _dataset(self, args: DFlashTrainingArguments, examples: Dataset | None, split: str) -> DrafterDataset | None:
        if examples is None:
            return None
        return build_dataset(
            examples,
            split=split,
            args=args,
            target=self.target_model,
            tokenizer=self._tokenizer,
            layer_ids=self.drafter_config.target_layer_ids,
        )

    def get_eval_dataloader(self, eval_dataset=None):
        """As transformers makes it, but the last batch is not filled up with examples that were counted already.

        Args:
            eval_dataset: other data, in a form that `prepare_dataset` takes, or the name of one of the evaluation sets.
        """
        if isinstance(eval_dataset, Dataset):
            rows = prepare_dataset(
                eval_dataset,
                self.processing_class,
                max_length=self.args.max_length,
                enable_thinking=self.drafter_config.enable_thinking,
            )
            eval_dataset = DrafterDataset(rows)
        even_batches, self.accelerator.even_batches = self.accelerator.even_batches, False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.accelerator.even_batches = even_batches

    def get_test_dataloader(self, test_dataset):
        """As `get_eval_dataloader`."""
        return self.get_eval_dataloader(test_dataset)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW as transformers makes it, or Muon for the matrices (`args.optimizer`)."""
        if self.optimizer is not None or self.args.optimizer == "adamw":
            return super().create_optimizer() if model is None else super().create_optimizer(model)
        trained = [p for p in (self.model if model is None else model).parameters() if p.requires_grad]
        self.optimizer = MuonWithAdamW(
            [p for p in trained if p.dim() == 2],
            [p for p in trained if p.dim() != 2],
            lr=self.args.muon_learning_rate,
            adamw_lr=self.args.learning_rate,
            weight_decay=self.args.weight_decay,
            iteration_dtype=torch.float32 if self.args.muon_fp32 else torch.bfloat16,
        )
        return self.optimizer

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        """The loss's normaliser over the accumulation window and over all ranks."""
        total = sum(batch["loss_normaliser"].to(device) for batch in batch_samples)
        total = torch.as_tensor(total, dtype=torch.float32, device=device)
        if self.args.world_size > 1:
            total = self.accelerator.gather(total).sum()
        return total

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ):
        """Weighted losses of all blocks of a batch, divided by `num_items_in_batch` (the global normaliser)."""
        features, final_states = self._target_states(inputs, with_final=self.args.objective != "data")
        hidden = self._draft(model, inputs, features)
        loss, hits = batch_loss(
            hidden=hidden,
            batch=inputs,
            final_states=final_states,
            head=self.head,
            target_head=self.target_head,
            args=self.args,
        )
        if model.training:
            supervised = inputs["loss_weights"] > 0
            blocks = count_blocks(hits=hits, supervised=supervised, keep=inputs["keep"], first_slot=self.first_slot)
            self.counts.add(tokens=inputs["attention_mask"].sum(), counts=blocks)
        normaliser = inputs["loss_normaliser"] if num_items_in_batch is None else num_items_in_batch
        # A batch without any label has weight 0: its loss is 0, and every rank still takes part in the step.
        loss = loss / normaliser.clamp(min=torch.finfo(torch.float32).tiny)
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # data parallelism averages gradients over the ranks
        return (loss, {"hidden_states": hidden}) if return_outputs else loss

    def _target_states(
        self, inputs: dict[str, torch.Tensor], *, with_final: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Features and, if asked for, final hidden states of a batch: stored ones, or the target's forward pass."""
        if "features" not in inputs:
            features, final_states = states_of_batch(
                self.target_model,
                self.drafter_config.target_layer_ids,
                inputs,
                packed_forward=bool(self.packed_forward),
            )
            return features, final_states if with_final else None
        if with_final and "final_hidden_states" not in inputs:
            raise DFlashError(
                f"objective {self.args.objective!r} needs the target's final hidden states, which this feature store "
                "does not hold. Build one that keeps them, or use features='online' or 'memory'."
            )
        return inputs["features"], inputs["final_hidden_states"] if with_final else None

    def _draft(self, model: nn.Module, inputs: dict[str, torch.Tensor], features: torch.Tensor) -> torch.Tensor:
        return draft_blocks(
            model,
            config=self.drafter_config,
            target=self.target_model,
            batch=inputs,
            features=features,
            implementation=self.attn_implementation,
        )

    def draft_hidden_states(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Hidden states of all blocks of a batch, `[b, N, B, H]`, in one draft forward pass.

        Args:
            model: the drafter, wrapped or not.
            inputs: a batch of `DFlashDataCollator`.
        """
        return self._draft(model, inputs, self._target_states(inputs)[0])

    def evaluation_loop(
        self,
        dataloader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The drafter's loss, accuracy by slot and true block acceptance length, over the whole vocabulary.

        Whatever the training objective, the loss is the decayed cross-entropy of the data's tokens: runs compare.
        """
        model = self._wrap_model(self.model, training=False).eval()
        started = time.perf_counter()
        total = self.counts.sums.new_zeros(len(self.counts.sums) + 1)  # a rank without a batch takes part too
        for inputs in dataloader:
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad(), self.accelerator.autocast():
                sums = evaluation_sums(
                    hidden=self.draft_hidden_states(model, inputs),
                    batch=inputs,
                    head=self.head,
                    gamma=self.decay_gamma,
                    chunk_rows=self.args.head_chunk_rows,
                    first_slot=self.first_slot,
                )
            total += sums
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        loss, weight, examples, *blocks = self.accelerator.reduce(total, reduction="sum").tolist()
        metrics = {"loss": loss / max(weight, 1e-12), **acceptance_metrics(blocks)}
        self.counts.leave_out(time.perf_counter() - started)  # an evaluation within a run is no training time
        return EvalLoopOutput(
            predictions=None,
            label_ids=None,
            metrics={f"{metric_key_prefix}_{key}": value for key, value in metrics.items()},
            num_samples=int(examples),
        )

    def save_merged(self, output_dir: str | Path) -> None:
        """Write a whole drafter in the published layout, the adapter added into its weights.

        Args:
            output_dir: folder to write.

        Raises:
            DFlashError: without an adapter; `save_model` writes the drafter then.
        """
        model = self.accelerator.unwrap_model(self.model)
        if not isinstance(model, PeftModel):
            raise DFlashError("save_merged: this trainer has no adapter (peft_config). Use save_model.")
        if self.is_world_process_zero():
            merged(model).save_pretrained(output_dir)

    def save_curve(self, path: str | Path | None = None) -> None:
        """Draw loss and acceptance length against updates, as far as they were logged.

        Args:
            path: an SVG file; `training_curve.svg` in `args.output_dir` by default.
        """
        write_curve(self.state.log_history, Path(path or Path(self.args.output_dir, "training_curve.svg")))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what the training steps since the last training log counted (`RunningCounts`)."""
        if "loss" in logs:
            logs.update(self.counts.take(lambda sums: self.accelerator.reduce(sums, reduction="sum")))
        super().log(logs, start_time)
