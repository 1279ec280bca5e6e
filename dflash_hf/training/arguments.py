"""`DFlashTrainingArguments`: transformers' arguments with the paper's defaults, and what only a drafter needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import SchedulerType, TrainingArguments

from ..errors import DFlashError
from .collator import WEIGHTINGS
from .losses import OBJECTIVES
from .masks import IMPLEMENTATIONS


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """Arguments of `DFlashTrainer`.

    Defaults follow DFlash (arXiv 2602.06036): learning rate 6e-4 with cosine decay and 4% warm-up, 6 epochs, gradient
    clip 1.0, 3,072 tokens and 512 anchors an example.

    Raises:
        DFlashError: for values out of range.
    """

    learning_rate: float = field(default=6e-4, metadata={"help": "Learning rate of AdamW (with Muon: of the norms)."})
    num_train_epochs: float = field(default=6.0, metadata={"help": "Passes over the training data."})
    lr_scheduler_type: SchedulerType | str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up: steps, or a share of all steps if below 1."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradient clip."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Kept off: looking for NaN waits for the device in every step."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Kept off: the collator needs every column."})

    max_length: int = field(default=3072, metadata={"help": "Examples are cut after this many tokens."})
    num_anchors: int = field(default=512, metadata={"help": "Blocks drawn from each example and epoch."})
    decay_gamma: float | None = field(
        default=None,
        metadata={"help": "Loss weight of slot k is exp(-(k-1)/gamma). Default 4 / 5 / 7 for block size 8 / 10 / 16."},
    )
    objective: str = field(
        default="data",
        metadata={
            "help": "What a slot learns: 'data' (the token of the data), 'target_argmax' (the target's likeliest "
            "token) or 'target_kl' (the target's distribution)."
        },
    )
    loss_weighting: str = field(
        default="decay",
        metadata={
            "help": "Weights of a block's slots: 'decay' (decay_gamma), 'uniform', or 'dpace' (from the drafter's own "
            "confidence; the loss is then per block)."
        },
    )
    dpace_alpha: float = field(default=0.5, metadata={"help": "Smoothing of D-PACE's confidences, in (0, 1]."})
    contiguous_prefix: bool = field(
        default=False, metadata={"help": "Supervise a block up to its first unsupervised token only."}
    )
    packing: bool = field(
        default=False,
        metadata={
            "help": "Several short training examples in one row. Batch sizes then count rows. Blocks never cross from "
            "one example into another, and the target's features are those of each example alone."
        },
    )
    packed_length: int | None = field(default=None, metadata={"help": "Tokens in a packed row; max_length by default."})
    attn_implementation: str | None = field(
        default=None,
        metadata={
            "help": "Attention of the training blocks: 'flex_attention' (default on CUDA), 'dflash_blocks' (default "
            "elsewhere), 'sdpa' or 'eager' (dense masks)."
        },
    )
    init_from_target: bool = field(
        default=False, metadata={"help": "Start the drafter from the target's own last layers."}
    )
    head_chunk_rows: int = field(default=512, metadata={"help": "Draft slots whose logits exist at once."})
    loss_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Loss over this many most frequent tokens of the training data only; rarer labels are dropped. "
            "Cheaper on a CPU. Evaluation always uses the whole vocabulary."
        },
    )
    loss_vocab_negatives: int = field(
        default=2048,
        metadata={"help": "With loss_vocab_size: other tokens drawn for each batch, so that they are pushed down too."},
    )
    frequent_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Give the drafter an index of this many most frequent tokens of the training data: its proposals "
            "come from them, which makes a draft cheaper. Loss and evaluation do not look at it."
        },
    )
    optimizer: str = field(
        default="adamw",
        metadata={"help": "'adamw' (transformers' own, see optim) or 'muon' (Muon for matrices, AdamW for the rest)."},
    )
    muon_learning_rate: float = field(default=2e-3, metadata={"help": "Learning rate of Muon's matrices."})
    muon_fp32: bool = field(
        default=False, metadata={"help": "Run Muon's iteration in fp32 (faster on CPUs without bf16 units)."}
    )
    features: str = field(
        default="online",
        metadata={"help": "'online' (target runs in every step), 'memory' (computed once) or 'disk' (features_dir)."},
    )
    features_dir: str | None = field(default=None, metadata={"help": "Folder of the feature store."})

    def __post_init__(self):
        super().__post_init__()
        self.label_names = ["labels"]
        self.remove_unused_columns = False
        if self.features_dir is not None and self.features == "online":
            self.features = "disk"
        _one_of("optimizer", self.optimizer, ("adamw", "muon"))
        _one_of("objective", self.objective, OBJECTIVES)
        _one_of("loss_weighting", self.loss_weighting, WEIGHTINGS)
        if self.attn_implementation is not None:
            _one_of("attn_implementation", self.attn_implementation, IMPLEMENTATIONS)
        _one_of("features", self.features, ("online", "memory", "disk"))
        if self.features == "disk" and self.features_dir is None:
            raise DFlashError("features='disk' needs features_dir, the folder to keep them in.")
        for name in ("max_length", "num_anchors", "head_chunk_rows"):
            if getattr(self, name) < 1:
                raise DFlashError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.decay_gamma is not None and self.decay_gamma <= 0:
            raise DFlashError(f"decay_gamma must be positive, got {self.decay_gamma}. Larger values decay more slowly.")
        if not 0 < self.dpace_alpha <= 1:
            raise DFlashError(f"dpace_alpha must be in (0, 1], got {self.dpace_alpha}. The method's own value is 0.5.")
        if self.packed_length is not None and self.packed_length < self.max_length:
            raise DFlashError(
                f"packed_length {self.packed_length} is shorter than max_length {self.max_length}, so an example might "
                "not fit. Lower max_length, or leave packed_length out."
            )
        if self.loss_vocab_size is not None and self.loss_vocab_size < 2:
            raise DFlashError(f"loss_vocab_size must be at least 2, got {self.loss_vocab_size}.")
        if self.frequent_tokens is not None and self.frequent_tokens < 1:
            raise DFlashError(f"frequent_tokens must be at least 1, got {self.frequent_tokens}.")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise DFlashError(f"{name} is {value!r}; it must be one of {', '.join(choices)}.")
