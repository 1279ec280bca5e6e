"""Which drafters the trainer can train: those whose proposals come from one forward pass and the target's own head."""

from __future__ import annotations

from ..checkpoints import FAMILIES
from ..configuration_dflash import DFlashConfig
from ..errors import DFlashError


def require_trainable(config: DFlashConfig) -> None:
    """Stop before a drafter of another family is trained as what it is not.

    Raises:
        DFlashError: naming the family and what the trainer lacks for it.
    """
    missing = None
    if config.selector_rank is not None or config.conv_kernel_size is not None:
        missing = "a loss for the candidate selector, and blocks apart from each other for the convolutions"
    elif config.markov_rank is not None:
        missing = "a loss for the Markov head"
    elif config.gru_hidden_dim is not None:
        missing = "a loss for the GRU that corrects the logits"
    elif config.own_embedding or config.own_head:
        missing = "blocks and logits from the drafter's own embedding and head"
    if missing is not None:
        raise DFlashError(
            f"DFlashTrainer cannot train this {FAMILIES[config.family].TITLE} drafter: it has no {missing}. It trains "
            "z-lab's DFlash v1 drafters, and those of other families that compute the same."
        )
