"""Drafters that were loaded as something else.

A drafter's config.json names another model type (`qwen3`) for the engines' sake, so `AutoModel`, `AutoModelForCausalLM`
and `pipeline(assistant_model="folder")` build that model, with random weights where the drafter has none, and say
nothing that a user would notice. Here it is refused.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedConfig
from transformers.pipelines import base as pipelines_base

from ..errors import UnsupportedGenerationError

_LOADER = "load_assistant_model"


def names_a_drafter(on_disk: dict[str, Any]) -> bool:
    """Whether a config.json is a block-diffusion drafter's for which transformers has no class."""
    return "dflash_config" in on_disk or any(
        part in name for name in on_disk.get("architectures") or () for part in ("DFlash", "DSpark")
    )


def refuse_mistaken_drafter(assistant_model: Any) -> None:
    """Refuse an assistant that another class built from a drafter's config.json.

    Raises:
        UnsupportedGenerationError: with the way to load it.
    """
    config = getattr(assistant_model, "config", None)
    if not isinstance(config, PreTrainedConfig) or type(assistant_model).__name__ in (config.architectures or ()):
        return  # also z-lab's own class and MuseGlimmerAssistantModel, for transformers' loop
    if names_a_drafter(config.to_dict()):
        name = config.name_or_path or "the drafter's folder"
        raise UnsupportedGenerationError(
            f"assistant_model is a {type(assistant_model).__name__} that was built from the config.json of a DFlash "
            f"drafter ({name}); part of its weights are random. Load it with "
            f"dflash_hf.DFlashDraftModel.from_pretrained({name!r})."
        )


def install_pipeline_gate() -> None:
    """Let `pipeline(assistant_model="name")` refuse a drafter; doing it again changes nothing."""
    original = getattr(pipelines_base, _LOADER)
    if hasattr(original, "_dflash_original"):
        return

    @functools.wraps(original)
    def load_assistant_model(model, assistant_model, *args, **kwargs):
        if isinstance(assistant_model, str):
            on_disk, _ = PreTrainedConfig.get_config_dict(assistant_model)
            if names_a_drafter(on_disk):
                raise UnsupportedGenerationError(
                    f"assistant_model={assistant_model!r} is a DFlash drafter, and pipeline would load a name with "
                    "AutoModel, as another model with random weights. Pass the drafter itself: "
                    f"assistant_model=dflash_hf.DFlashDraftModel.from_pretrained({assistant_model!r})."
                )
        return original(model, assistant_model, *args, **kwargs)

    load_assistant_model._dflash_original = original
    setattr(pipelines_base, _LOADER, load_assistant_model)


def uninstall_pipeline_gate() -> None:
    """Give transformers its own function back."""
    original = getattr(getattr(pipelines_base, _LOADER), "_dflash_original", None)
    if original is not None:
        setattr(pipelines_base, _LOADER, original)
