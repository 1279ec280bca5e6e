"""The `evaluate` metric: how many tokens a verification of drafted blocks produces."""

from __future__ import annotations

import datasets
import evaluate
import torch

from dflash_hf.training.metrics import count_blocks

_DESCRIPTION = """\
Acceptance length of drafted blocks (tau): tokens produced by one verification, the bonus token included. A block's
proposals are accepted up to the first that differs from the target's token, so a block gives 1 + the length of its
correct prefix. This is not the mean accuracy of the slots, which counts proposals behind a wrong one.
"""
_CITATION = """\
@article{dflash, title={DFlash}, journal={arXiv preprint arXiv:2602.06036}, year={2026}}
"""
_INPUTS = """\
Args:
    predictions: for each block, the proposed token ids.
    references: for each block, the target's greedy token ids at the same places. It may be shorter than the proposals
        (the text ends) or hold -100 (not known): the block counts up to there.

Returns:
    acceptance_length: tokens per verification, pooled over blocks.
    acceptance_rate: accepted / proposed tokens.
    slot_accuracy: right proposals / known references at each slot, in order.
    blocks: number of blocks.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class AcceptanceLength(evaluate.Metric):
    """See the module's description."""

    def _info(self) -> evaluate.MetricInfo:
        tokens = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": tokens, "references": tokens}),
        )

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, object]:
        width = max(1, max(len(proposals) for proposals in predictions))
        # Slot 0 carries the anchor; `count_blocks` does not look at it.
        hits = torch.zeros(len(predictions), width + 1, dtype=torch.bool)
        known = torch.zeros_like(hits)
        for row, (proposals, truth) in enumerate(zip(predictions, references)):
            length = min(len(proposals), len(truth))
            truth = torch.tensor(truth[:length], dtype=torch.int64)
            hits[row, 1 : length + 1] = torch.tensor(proposals[:length], dtype=torch.int64) == truth
            known[row, 1 : length + 1] = truth != -100
        counts = count_blocks(hits=hits, supervised=known, keep=torch.ones(len(predictions), dtype=torch.bool))
        accepted = int(counts.correct_prefix_sum)
        return {
            "acceptance_length": 1 + accepted / len(predictions),
            "acceptance_rate": accepted / max(1, sum(map(len, predictions))),
            "slot_accuracy": (counts.hit_sum / counts.slot_count.clamp(min=1)).tolist(),
            "blocks": len(predictions),
        }
