"""DFlash drafters for Hugging Face transformers: faster generation with the same output.

Importing the package is quick and changes nothing. The first use of a public name registers the drafter with
transformers' Auto classes and lets `generate` accept it as `assistant_model`.
"""

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "DFlashConfig": ".configuration_dflash",
    "DFlashDraftModel": ".modeling_dflash",
    "DFlashCandidateGenerator": ".generation.candidate_generator",
    "GenerationStats": ".generation.statistics",
    "DFlashTrainer": ".training.trainer",
    "DFlashTrainingArguments": ".training.arguments",
    "DFlashDataCollator": ".training.collator",
    "DFlashError": ".errors",
    "install": ".generation.integration",
    "uninstall": ".generation.integration",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dflash_hf' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name], __name__), name)
    if name not in ("install", "uninstall", "DFlashError"):
        import_module(".generation.integration", __name__).install()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
