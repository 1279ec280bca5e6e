"""LoRA on a drafter through PEFT: which modules, and back into a whole drafter."""

from __future__ import annotations

import copy

from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn

from ..modeling_dflash import DFlashDraftModel

# Every matrix of a drafter. PEFT knows no drafters, so the names are given here.
LORA_TARGET_MODULES = ["fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(drafter: DFlashDraftModel, peft_config: PeftConfig) -> PeftModel:
    """The drafter with a new adapter; `LORA_TARGET_MODULES` where the config names no modules."""
    if getattr(peft_config, "target_modules", "unused") is None:
        peft_config = copy.deepcopy(peft_config)
        peft_config.target_modules = list(LORA_TARGET_MODULES)
    return get_peft_model(drafter, peft_config)


def base_drafter(model: nn.Module) -> nn.Module:
    """The drafter inside an adapter's wrapper, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def merged(model: PeftModel) -> DFlashDraftModel:
    """A whole drafter with the adapter added into its weights; `model` stays as it is."""
    return copy.deepcopy(model).merge_and_unload()
