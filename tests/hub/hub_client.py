"""What a user does with the Hub, in a process of its own that is started with HF_ENDPOINT set (see test_hub)."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import torch
from conftest import tiny_drafter, tiny_target
from datasets import Dataset
from huggingface_hub import constants

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.model_card import card_data, fill_card

TOKEN = "hf_write"

# What is written to disk before a download is interrupted; 10 MB by default, more than our whole files.
CHUNK = constants.DOWNLOAD_CHUNK_SIZE = 512


def environment() -> tuple[str, bool]:
    return constants.ENDPOINT, constants.HF_HUB_DISABLE_XET


def outcome(function, *args, **kwargs):
    """`("ok", result)`, or the error as text with the names of its classes; errors of the client do not pickle."""
    try:
        return "ok", function(*args, **kwargs)
    except Exception as error:  # everything is reported to the test
        return [kind.__name__ for kind in type(error).__mro__], str(error)


class Warnings(logging.Handler):
    """Collects what transformers' loggers warn about."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def fingerprint(model) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def drafter_of(seed: int):
    return tiny_drafter(tiny_target(), seed=seed)


def push(repo_id: str, *, seed: int, token: str | None = TOKEN, own_card: bool = False, index=None, **options):
    """Push the drafter of that seed; its fingerprint and the warnings."""
    drafter = drafter_of(seed)
    drafter.config.target_name_or_path = "someone/target"
    drafter.frequent_token_ids = index
    if own_card:
        drafter.config.enable_thinking = False
        data = card_data(name=repo_id, base_model="someone/target", license="mit")
        options["card"] = fill_card(data=data, config=drafter.config, num_parameters=1, dtype="float32")
    warnings = Warnings()
    logger = logging.getLogger("dflash_hf.publishing")
    logger.addHandler(warnings)
    try:
        drafter.push_to_hub(repo_id, token=token, **options)
    finally:
        logger.removeHandler(warnings)
    return fingerprint(drafter), warnings.texts


def save_and_push(folder: Path, repo_id: str, *, seed: int, **options):
    drafter = drafter_of(seed)
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(folder, push_to_hub=True, repo_id=repo_id, token=TOKEN, **options)
    return fingerprint(drafter)


def load(repo_id: str, **options):
    """Fingerprint of a drafter from the Hub."""
    return fingerprint(DFlashDraftModel.from_pretrained(repo_id, **options))


def index_of(repo_id: str, **options) -> list[int] | None:
    """The index of frequent tokens of a drafter from the Hub."""
    index = DFlashDraftModel.from_pretrained(repo_id, **options).frequent_token_ids
    return None if index is None else index.tolist()


def load_offline(repo_id: str, **options):
    """The same with the network forbidden."""
    return load(repo_id, local_files_only=True, **options)


def incomplete_files(cache: Path) -> list[str]:
    return [str(path) for path in cache.rglob("*.incomplete")]


def trainer_push(folder: Path, repo_id: str, *, steps: int = 2, push_options=None, after_first_save=None, **arguments):
    """Train a little and push; fingerprint of the trained drafter."""
    target = tiny_target()
    rows = [{"input_ids": list(range(5, 25)), "loss_mask": [0] * 4 + [1] * 16}] * 4
    options = DFlashTrainingArguments(
        str(folder),
        max_steps=steps,
        num_anchors=2,
        report_to="none",
        hub_model_id=repo_id,
        hub_token=TOKEN,
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", **arguments},
    )
    trainer = DFlashTrainer(tiny_drafter(target), target, options, train_dataset=Dataset.from_list(rows))
    (folder / "features").mkdir(parents=True, exist_ok=True)
    (folder / "features" / "big.safetensors").write_bytes(b"x" * 2000)
    trainer.train()
    trainer.push_to_hub(**(push_options or {}))
    return fingerprint(trainer.accelerator.unwrap_model(trainer.model))


def generates(repo_id: str) -> tuple[list[int], list[int]]:
    """Greedy tokens with a drafter from the Hub, and without."""
    drafter = DFlashDraftModel.from_pretrained(repo_id)
    target = tiny_target()
    prompt = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 12, "do_sample": False}
    drafted = target.generate(prompt, assistant_model=drafter, **options)
    return drafted.tolist()[0], target.generate(prompt, **options).tolist()[0]
