"""`DFlashTrainer`: transformers' Trainer for a drafter, with a frozen target beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from ..configuration_dflash import DFlashConfig
from ..data.chat import check_token_ids, prepare_dataset
from ..data.features import build_feature_store, compute_features
from ..data.token_counts import count_tokens, most_frequent
from ..errors import DFlashError
from ..modeling_dflash import DFlashDraftModel
from ..target import FeatureCapture, OutputHead, check_compatibility, embed_tokens
from .anchors import IGNORE, default_gamma, slot_weights
from .arguments import DFlashTrainingArguments
from .collator import DFlashDataCollator, DrafterDataset
from .losses import LossTerms, chunked_cross_entropy
from .masks import dense_mask, make_mask_mod
from .metrics import count_blocks
from .muon import MuonWithAdamW
from .publishing import PublishesDrafter
from .support import require_trainable


class _EpochOfAnchors(TrainerCallback):
    """Tells the training data its epoch: accelerate's loader does not with several ranks or after skipped batches."""

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        train_dataloader.dataset.set_epoch(int(state.epoch))


class DFlashTrainer(PublishesDrafter, Trainer):
    """Trains a drafter against a frozen target (DFlash, arXiv 2602.06036).

    The target's features are tapped (in every step, or once: `args.features`), blocks are drawn at random anchors of
    the response, and one draft forward pass predicts all of them. The loss is the decayed cross-entropy divided by the
    sum of weights over all ranks and the whole accumulation window, so that an update does not depend on how a batch
    is split.

    Args:
        model: the drafter. Parameters in half precision are cast to fp32 (under AdamW a bf16 norm stays at 1.0); use
            `args.bf16` for autocast.
        target_model: a causal language model, frozen here. It is not part of what is saved.
        args: `DFlashTrainingArguments`.
        train_dataset, eval_dataset: `datasets.Dataset` in a form that `prepare_dataset` takes; for evaluation also a
            dictionary of them.
        processing_class: the target's tokenizer, needed for messages.
        callbacks, optimizers: as in transformers' Trainer.

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
    ):
        if not isinstance(args, DFlashTrainingArguments):
            raise DFlashError(f"args is a {type(args).__name__}; DFlashTrainer needs DFlashTrainingArguments.")
        config = getattr(model, "config", None)
        if not isinstance(config, DFlashConfig):
            raise DFlashError(f"model is a {type(model).__name__}; DFlashTrainer trains a DFlashDraftModel.")
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

        def prepare(rows):
            if rows is None:
                return None
            prepared = prepare_dataset(
                rows, processing_class, max_length=args.max_length, enable_thinking=config.enable_thinking
            )
            check_token_ids(prepared, target_model.get_input_embeddings().weight.shape[0])
            return prepared

        train = prepare(train_dataset)
        if isinstance(eval_dataset, dict):
            evaluation = {
                name: self._with_features(args, config, prepare(rows), f"eval-{name}")
                for name, rows in eval_dataset.items()
            }
        else:
            evaluation = self._with_features(args, config, prepare(eval_dataset), "eval")
        frequent = None
        if train is not None and (args.loss_vocab_size or args.frequent_tokens):
            counts = count_tokens(train)
            if args.loss_vocab_size is not None:
                frequent = most_frequent(counts, args.loss_vocab_size)
            if args.frequent_tokens is not None:
                model.frequent_token_ids = most_frequent(counts, args.frequent_tokens)
        collator = DFlashDataCollator(
            block_size=config.block_size,
            num_anchors=args.num_anchors,
            gamma=args.decay_gamma or default_gamma(config.block_size),
            seed=args.data_seed if args.data_seed is not None else args.seed,
            frequent=frequent,
            negatives=args.loss_vocab_negatives,
            vocab_size=target_model.get_input_embeddings().weight.shape[0],
        )
        super().__init__(
            model=model,
            args=args,
            data_collator=collator,
            train_dataset=self._with_features(args, config, train, "train"),
            eval_dataset=evaluation,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.add_callback(_EpochOfAnchors())
        self.model_accepts_loss_kwargs = True  # `_get_num_items_in_batch` gives the global normaliser
        self.loss_is_scaled_for_ga = True
        self.head = OutputHead(self.target_model, config)
        self._hit_sum = torch.zeros((), device=args.device)
        self._row_count = torch.zeros((), device=args.device)

    def _with_features(
        self, args: DFlashTrainingArguments, config: DFlashConfig, examples: Dataset | None, split: str
    ) -> DrafterDataset | None:
        if examples is None or args.features == "online":
            return None if examples is None else DrafterDataset(examples)
        if args.features == "disk":
            progress = logging.tqdm(
                total=len(examples), desc=f"Features of the {split} examples", disable=args.disable_tqdm
            )
            with args.main_process_first(desc="features"), progress:
                store = build_feature_store(
                    f"{args.features_dir}/{split}",
                    target=self.target_model,
                    dataset=examples,
                    layer_ids=config.target_layer_ids,
                    tokenizer=self._tokenizer,
                    on_progress=lambda done, count: progress.update(done - progress.n),
                )
            return DrafterDataset(examples, store)
        with FeatureCapture(self.target_model, config.target_layer_ids) as capture:
            device = self.target_model.device
            rows = (torch.tensor([ids], device=device) for ids in examples["input_ids"])
            features = [compute_features(self.target_model, capture, row)[0].cpu() for row in rows]
        return DrafterDataset(examples, features)

    def get_eval_dataloader(self, eval_dataset=None):
        """As transformers makes it, but the last batch is not filled up with examples that were counted already.

        Args:
            eval_dataset: other data, in a form that `prepare_dataset` takes, or the name of one of the evaluation sets.
        """
        if isinstance(eval_dataset, Dataset):
            thinking = self.accelerator.unwrap_model(self.model).config.enable_thinking
            rows = prepare_dataset(
                eval_dataset, self.processing_class, max_length=self.args.max_length, enable_thinking=thinking
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
        """The sum of loss weights over the accumulation window and over all ranks."""
        total = sum(batch["loss_weights"].sum().to(device) for batch in batch_samples)
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
        """Decayed cross-entropy of all blocks of a batch, divided by `num_items_in_batch` (the global weight sum)."""
        hidden = self.draft_hidden_states(model, inputs)
        active = inputs["active_rows"]
        labels = inputs["labels"].flatten()[active]
        token_ids = inputs.get("loss_token_ids")
        if token_ids is None:
            logits_of = self.head
        else:
            labels = torch.searchsorted(token_ids, labels)
            weight, bias = self.head.rows(token_ids)

            def logits_of(rows):
                return self.head.transform(nn.functional.linear(rows.to(weight.dtype), weight, bias))

        terms = chunked_cross_entropy(
            rows=hidden.flatten(0, -2)[active],
            labels=labels,
            weights=inputs["loss_weights"].flatten()[active],
            logits_of=logits_of,
            chunk_rows=self.args.head_chunk_rows,
        )
        self._hit_sum += terms.hits.sum()
        self._row_count += terms.hits.numel()
        normaliser = inputs["loss_weights"].sum() if num_items_in_batch is None else num_items_in_batch
        # A batch without any label has weight 0: its loss is 0, and every rank still takes part in the step.
        loss = terms.weighted_sum / normaliser.clamp(min=torch.finfo(torch.float32).tiny)
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # data parallelism averages gradients over the ranks
        return (loss, {"hidden_states": hidden}) if return_outputs else loss

    def draft_hidden_states(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Hidden states of all blocks of a batch, `[b, N, B, H]`, in one draft forward pass.

        Args:
            model: the drafter, wrapped or not.
            inputs: a batch of `DFlashDataCollator`.
        """
        config = self.accelerator.unwrap_model(self.model).config
        input_ids, anchors = inputs["input_ids"], inputs["anchors"]
        batch_size, context_length = input_ids.shape
        slots = config.block_size
        features = inputs.get("features")
        if features is None:
            with FeatureCapture(self.target_model, config.target_layer_ids) as capture:
                features = compute_features(self.target_model, capture, input_ids, inputs["attention_mask"])
        noise_ids = torch.full((*anchors.shape, slots), config.mask_token_id, device=input_ids.device)
        noise_ids[:, :, 0] = input_ids.gather(1, anchors)
        noise = embed_tokens(self.target_model, noise_ids.flatten(1), scale=config.input_embedding_scale)
        offsets = torch.arange(slots, device=input_ids.device)
        block_positions = (anchors[:, :, None] + offsets).flatten(1)
        context_positions = torch.arange(context_length, device=input_ids.device).expand(batch_size, -1)
        masks = {
            layer_type: dense_mask(
                make_mask_mod(
                    anchors=anchors,
                    keep=inputs["keep"],
                    context_length=context_length,
                    block_size=slots,
                    is_causal=config.layer_is_causal(config.layer_types.index(layer_type)),
                    sliding_window=config.sliding_window if layer_type == "sliding_attention" else None,
                ),
                batch_size=batch_size,
                num_queries=block_positions.shape[1],
                num_keys=context_length + block_positions.shape[1],
                device=input_ids.device,
            )
            for layer_type in set(config.layer_types)
        }
        output = model(
            noise_embeds=noise.to(input_ids.device),
            context_hidden_states=features,
            position_ids=torch.cat([context_positions, block_positions], dim=1),
            attention_mask=masks,
        )
        return output.last_hidden_state.view(batch_size, anchors.shape[1], slots, -1)

    def evaluation_loop(
        self,
        dataloader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The drafter's loss, accuracy by slot and true block acceptance length, over the whole vocabulary."""
        model = self._wrap_model(self.model, training=False).eval()
        slots = self.accelerator.unwrap_model(self.model).config.block_size - 1
        device = self.args.device
        # loss sum, weight sum, correct prefixes, blocks, examples; then hits and counts by slot
        exact = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        sums = torch.zeros(5 + 2 * slots, dtype=exact, device=device)
        for inputs in dataloader:
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad(), self.accelerator.autocast():
                terms, hits = self._evaluate_batch(model, inputs)
            counts = count_blocks(hits=hits, supervised=inputs["labels"] != IGNORE, keep=inputs["keep"])
            weights = slot_weights(labels=inputs["labels"], gamma=self.data_collator.gamma)
            sums[0] += terms.weighted_sum
            sums[1] += weights.sum()
            sums[2] += counts.correct_prefix_sum
            sums[3] += counts.block_count
            sums[4] += len(inputs["input_ids"])
            sums[5 : 5 + slots] += counts.hit_sum
            sums[5 + slots :] += counts.slot_count
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        sums = self.accelerator.reduce(sums, reduction="sum").tolist()
        hit_sum, slot_count = sums[5 : 5 + slots], sums[5 + slots :]
        metrics = {
            "loss": sums[0] / max(sums[1], 1e-12),
            "block_acceptance_length": 1 + sums[2] / max(sums[3], 1),
            "slot_accuracy": sum(hit_sum) / max(sum(slot_count), 1),
        }
        for slot, (hit, count) in enumerate(zip(hit_sum, slot_count), start=1):
            metrics[f"slot_accuracy_{slot}"] = hit / max(count, 1)
        return EvalLoopOutput(
            predictions=None,
            label_ids=None,
            metrics={f"{metric_key_prefix}_{key}": value for key, value in metrics.items()},
            num_samples=int(sums[4]),
        )

    def _evaluate_batch(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[LossTerms, torch.Tensor]:
        hidden = self.draft_hidden_states(model, inputs)
        labels = inputs["labels"]
        active = (labels != IGNORE).flatten().nonzero().flatten()
        weights = slot_weights(labels=labels, gamma=self.data_collator.gamma)
        terms = chunked_cross_entropy(
            rows=hidden.flatten(0, -2)[active],
            labels=labels.flatten()[active],
            weights=weights.flatten()[active],
            logits_of=self.head,
            chunk_rows=self.args.head_chunk_rows,
        )
        hits = torch.zeros(labels.numel(), dtype=torch.bool, device=labels.device)
        hits[active] = terms.hits
        return terms, hits.view_as(labels)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds `slot_accuracy` of the training slots since the last training log."""
        if "loss" in logs:
            totals = self.accelerator.reduce(torch.stack([self._hit_sum, self._row_count]), reduction="sum").tolist()
            logs["slot_accuracy"] = totals[0] / max(totals[1], 1)
            self._hit_sum.zero_()
            self._row_count.zero_()
        super().log(logs, start_time)
