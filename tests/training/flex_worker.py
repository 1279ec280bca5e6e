"""Compiled flex attention against dense attention on a CPU, forward only; prints what test_flex_attention.py reads.

In a process of its own: torch's flex attention for CPUs is young, and a crash there must not take the test run along.
"""

import json
import sys

import torch
from conftest import tiny_target
from torch._dynamo.utils import counters
from training_helpers import collate, make_trainer, rows, tiny_drafter

BATCHES = (
    (False, [100, 60, 20]),
    (False, [90, 110, 40]),
    (False, [300, 200, 30]),
    (False, [400, 150, 260]),
    (False, [500, 130, 260]),
    (True, [100, 60, 20, 90, 80, 200]),
    (True, [250, 60, 400, 20, 90, 80]),
)


def main(folder, layer_type, batches):
    target = tiny_target(hidden=64)  # head_dim 16, the smallest that flex takes
    drafter = tiny_drafter(target, layer_types=[layer_type] * 2, sliding_window=30).eval()
    errors, graphs, shapes = [], [], []
    for packing, lengths in batches:
        options = dict(target=target, drafter=drafter, train=rows(lengths, prompt=5), num_anchors=16, packing=packing)
        if packing:
            options["max_length"] = 512
        flex, dense = (make_trainer(folder, attn_implementation=name, **options) for name in ("flex_attention", "sdpa"))
        batch, other = collate(flex), collate(dense)
        shapes.append([batch["input_ids"].shape[1], batch["anchors"].shape[1]])
        with torch.no_grad():
            hidden, expected = (
                trainer.draft_hidden_states(drafter, b)[b["keep"]] for trainer, b in ((flex, batch), (dense, other))
            )
        errors.append(float((hidden - expected).abs().max()))
        graphs.append(counters["stats"]["unique_graphs"])
    print(json.dumps({"errors": errors, "graphs": graphs, "shapes": shapes}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], BATCHES[: int(sys.argv[3])])
