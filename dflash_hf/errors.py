"""Every error that dflash_hf raises on purpose. Each message names the value, the limit and the remedy."""


class DFlashError(ValueError):
    """Base class of the package's errors; a `ValueError`, so that callers who catch that keep working."""


class DFlashConfigError(DFlashError):
    """A drafter configuration that cannot work: wrong block size, tap ids, mask token, head counts."""


class CheckpointError(DFlashError):
    """Files that are not a complete, understood drafter: unknown or missing tensors, keys or families."""


class TargetMismatchError(DFlashError):
    """A drafter and a target that do not fit together."""


class UnsupportedGenerationError(DFlashError):
    """A `generate` option that cannot be combined with a DFlash drafter."""


class DatasetError(DFlashError):
    """Training data that cannot be used: no supervised token, missing columns, a template that hides the response."""


class FeatureStoreError(DFlashError):
    """A feature store on disk that does not belong to this target, drafter or dataset."""
