"""`dflash-hf evaluate`: acceptance length, loss and accuracy by slot of a drafter on a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .common import console, load_target, reports_errors
from .progress import Rate


@reports_errors
def evaluate(
    target: Annotated[str, typer.Option(help="Target: Hub repository or folder (a folder with one GGUF file too).")],
    drafter: Annotated[str, typer.Option(help="Drafter: Hub repository or folder.")],
    data: Annotated[list[str], typer.Option(help="As `train` takes it; may be given several times.")],
    generate: Annotated[bool, typer.Option("--generate", help="Also answer the prompts greedily, for real.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="With --generate: longest answer, in tokens.")] = 256,
    prompt_column: Annotated[
        str | None, typer.Option(help="Data without answers: column with the user's message. Implies --generate.")
    ] = None,
    prompt_template: Annotated[
        str | None, typer.Option(help="The same with columns in braces: '{question}\\nThink.' (\\n: new line).")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Examples, from the first.", min=1)] = None,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "test",
    max_length: Annotated[int, typer.Option(help="Longest example, in tokens.")] = 3072,
    anchors: Annotated[int, typer.Option(help="Blocks in an example.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Examples in one forward pass.")] = 4,
    block_size: Annotated[int | None, typer.Option(help="With --generate: a smaller block.")] = None,
    num_assistant_tokens: Annotated[
        int | None, typer.Option(help="With --generate: send only this many proposals of a block to the target.")
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the target: auto, float32, bfloat16.")] = "auto",
    device_map: Annotated[str | None, typer.Option(help="For example auto.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the drafter's repository.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Measure a drafter on data with the target's answers (teacher-forced blocks) or by generating them."""
    from dflash_hf import DFlashDraftModel

    from ..data.prompts import read_conversations
    from ..data.sources import load_rows
    from ..evaluation.comparison import write_result
    from ..evaluation.drafter import evaluate_blocks, generate_greedily, prompts_of
    from .examples import prepare_examples

    sources = [load_rows(name, split=split) for name in data]
    model, tokenizer = load_target(target, gguf_file=gguf_file, dtype=dtype, device_map=device_map)
    draft = DFlashDraftModel.from_pretrained(drafter, dtype=model.dtype, revision=revision or "main")
    draft.to(model.device)
    thinking = draft.config.enable_thinking
    result: dict[str, float] = {}
    prompts: list[list[int]] = []
    if prompt_column is not None or prompt_template is not None:
        if prompt_template is not None:
            prompt_template = prompt_template.replace("\\n", "\n")
        options = {} if thinking is None else {"enable_thinking": thinking}
        for rows in sources:
            for conversation in read_conversations(
                rows, prompt_column=prompt_column, prompt_template=prompt_template, max_turns=1
            ):
                encoded = tokenizer.apply_chat_template(
                    conversation.turns[0],
                    tools=conversation.tools,
                    add_generation_prompt=True,
                    return_dict=True,
                    **options,
                )
                prompts.append(list(encoded["input_ids"]))
        prompts = prompts[:limit]
    else:
        examples = prepare_examples(
            sources,
            tokenizer=tokenizer,
            max_length=max_length,
            enable_thinking=thinking,
            num_rows=model.get_input_embeddings().weight.shape[0],
        )
        examples = examples.select(range(min(limit or len(examples), len(examples))))
        prompts = prompts_of(examples) if generate else []
    if prompts:
        if block_size is not None:
            draft.generation_config.block_size = block_size
        if num_assistant_tokens is not None:
            draft.generation_config.num_assistant_tokens = num_assistant_tokens
        with Rate(console, total=len(prompts), before=0, unit="prompts") as rate:
            stats = generate_greedily(
                model,
                draft,
                prompts,
                max_new_tokens=max_new_tokens,
                on_prompt=lambda number, total: rate.update(number + 1, tokens=total.new_tokens),
            )
        result |= {
            "generation_prompts": len(prompts),
            "generation_acceptance_length": stats.acceptance_length,
            "generation_acceptance_rate": stats.acceptance_rate,
            "generation_rounds": stats.rounds,
            "generation_tokens_per_second": stats.tokens_per_second,
        }
    if prompt_column is None and prompt_template is None:
        with console.status("Teacher-forced blocks"):
            blocks = evaluate_blocks(
                draft,
                model,
                examples,
                tokenizer=tokenizer,
                max_length=max_length,
                num_anchors=anchors,
                batch_size=batch_size,
            )
        result |= {"examples": len(examples), **blocks}
    table = Table(show_header=False, title=f"{drafter} on {', '.join(data)}")
    for name, value in result.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    if json_file is not None:
        write_result(result, json_file)
