"""DFlash drafters for Hugging Face transformers: faster generation with the same output.

Importing the package is quick and changes nothing. The first use of a public name registers the drafter with
transformers' Auto classes and lets `generate` accept it as `assistant_model`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors; at run time the names load on first use
    from .configuration_dflash import DFlashConfig
    from .data.token_counts import frequent_tokens
    from .errors import DFlashError
    from .evaluation.callback import AcceptanceLengthCallback
    from .generation.calibration import calibrate
    from .generation.candidate_generator import DFlashCandidateGenerator
    from .generation.integration import install, uninstall
    from .generation.session import DFlashSession
    from .generation.statistics import GenerationStats
    from .modeling_dflash import DFlashDraftModel
    from .packing import pack_linears, unpack_linears
    from .training.arguments import DFlashTrainingArguments
    from .training.collator import DFlashDataCollator
    from .training.trainer import DFlashTrainer

__version__ = "0.1.0"

_PUBLIC = {
    "AcceptanceLengthCallback": ".evaluation.callback",
    "DFlashConfig": ".configuration_dflash",
    "DFlashDraftModel": ".modeling_dflash",
    "DFlashCandidateGenerator": ".generation.candidate_generator",
    "GenerationStats": ".generation.statistics",
    "DFlashTrainer": ".training.trainer",
    "DFlashTrainingArguments": ".training.arguments",
    "DFlashDataCollator": ".training.collator",
    "DFlashSession": ".generation.session",
    "DFlashError": ".errors",
    "calibrate": ".generation.calibration",
    "frequent_tokens": ".data.token_counts",
    "install": ".generation.integration",
    "pack_linears": ".packing",
    "uninstall": ".generation.integration",
    "unpack_linears": ".packing",
}

# Using one of these does not register anything.
_PLAIN = ("install", "uninstall", "DFlashError", "frequent_tokens", "pack_linears", "unpack_linears")

__all__ = [
    "AcceptanceLengthCallback",
    "DFlashCandidateGenerator",
    "DFlashConfig",
    "DFlashDataCollator",
    "DFlashDraftModel",
    "DFlashError",
    "DFlashSession",
    "DFlashTrainer",
    "DFlashTrainingArguments",
    "GenerationStats",
    "__version__",
    "calibrate",
    "frequent_tokens",
    "install",
    "pack_linears",
    "uninstall",
    "unpack_linears",
]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dflash_hf' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name], __name__), name)
    if name not in _PLAIN:
        import_module(".generation.integration", __name__).install()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
