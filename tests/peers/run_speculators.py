"""Drafts of speculators 0.9.0 for exported folders. Runs in an environment that has speculators, not dflash_hf.

    python run_speculators.py FOLDER ...

Each FOLDER holds `drafter` (the export) and `inputs.safetensors`: input_ids [1, T], the target's hidden_states
[layers + 1, T, H] as transformers gives them, anchors [N]. Beside them `outputs.safetensors` is written: hidden
[N, B, H] and logits [N, B, V] of one block an anchor.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig


@torch.no_grad()
def run(folder: Path) -> None:
    config = SpeculatorModelConfig.from_pretrained(folder / "drafter")
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder / "drafter", config=config).eval()
    inputs = load_file(folder / "inputs.safetensors")
    ids, states = inputs["input_ids"], inputs["hidden_states"]
    features = torch.cat([states[layer_id] for layer_id in model.target_layer_ids], dim=-1)[None]
    found = []
    for anchor in inputs["anchors"].tolist():
        loss_mask = torch.zeros_like(ids)
        loss_mask[:, anchor] = 1  # the only place where it may put its anchor
        hidden, logits, *_ = model._backbone_forward(
            features,
            ids,
            loss_mask,
            torch.zeros(1, ids.shape[1], config.transformer_layer_config.hidden_size),
            torch.zeros_like(ids),
            max_anchors=1,
        )
        found.append((hidden[0], logits[0]))
    outputs = {name: torch.stack(values) for name, values in zip(("hidden", "logits"), zip(*found))}
    save_file(outputs, folder / "outputs.safetensors")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(Path(name))
