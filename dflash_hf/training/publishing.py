"""What `DFlashTrainer` says about its drafter, and how it goes to the Hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from transformers.utils import logging

from ..model_card import (
    card_data,
    card_for_repository,
    fill_card,
    hub_id,
    is_untouched,
    training_curve,
    write_card,
    write_text,
)
from ..publishing import EARLIER_WEIGHTS, commit_folder, remote_card
from .lora import base_drafter

logger = logging.get_logger(__name__)

# Of the output folder: pickles stay at home, as do subfolders (checkpoints, feature stores).
_NOT_UPLOADED = ("_*", "*.bin", "*.pt", "*.tmp")


def _public_name(dataset: str) -> str:
    return Path(dataset).name if os.path.exists(dataset) else dataset


class PublishesDrafter:
    """Cards and uploads of a Trainer whose model is a drafter."""

    def create_model_card(
        self,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
        command: str | None = None,
    ) -> None:
        """Write the drafter's card into `args.output_dir`, unless a README.md is there that a person wrote or edited.

        The arguments are those of transformers' Trainer; `language`, `license`, `tags`, `model_name`, `finetuned_from`
        (the target) and `dataset` are used.

        Args:
            command: the command that trained the drafter.
        """
        path = Path(self.args.output_dir) / "README.md"
        if not self.is_world_process_zero() or (path.exists() and not is_untouched(path.read_text(encoding="utf-8"))):
            return
        drafter = base_drafter(self.accelerator.unwrap_model(self.model))
        datasets = [dataset] if isinstance(dataset, str) else dataset or []
        args = self.args
        unit = "packed rows" if args.packing else "examples"
        card = fill_card(
            data=card_data(
                name=self.hub_model_id or model_name or Path(args.output_dir).name,
                base_model=finetuned_from or drafter.config.target_name_or_path,
                license=license,
                language=language,
                datasets=[name for name in datasets if hub_id(name)] or None,
                tags=[tags] if isinstance(tags, str) else tags or (),
            ),
            config=drafter.config,
            num_parameters=drafter.num_parameters(),
            frequent_tokens=drafter.num_frequent_tokens,
            dtype=str(drafter.dtype).removeprefix("torch."),
            training={
                "data": ", ".join([*map(_public_name, datasets), f"{len(self.train_dataset.examples)} examples"]),
                "command": command,
                "description": (
                    f"{self.state.global_step} updates of {args.train_batch_size * args.gradient_accumulation_steps} "
                    f"{unit} a process on {args.world_size} process(es), up to {args.num_anchors} blocks an example, "
                    f"{args.optimizer}, learning rate {args.learning_rate:g}, seed {args.seed}."
                ),
                "curve": training_curve(self.state.log_history),
            },
        )
        write_card(card, path)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        overwrite_card: bool = False,
        **kwargs: Any,
    ) -> CommitInfo | Any:
        """Upload the drafter, the tokenizer and the card from `args.output_dir` to `args.hub_model_id`.

        As transformers' Trainer does, except that pickles (`training_args.bin`) and subfolders (checkpoints, feature
        stores) are left out, weight files of an earlier upload are replaced, and a README.md of the repository that a
        person wrote or edited stays.

        Args:
            commit_message, blocking, token, revision, private: as in transformers' Trainer.
            overwrite_card: replace the repository's README.md in any case.
            kwargs: for `create_model_card`.

        Returns:
            The commit; a `Future` of it if not `blocking`; None on other processes than the first.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token if token is not None else self.args.hub_token
        if self.hub_model_id is None:
            private_given = {} if private is None else {"private": private}  # not known before transformers 5.24
            self.init_hf_repo(token=token, **private_given)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**kwargs)
        revision = revision if revision is not None else self.args.hub_revision
        self._finish_current_push()
        api = HfApi(library_name="dflash_hf", token=token)
        head = api.model_info(self.hub_model_id, revision=revision).sha
        ignored = list(_NOT_UPLOADED)
        readme = (Path(self.args.output_dir) / "README.md").read_text(encoding="utf-8")
        remote = remote_card(self.hub_model_id, revision=head, token=token)
        text, warning = card_for_repository(generated=readme, local=readme, remote=remote, overwrite=overwrite_card)
        if text is None:
            ignored.append("README.md")
            logger.warning(f"{self.hub_model_id}: {warning}")
        return commit_folder(
            api,
            repo_id=self.hub_model_id,
            folder=Path(self.args.output_dir),
            head=head,
            revision=revision,
            ignored=ignored,
            removed=[*EARLIER_WEIGHTS, "training_args.bin"],
            commit_message=commit_message or "End of training",
            run_as_future=not blocking,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads during the training (`hub_strategy`) take the whole folder: first see to the repository's card."""
        if self.is_world_process_zero() and not self._adopt_remote_card():
            logger.warning(
                f"{self.hub_model_id}: this checkpoint is not uploaded, because its README.md and the one in "
                f"{self.args.output_dir} were both edited. Make them equal, or move one away."
            )
            return
        super()._push_from_checkpoint(checkpoint_folder)

    def _adopt_remote_card(self) -> bool:
        """Take over a README.md that a person edited in the repository; False if the local one was edited as well."""
        path = Path(self.args.output_dir) / "README.md"
        local = path.read_text(encoding="utf-8") if path.exists() else None
        if local is None:
            return True  # nothing of ours would be uploaded over it
        remote = remote_card(self.hub_model_id, revision=self.args.hub_revision, token=self.args.hub_token)
        if remote is None or is_untouched(remote) or remote == local:
            return True
        if not is_untouched(local):
            return False
        write_text(path, remote)
        return True
