"""A drafter on disk and on the Hub: load any published family, save in the family's layout, push with a card."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, ModelCard

from .checkpoints import FAMILIES, name_on_disk
from .configuration_dflash import DFlashConfig
from .loading import own_generation_config, require_complete, require_consistent
from .publishing import push_drafter
from .token_index import read_index, write_index
from .weight_files import HUB_KEYWORDS, pin_files, remove_stale_weights

# The costs that `calibrate` measured.
ROUND_COSTS = "dflash_round_costs"
# The newest context rows that a block sees.
CONTEXT_WINDOW = "dflash_context_window"
# What of a drafter's generation_config is its own; special tokens are the target's business.
_DRAFTING_KNOBS = {
    "block_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "prompt_lookup_num_tokens",
    ROUND_COSTS,
    CONTEXT_WINDOW,
}
# What `save_pretrained(push_to_hub=True)` hands on to `push_to_hub`.
_PUSH_KEYWORDS = (
    "repo_id",
    "commit_message",
    "commit_description",
    "private",
    "revision",
    "create_pr",
    "tags",
    "card",
    "overwrite_card",
)


class DrafterFiles:
    """`from_pretrained`, `save_pretrained` and `push_to_hub` of a drafter; stands before `PreTrainedModel`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """Load a drafter of any supported family from a folder or a Hub repository, without remote code.

        Takes the keywords of `PreTrainedModel.from_pretrained` (`dtype`, `device_map`, `revision`, `token`, ...).
        `use_safetensors=False` allows pickled weights (`pytorch_model.bin`, read with `weights_only=True`).

        Raises:
            CheckpointError: if the family is not supported, a tensor is missing, unknown or of the wrong shape (a
                half-loaded drafter would accept nothing and say nothing), a weight file is damaged, or the weights are
                pickled.
        """
        source = pretrained_model_name_or_path
        with_info = kwargs.pop("output_loading_info", False)
        config, names = kwargs.get("config"), None
        if source is not None:
            source = str(source)
            kwargs, names = pin_files(source, kwargs)
        hub = {key: kwargs[key] for key in HUB_KEYWORDS if key in kwargs}
        if source is not None and not isinstance(config, DFlashConfig):
            kwargs["tensor_names"] = names
            config, _ = DFlashConfig.get_config_dict(config or source, **hub, tensor_names=names)
            kwargs.setdefault("key_mapping", FAMILIES[config.get("family") or "zlab"].KEY_MAPPING)
        elif config is not None:
            kwargs.setdefault("key_mapping", FAMILIES[config.family].KEY_MAPPING)
        model, info = super().from_pretrained(
            source,
            *model_args,
            output_loading_info=True,
            # A wrong shape is reported below, with its name and both shapes.
            **{**kwargs, "ignore_mismatched_sizes": True},
        )
        require_complete(source, info, ignored=FAMILIES[model.config.family].IGNORED)
        require_consistent(source, d2t=model.d2t, t2d=model.t2d)
        if source is not None:
            model.generation_config = own_generation_config(source, **hub)
            model.frequent_token_ids = read_index(source, vocab_size=model.config.vocab_size, **hub)
        return (model, info) if with_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write the drafter in its family's layout (z-lab's for new ones).

        Its own `generation_config.json` and `frequent_tokens.json` are written beside it, if there are any.

        Takes the arguments of `PreTrainedModel.save_pretrained`, and with `push_to_hub=True` those of `push_to_hub`. A
        README.md in the folder that a person edited is uploaded as the card.
        """
        hub = {key: kwargs.pop(key) for key in _PUSH_KEYWORDS if push_to_hub and key in kwargs}
        if FAMILIES[self.config.family].TO_DISK:
            state_dict = self.state_dict() if state_dict is None else state_dict
            state_dict = {name_on_disk(name, self.config.family): tensor for name, tensor in state_dict.items()}
            kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        if not is_main_process:
            return
        remove_stale_weights(save_directory)
        write_index(self.frequent_token_ids, save_directory)
        if _DRAFTING_KNOBS & self.generation_config.to_diff_dict().keys():
            self.generation_config.save_pretrained(save_directory)
        if push_to_hub:  # as a whole, so that no file of the folder is left out
            repo_id = hub.pop("repo_id", os.path.basename(os.path.normpath(save_directory)))
            readme = Path(save_directory) / "README.md"
            local = readme.read_text(encoding="utf-8") if readme.exists() else None
            shards = {key: kwargs[key] for key in ("max_shard_size",) if key in kwargs}
            push_drafter(self, repo_id, **hub, **shards, token=kwargs.get("token"), local_card=local)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
        card: ModelCard | None = None,
        overwrite_card: bool = False,
    ) -> CommitInfo:
        """Upload the drafter and a model card; weight files of an earlier upload are replaced.

        Args:
            repo_id, commit_message, commit_description, private, token, revision, create_pr, max_shard_size, tags: as
                in transformers.
            card: a card of your own (`dflash_hf.model_card.fill_card` makes one with training and measurements); by
                default one is made from the config.
            overwrite_card: replace the repository's README.md even if a person wrote or edited it. Otherwise it stays.
        """
        return push_drafter(
            self,
            repo_id,
            commit_message=commit_message,
            commit_description=commit_description,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            max_shard_size=max_shard_size,
            tags=tags,
            card=card,
            overwrite_card=overwrite_card,
        )
