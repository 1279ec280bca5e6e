"""`dflash-hf cache-features`: compute a target's features once, for `dflash-hf train --features`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import console, load_target, parse_taps, reports_errors
from .progress import Rate


@reports_errors
def cache_features(
    target: Annotated[str, typer.Option(help="Target: Hub repository or folder (a folder with one GGUF file too).")],
    data: Annotated[list[str], typer.Option(help="As `train` takes it; may be given several times.")],
    output: Annotated[Path, typer.Option(help="Folder for the features; one that was begun is gone on with.")],
    taps: Annotated[str | None, typer.Option(help="Tapped target layers, e.g. 1,8,14,20,27.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Take the taps of this drafter.")] = None,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    eval_data: Annotated[list[str] | None, typer.Option(help="Dataset to evaluate on.")] = None,
    eval_split: Annotated[str | None, typer.Option(help="Split of --eval-data; --split by default.")] = None,
    eval_examples: Annotated[int, typer.Option(help="Without --eval-data: hold this many last examples out.")] = 0,
    max_length: Annotated[int, typer.Option(help="Longest example, in tokens.")] = 3072,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="enable_thinking of the chat template.")
    ] = None,
    final_hidden_states: Annotated[
        bool, typer.Option("--final-hidden-states", help="Keep these of the training examples too, for target labels.")
    ] = False,
    features_dtype: Annotated[
        str | None, typer.Option(help="Stored dtype: bfloat16 (default of a new store), float16, float32.")
    ] = None,
    tokens_per_batch: Annotated[int, typer.Option(help="Tokens in one forward pass, padding included.")] = 4096,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the target: auto, float32, bfloat16.")] = "auto",
    device_map: Annotated[str | None, typer.Option(help="For example auto.")] = None,
) -> None:
    """Write the tapped hidden states of every example. Killed at any moment, it goes on where it was.

    Give `train` the same --data, --max-length and --eval options and `--features` with this folder; it refuses features
    of another target, tokenizer, dataset or tap list.
    """
    import torch

    from ..configuration_dflash import DFlashConfig, default_target_layer_ids
    from ..data.features import build_feature_store
    from ..errors import DFlashError
    from .examples import load_sources, prepare_splits, thinking_of

    if taps is not None and drafter is not None:
        raise DFlashError("--taps and --drafter both name the taps; leave one out.")
    dtypes = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
    if features_dtype is not None and features_dtype not in dtypes:
        raise DFlashError(f"--features-dtype is {features_dtype!r}; it must be one of {', '.join(dtypes)}.")
    sources = load_sources(data, split=split, eval_data=eval_data, eval_split=eval_split)
    model, tokenizer = load_target(target, gguf_file=gguf_file, dtype=dtype, device_map=device_map)
    layer_ids = parse_taps(taps)
    if drafter is not None:
        layer_ids = DFlashConfig.from_pretrained(drafter).target_layer_ids
    elif layer_ids is None:
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        layer_ids = default_target_layer_ids(num_target_layers=layers, num_taps=5)
    parts = prepare_splits(
        sources,
        eval_examples=eval_examples,
        tokenizer=tokenizer,
        max_length=max_length,
        enable_thinking=thinking_of(data, thinking),
        num_rows=model.get_input_embeddings().weight.shape[0],
    )
    for name, examples in zip(("train", "eval"), parts):
        if examples is None:
            continue

        def announce(needed: int, free: int, name: str = name, count: int = len(examples)) -> None:
            console.print(
                f"{name}: {count} examples, taps {layer_ids}; {needed / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free",
                highlight=False,
            )

        with Rate(console, total=len(examples), unit="examples") as rate:
            build_feature_store(
                output / name,
                target=model,
                dataset=examples,
                layer_ids=layer_ids,
                tokenizer=tokenizer,
                dtype=dtypes.get(features_dtype),
                final_hidden_states=final_hidden_states and name == "train",
                tokens_per_batch=tokens_per_batch,
                on_start=announce,
                on_progress=lambda done, _, rate=rate: rate.update(done),
            )
    console.print(f"Train with: dflash-hf train --features {output} ... and the same --data options", markup=False)
