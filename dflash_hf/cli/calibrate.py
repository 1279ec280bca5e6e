"""`dflash-hf calibrate`: measure what a round's parts cost on this machine, and keep it with the drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .common import console, load_target, reports_errors


@reports_errors
def calibrate(
    target: Annotated[str, typer.Option(help="Target: Hub repository or folder (a folder with one GGUF file too).")],
    drafter: Annotated[str, typer.Option(help="Drafter: Hub repository or folder.")],
    output: Annotated[
        Path | None, typer.Option(help="Write the drafter with its costs to this folder; by default into its own.")
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Sequences in a round; may be given several times.")
    ] = None,
    context_length: Annotated[
        list[int] | None, typer.Option(help="Tokens before the round; may be given several times.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timings of each size.", min=1)] = 7,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the target: auto, float32, bfloat16.")] = "auto",
    device_map: Annotated[str | None, typer.Option(help="For example auto.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the drafter's repository.")] = None,
) -> None:
    """Measure draft and verification for every length, so that block lengths are chosen by the costs of this machine.

    Run it when nothing else keeps the machine busy.
    """
    from dflash_hf import DFlashDraftModel
    from dflash_hf import calibrate as measure
    from dflash_hf.errors import DFlashError

    if output is None and not Path(drafter).is_dir():
        raise DFlashError(f"{drafter} is not a folder here. Name one for the drafter and its costs with --output.")
    model, _ = load_target(target, gguf_file=gguf_file, dtype=dtype, device_map=device_map)
    own = DFlashDraftModel.from_pretrained(drafter, revision=revision or "main")
    used = DFlashDraftModel.from_pretrained(drafter, dtype=model.dtype, revision=revision or "main").to(model.device)
    with console.status("Measuring"):
        tables = measure(
            used,
            model,
            batch_sizes=batch_size or (1,),
            context_lengths=context_length or (256,),
            repeats=repeats,
        )
    own.generation_config = used.generation_config
    if output is None:  # the weights stay as they are
        own.generation_config.save_pretrained(drafter)
    else:
        own.save_pretrained(output)
    for table in tables:
        title = (
            f"{table['device']}, {table['dtype']}, batch size {table['batch_size']}, context {table['context_length']}"
        )
        shown = Table("tokens", "draft, ms", "verification, ms", title=title)
        draft, verify = dict(table["draft"]), dict(table["verify"])
        for count in sorted(draft.keys() | verify.keys()):
            shown.add_row(str(count), *(f"{part[count]:.2f}" if count in part else "" for part in (draft, verify)))
        console.print(shown)
