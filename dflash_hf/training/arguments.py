"""`DFlashTrainingArguments`: transformers' arguments with the paper's defaults, and what only a drafter needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import SchedulerType, TrainingArguments

from ..errors import DFlashError


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
    remove_unused_columns: bool = field(default=False, metadata={"help": "Kept off: the collator needs every column."})

    max_length: int = field(default=3072, metadata={"help": "Examples are cut after this many tokens."})
    num_anchors: int = field(default=512, metadata={"help": "Blocks drawn from each example and epoch."})
    decay_gamma: float | None = field(
        default=None,
        metadata={"help": "Loss weight of slot k is exp(-(k-1)/gamma). Default 4 / 5 / 7 for block size 8 / 10 / 16."},
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
        _one_of("features", self.features, ("online", "memory", "disk"))
        if self.features == "disk" and self.features_dir is None:
            raise DFlashError("features='disk' needs features_dir, the folder to keep them in.")
        for name in ("max_length", "num_anchors", "head_chunk_rows"):
            if getattr(self, name) < 1:
                raise DFlashError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.decay_gamma is not None and self.decay_gamma <= 0:
            raise DFlashError(f"decay_gamma must be positive, got {self.decay_gamma}. Larger values decay more slowly.")
        if self.loss_vocab_size is not None and self.loss_vocab_size < 2:
            raise DFlashError(f"loss_vocab_size must be at least 2, got {self.loss_vocab_size}.")
        if self.frequent_tokens is not None and self.frequent_tokens < 1:
            raise DFlashError(f"frequent_tokens must be at least 1, got {self.frequent_tokens}.")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise DFlashError(f"{name} is {value!r}; it must be one of {', '.join(choices)}.")
