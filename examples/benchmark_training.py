"""Training throughput and peak memory with cached features: this package against `speculators` 0.9.0 and dense masks.

    python -m venv spec && spec/bin/pip install speculators==0.9.0
    python examples/benchmark_training.py --data answers.jsonl --speculators spec/bin/python --json training.json

Every side takes the same updates: the same examples in one row, their features and the target's final states read from
one file, the same start weights, block size, number of anchors, AdamW, clip and dtype (fp32), one process after the
other, `--repeats` times in turn. `speculators`' own Trainer moves its model to accelerator 0 and stops on a machine
that has none, so its model, its loss and its optimizers run in this script's loop, with the attention that is fastest
for it on a CPU (`--speculators-attention sdpa`; its flex attention has no backward there). It learns the target's
likeliest token; `ours, argmax` does the same, `ours` the data's token, `dense` is `ours` with dense masks for SDPA.
`--data` as in train_drafter.py, target as in quickstart.py.

About 8 minutes on an idle CPU core, 4 GB. SmolLM2-135M, one thread of an Intel Xeon, in positions per second and peak
memory: speculators 274 and 3.4 GB, ours, argmax 459 and 1.9 GB, dense 369 and 2.0 GB, ours 509 and 1.8 GB. Where other
work runs beside it, compare the CPU seconds; wall-clock rates need an idle machine.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from measuring import peak_mb, reset_peak
from safetensors.torch import load_file, save_file

SIDES = {
    "ours": dict(),
    "ours, argmax": dict(objective="target_argmax"),
    "dense": dict(attn_implementation="sdpa"),
    "speculators": None,
}


def run_steps(updates: int, step) -> dict[str, float]:
    """Time `updates` calls of `step(number) -> supervised positions`, after one that is not counted."""
    step(0)
    before = reset_peak()
    positions, started, cpu_started = 0, time.perf_counter(), time.process_time()
    for number in range(1, updates + 1):
        positions += step(number)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return {
        "positions_per_second": positions / seconds,
        "positions_per_cpu_second": positions / cpu_seconds,
        "positions": positions,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "memory_before_mb": before,
        "peak_memory_mb": peak_mb(),
    }


def read_rows(folder: Path, settings: dict) -> list[dict[str, torch.Tensor]]:
    """The rows of the updates, each a list of examples' tensors joined, as `prepare` wrote them."""
    return [load_file(folder / f"row{number}.safetensors") for number in range(settings["updates"] + 1)]


def run_ours(folder: Path, settings: dict, options: dict) -> dict[str, float]:
    """Updates by DFlashTrainer on packed rows with stored states."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
    from dflash_hf.training.collator import DrafterDataset

    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    examples, features, final_states, packed = [], [], [], []
    for row in read_rows(folder, settings):
        packed.append(list(range(len(examples), len(examples) + len(row["lengths"]))))
        parts = row["lengths"].tolist()
        for ids, mask in zip(row["input_ids"].split(parts), row["loss_mask"].split(parts)):
            examples.append({"input_ids": ids.tolist(), "loss_mask": mask.tolist()})
        features += row["features"].split(parts)
        final_states += row["final"].split(parts)
    trainer = DFlashTrainer(
        model=DFlashDraftModel.from_pretrained(folder / "drafter", dtype=torch.float32),
        target_model=target,
        args=DFlashTrainingArguments(
            str(folder / "out"),
            num_anchors=settings["anchors"],
            learning_rate=6e-4,
            max_length=1 << 20,
            report_to="none",
            use_cpu=True,
            **options,
        ),
        train_dataset=Dataset.from_list(examples),
    )
    data = DrafterDataset(trainer.train_dataset.examples, features, final_states, packed)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=6e-4, weight_decay=0.01)
    device = torch.device("cpu")

    def step(number: int) -> int:
        batch = trainer.data_collator([data[number]])
        optimizer.zero_grad()
        trainer.training_step(trainer.model, batch, trainer._get_num_items_in_batch([batch], device))
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        return len(batch["active_rows"])

    return run_steps(settings["updates"], step)


def run_speculators(folder: Path, settings: dict) -> dict[str, float]:
    """Updates by speculators' model, loss and optimizers; nothing of this package is imported."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    shape = settings["drafter"]
    layer_config = Qwen3Config(**shape)
    layer_config._attn_implementation = settings["speculators_attention"]
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=layer_config,
            draft_vocab_size=shape["vocab_size"],
            block_size=settings["block_size"],
            aux_hidden_state_layer_ids=settings["taps"],
            mask_token_id=settings["mask_token_id"],
        )
    )
    lent = load_file(folder / "lent.safetensors")
    weights = load_file(folder / "drafter" / "model.safetensors")
    with torch.no_grad():
        missing, unexpected = model.load_state_dict(weights, strict=False)
        expected = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
        if unexpected or set(missing) != expected:
            raise SystemExit(f"Weights do not fit speculators' model: missing {missing}, unexpected {unexpected}.")
        model.embed_tokens.weight.copy_(lent["embedding"])
        model.lm_head.weight.copy_(lent["head"])
        model.verifier_lm_head.weight.copy_(lent["head"])
        model.verifier_norm.weight.copy_(lent["norm"])
    model.train()
    rows = read_rows(folder, settings)
    config = TrainerConfig(lr=6e-4, num_epochs=1, save_path=str(folder), optimizer="adamw")
    optimizers = build_optimizers(model, config)
    loss_config = resolve_loss_config("ce", "eager")

    def step(number: int) -> int:
        row = rows[number]
        lengths = row["lengths"]
        _, loss, metrics = model(
            hidden_states=row["features"][None],
            input_ids=row["input_ids"][None],
            loss_mask=row["loss_mask"][None],
            verifier_last_hidden_states=row["last"][None],
            document_ids=torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths.tolist()])[None],
            loss_config=loss_config,
            max_anchors=settings["anchors"] * len(lengths),
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        return int(metrics["full_acc_total"])

    return run_steps(settings["updates"], step)


def prepare(folder: Path, *, data: str, target_name: str | None, settings: dict) -> None:
    """Write target, drafter and the rows with the target's states, for all sides."""
    from quickstart import load_target
    from transformers import AutoModelForCausalLM

    from dflash_hf import DFlashConfig, DFlashDraftModel
    from dflash_hf.data.chat import prepare_dataset
    from dflash_hf.data.features import compute_states
    from dflash_hf.data.sources import load_rows
    from dflash_hf.target import FeatureCapture

    target, tokenizer = load_target(target_name)
    text = target.config.get_text_config()
    torch.manual_seed(0)
    config = DFlashConfig.from_target(
        target.config,
        mask_token_id=settings["mask_token_id"],
        num_hidden_layers=settings["layers"],
        block_size=settings["block_size"],
        num_taps=min(5, text.num_hidden_layers - 3),
    )
    DFlashDraftModel(config).save_pretrained(folder / "drafter")
    plain_config = copy.deepcopy(target.config)
    plain_config.__dict__.pop("quantization_config", None)  # a GGUF was dequantised on loading
    plain = AutoModelForCausalLM.from_config(plain_config)
    plain.load_state_dict(target.state_dict())
    plain.save_pretrained(folder / "target")
    norm = target.get_decoder().norm
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    lent = {"embedding": embedding, "head": head.clone(), "norm": norm.weight}
    save_file({name: tensor.detach().contiguous() for name, tensor in lent.items()}, folder / "lent.safetensors")
    settings["taps"] = list(config.target_layer_ids)
    settings["drafter"] = {
        key: getattr(config, key)
        for key in (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "rms_norm_eps", "vocab_size", "rope_parameters", "layer_types", "max_position_embeddings"),
        )
    }
    count = settings["examples"] * (settings["updates"] + 1)
    source = load_rows(data).select(range(count))
    examples = prepare_dataset(source, tokenizer, max_length=settings["length"])
    with FeatureCapture(target, [*settings["taps"], text.num_hidden_layers - 1]) as capture:
        for number in range(settings["updates"] + 1):
            parts: dict[str, list[torch.Tensor]] = {}
            for index in range(number * settings["examples"], (number + 1) * settings["examples"]):
                ids = torch.tensor(examples[index]["input_ids"])
                states, final = compute_states(target, capture, ids[None])
                features, last = states[0].split([states.shape[-1] - text.hidden_size, text.hidden_size], dim=-1)
                row = {
                    "input_ids": ids,
                    "loss_mask": torch.tensor(examples[index]["loss_mask"]),
                    "features": features,
                    "last": last,
                    "final": final[0],
                    "lengths": torch.tensor([len(ids)]),
                }
                for key, tensor in row.items():
                    parts.setdefault(key, []).append(tensor)
            joined = {key: torch.cat(tensors).contiguous() for key, tensors in parts.items()}
            save_file(joined, folder / f"row{number}.safetensors")


def main(
    data: Annotated[str, typer.Option(help="Training data.")] = "HuggingFaceH4/ultrachat_200k",
    speculators: Annotated[str | None, typer.Option(help="Python of an environment that has speculators.")] = None,
    updates: Annotated[int, typer.Option(help="Updates that are timed, after one that is not.")] = 5,
    repeats: Annotated[int, typer.Option(help="Runs of every side, in turn.")] = 3,
    examples: Annotated[int, typer.Option(help="Examples in an update.")] = 8,
    anchors: Annotated[int, typer.Option(help="Blocks an example.")] = 32,
    block_size: Annotated[int, typer.Option(help="Block size.")] = 8,
    layers: Annotated[int, typer.Option(help="Draft layers.")] = 3,
    length: Annotated[int, typer.Option(help="Longest example.")] = 512,
    mask_token_id: Annotated[int, typer.Option(help="A reserved id of the target's tokenizer.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    speculators_attention: Annotated[str, typer.Option(help="sdpa or eager.")] = "sdpa",
    target: Annotated[str | None, typer.Option(help="Hub repository or folder of the target.")] = None,
    side: Annotated[str | None, typer.Option(hidden=True)] = None,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Prepare once, then run every side in a process of its own."""
    if side is not None and folder is not None:
        settings = json.loads((folder / "settings.json").read_text())
        torch.set_num_threads(settings["threads"])
        options = SIDES[side]
        result = run_speculators(folder, settings) if options is None else run_ours(folder, settings, options)
        print(json.dumps(result))
        return

    from quickstart import console
    from rich.table import Table

    from dflash_hf.evaluation.comparison import write_result

    settings = dict(updates=updates, examples=examples, anchors=anchors, block_size=block_size, layers=layers)
    settings |= dict(length=length, mask_token_id=mask_token_id, threads=threads)
    settings["speculators_attention"] = speculators_attention
    pythons = {name: sys.executable for name in SIDES}
    if speculators is None:
        del pythons["speculators"]
    else:
        pythons["speculators"] = speculators
    results: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as temporary:
        prepare(Path(temporary), data=data, target_name=target, settings=settings)
        Path(temporary, "settings.json").write_text(json.dumps(settings))
        for _ in range(repeats):
            for name, python in pythons.items():
                command = [python, __file__, "--side", name, "--folder", temporary]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
                results[name].append(json.loads(done.stdout.splitlines()[-1]))
    columns = ("", "positions/s (best)", "all runs", "per CPU second", "peak memory", "above start")
    table = Table(*columns)
    best = {name: max(run["positions_per_second"] for run in runs) for name, runs in results.items()}
    cpu = {name: max(run["positions_per_cpu_second"] for run in runs) for name, runs in results.items()}
    for name, runs in results.items():
        peak = max(run["peak_memory_mb"] for run in runs)
        above = max(run["peak_memory_mb"] - run["memory_before_mb"] for run in runs)
        rates = ", ".join(f"{run['positions_per_second']:.0f}" for run in runs)
        row = (f"{best[name]:.0f}", rates, f"{cpu[name]:.0f}", f"{peak:,.0f} MB", f"{above:,.0f} MB")
        table.add_row(name, *row)
    console.print(table)
    if speculators is not None:
        for name in ("ours", "ours, argmax"):
            times = f"{best[name] / best['speculators']:.2f} times speculators' positions per second"
            console.print(f"{name}: {times}, {cpu[name] / cpu['speculators']:.2f} times per CPU second")
    if json_file is not None:
        write_result({"settings": settings, "results": results, "best": best, "best_per_cpu_second": cpu}, json_file)


if __name__ == "__main__":
    typer.run(main)
