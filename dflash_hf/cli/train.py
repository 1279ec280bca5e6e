"""`dflash-hf train`: train a drafter for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import command_line, console, load_target, load_tokenizer, parse_taps, reports_errors


@reports_errors
def train(
    ctx: typer.Context,
    target: Annotated[str, typer.Option(help="Target: Hub repository or folder (a folder with one GGUF file too).")],
    data: Annotated[
        list[str],
        typer.Option(
            help="Hub dataset, .json/.jsonl/.parquet file, or folder of `datasets`; may be given several times."
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="Folder for checkpoints and the trained drafter.")] = None,
    inspect: Annotated[
        bool, typer.Option("--inspect", help="Show a few examples, supervised tokens in colour, and stop.")
    ] = False,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Reserved id that the tokenizer never emits (required for a new drafter).")
    ] = None,
    init_from: Annotated[str | None, typer.Option(help="Start from this drafter and keep its taps.")] = None,
    layers: Annotated[int | None, typer.Option(help="Draft layers of a new drafter; 5 by default.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Block size of a new drafter, anchor included; 16 by default.")
    ] = None,
    taps: Annotated[str | None, typer.Option(help="Tapped target layers, e.g. 1,8,14,20,27.")] = None,
    target_name: Annotated[str | None, typer.Option(help="Target name to record in the drafter's config.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the target: auto, float32, bfloat16.")] = "auto",
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    eval_data: Annotated[list[str] | None, typer.Option(help="Dataset to evaluate on.")] = None,
    eval_split: Annotated[str | None, typer.Option(help="Split of --eval-data; --split by default.")] = None,
    eval_examples: Annotated[int, typer.Option(help="Without --eval-data: hold this many last examples out.")] = 0,
    max_length: Annotated[int, typer.Option(help="Longest example, in tokens.")] = 3072,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="enable_thinking of the chat template; the drafter records it."),
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 6.0,
    max_steps: Annotated[int, typer.Option(help="Updates in all; overrides --epochs.")] = -1,
    batch_size: Annotated[int, typer.Option(help="Examples in one forward pass.")] = 4,
    accumulate: Annotated[int, typer.Option(help="Forward passes in one update.")] = 1,
    anchors: Annotated[int, typer.Option(help="Blocks drawn from an example in each epoch.")] = 512,
    learning_rate: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 6e-4,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    muon_learning_rate: Annotated[float, typer.Option(help="Muon's learning rate.")] = 2e-3,
    muon_fp32: Annotated[bool, typer.Option("--muon-fp32", help="Muon's iteration in fp32.")] = False,
    decay_gamma: Annotated[float | None, typer.Option(help="Decay of the loss weights, in slots.")] = None,
    objective: Annotated[str, typer.Option(help="What slots learn: data, target_argmax or target_kl.")] = "data",
    loss_weighting: Annotated[str, typer.Option(help="Weights of a block's slots: decay, uniform or dpace.")] = "decay",
    contiguous_prefix: Annotated[
        bool, typer.Option("--contiguous-prefix", help="Supervise a block up to its first unsupervised token.")
    ] = False,
    packing: Annotated[
        bool, typer.Option("--packing", help="Several short examples in one row; --batch-size then counts rows.")
    ] = False,
    packed_length: Annotated[int | None, typer.Option(help="Tokens in a packed row; --max-length by default.")] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="flex_attention (default on CUDA), dflash_blocks (default elsewhere), sdpa or eager."),
    ] = None,
    init_from_target: Annotated[
        bool, typer.Option("--init-from-target", help="Start a new drafter from the target's own last layers.")
    ] = False,
    lora_rank: Annotated[
        int | None, typer.Option(help="Train a LoRA adapter of this rank on --init-from instead of all weights.")
    ] = None,
    lora_alpha: Annotated[int | None, typer.Option(help="Scale of the adapter; twice its rank by default.")] = None,
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora", help="Write the whole drafter, adapter added in, to OUTPUT/merged too.")
    ] = False,
    loss_vocab_size: Annotated[
        int | None, typer.Option(help="Loss over this many most frequent tokens of the data.")
    ] = None,
    frequent_tokens: Annotated[
        int | None, typer.Option(help="Let the drafter propose only this many most frequent tokens of the data.")
    ] = None,
    features: Annotated[
        str, typer.Option(help="Target features: online, memory, or a folder (of cache-features, or to be made).")
    ] = "online",
    features_dir: Annotated[str | None, typer.Option(help="The folder, with --features disk.")] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="bf16 autocast.")] = False,
    gradient_checkpointing: Annotated[bool, typer.Option("--gradient-checkpointing", help="Save memory.")] = False,
    log_every: Annotated[int, typer.Option(help="Updates between log lines.")] = 10,
    eval_every: Annotated[int, typer.Option(help="Updates between evaluations; 0: at the end only.")] = 0,
    generate_every: Annotated[
        int, typer.Option(help="Updates between greedy runs with the drafter on a few held-out prompts; 0: none.")
    ] = 0,
    generate_prompts: Annotated[int, typer.Option(help="Prompts of such a run.", min=1)] = 8,
    save_every: Annotated[int, typer.Option(help="Updates between checkpoints; 0: none.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --output.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and anchors.")] = 42,
) -> None:
    """Train a drafter on the target's own responses."""
    import torch
    from peft import LoraConfig
    from transformers import set_seed
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from transformers.trainer_utils import get_last_checkpoint

    from dflash_hf import (
        AcceptanceLengthCallback,
        DFlashConfig,
        DFlashDraftModel,
        DFlashTrainer,
        DFlashTrainingArguments,
    )

    from ..errors import DFlashError
    from ..evaluation.drafter import prompts_of
    from ..training.lora import LORA_TARGET_MODULES
    from .examples import inspect_examples, load_sources, prepare_splits, thinking_of
    from .progress import RichProgress

    thinking = thinking_of(data, thinking)
    if inspect:
        from ..data.sources import load_rows

        tokenizer = load_tokenizer(target, gguf_file=gguf_file)
        for name in data:
            inspect_examples(
                load_rows(name, split=split), tokenizer=tokenizer, max_length=max_length, enable_thinking=thinking
            )
        return
    if output is None:
        raise DFlashError("--output is needed: the folder for checkpoints and the trained drafter.")
    if features not in ("online", "memory", "disk"):
        if features_dir is not None:
            raise DFlashError(f"--features {features} and --features-dir {features_dir} both name a folder.")
        features, features_dir = "disk", features
    if resume and (not output.is_dir() or get_last_checkpoint(str(output)) is None):
        raise DFlashError(f"--resume: {output} holds no checkpoint. Leave the option out to start anew.")
    new = {"layers": layers, "block-size": block_size, "taps": taps, "mask-token-id": mask_token_id}
    given = [f"--{name}" for name, value in new.items() if value is not None]
    if init_from_target:
        given.append("--init-from-target")
    if lora_rank is None and (lora_alpha is not None or merge_lora):
        raise DFlashError("--lora-alpha and --merge-lora are for an adapter: give --lora-rank too.")
    if lora_rank is not None and init_from is None:
        raise DFlashError("--lora-rank adapts a trained drafter: name it with --init-from.")
    if init_from is not None and given:
        raise DFlashError(f"{given[0]} is for a new drafter; {init_from} brings its own. Leave out {', '.join(given)}.")
    sources = load_sources(data, split=split, eval_data=eval_data, eval_split=eval_split)
    target_model, tokenizer = load_target(target, gguf_file=gguf_file, dtype=dtype)
    set_seed(seed)
    if init_from is not None:
        drafter = DFlashDraftModel.from_pretrained(init_from, dtype=torch.float32)
    else:
        if mask_token_id is None:
            raise DFlashError(
                "--mask-token-id is needed for a new drafter: the id of a reserved token that the tokenizer never "
                f"emits. Added tokens of this tokenizer: {dict(sorted(tokenizer.get_added_vocab().items())[:24])}"
            )
        config = DFlashConfig.from_target(
            target_model.config,
            mask_token_id=mask_token_id,
            num_hidden_layers=layers or 5,
            block_size=block_size or 16,
            target_layer_ids=parse_taps(taps),
        )
        drafter = DFlashDraftModel(config)
    if target_name is not None:
        drafter.config.target_name_or_path = target_name
    if thinking is not None:
        drafter.config.enable_thinking = thinking
    rows, held_out = prepare_splits(
        sources,
        eval_examples=eval_examples,
        tokenizer=tokenizer,
        max_length=max_length,
        enable_thinking=drafter.config.enable_thinking,
        num_rows=target_model.get_input_embeddings().weight.shape[0],
    )
    args = DFlashTrainingArguments(
        output_dir=str(output),
        max_length=max_length,
        num_train_epochs=epochs,
        max_steps=max_steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=accumulate,
        num_anchors=anchors,
        learning_rate=learning_rate,
        optimizer=optimizer,
        muon_learning_rate=muon_learning_rate,
        muon_fp32=muon_fp32,
        decay_gamma=decay_gamma,
        objective=objective,
        loss_weighting=loss_weighting,
        contiguous_prefix=contiguous_prefix,
        packing=packing,
        packed_length=packed_length,
        attn_implementation=attention,
        init_from_target=init_from_target,
        loss_vocab_size=loss_vocab_size,
        frequent_tokens=frequent_tokens,
        features=features,
        features_dir=features_dir,
        bf16=bf16,
        use_cpu=not torch.accelerator.is_available(),  # transformers asks for it by name where bf16 is to run on a CPU
        **({"gradient_checkpointing": True} if gradient_checkpointing else {}),
        logging_steps=log_every,
        eval_strategy="steps" if eval_every and held_out is not None else "no",
        eval_steps=eval_every or None,
        save_strategy="steps" if save_every else "no",
        save_steps=save_every or 500,
        save_total_limit=2,
        seed=seed,
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = DFlashTrainer(
        model=drafter,
        target_model=target_model,
        args=args,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[RichProgress(console)],
        peft_config=None
        if lora_rank is None
        else LoraConfig(r=lora_rank, lora_alpha=lora_alpha or 2 * lora_rank, target_modules=LORA_TARGET_MODULES),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if generate_every:
        prompts = prompts_of(rows if held_out is None else held_out)[:generate_prompts]
        trainer.add_callback(AcceptanceLengthCallback(trainer, prompts=prompts, every=generate_every))
    count = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    console.print(
        f"{count / 1e6:.1f} M parameters to train, {drafter.config.num_hidden_layers} layers, "
        f"block {drafter.config.block_size}, taps {drafter.config.target_layer_ids}; "
        f"{len(trainer.train_dataset)} training {'rows' if packing else 'examples'}"
    )
    trainer.train(resume_from_checkpoint=resume or None)
    evaluated = {entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry}
    if held_out is not None and trainer.state.global_step not in evaluated:
        trainer.evaluate()
    trainer.save_model(str(output))
    trainer.save_state()
    trainer.save_curve()
    if lora_rank is not None:
        if merge_lora:
            trainer.save_merged(output / "merged")
        where = f"{output}, with the drafter in {output / 'merged'}" if merge_lora else output
        console.print(f"Adapter saved in {where}", markup=False)
        return
    trainer.create_model_card(dataset=data, command=command_line(ctx))
    console.print(
        f"Drafter saved in {output}. Use it with: dflash-hf generate --target {target} --drafter {output}", markup=False
    )
