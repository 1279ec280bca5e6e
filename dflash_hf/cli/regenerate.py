"""`dflash-hf regenerate`: the target answers the prompts of a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import console, load_target, load_tokenizer, reports_errors
from .progress import Rate


@reports_errors
def regenerate(
    target: Annotated[str, typer.Option(help="Target: Hub repository or folder (a folder with one GGUF file too).")],
    data: Annotated[str, typer.Option(help="Hub dataset, .json/.jsonl/.parquet file, or folder of `datasets`.")],
    output: Annotated[Path, typer.Option(help="JSONL file for the answers; one that was begun is gone on with.")],
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Prompts at once; with --base-url, requests at once.")] = 32,
    prompt_column: Annotated[
        str | None, typer.Option(help="Column with the user's message (or a list of them), where there is no chat.")
    ] = None,
    prompt_template: Annotated[
        str | None,
        typer.Option(help="The user's message with columns in braces: '{question}\\nThink.' (\\n: new line)."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message for conversations without one.")] = None,
    turns: Annotated[int | None, typer.Option(help="At most this many answers a conversation.", min=1)] = None,
    start: Annotated[int, typer.Option(help="First row to answer.", min=0)] = 0,
    limit: Annotated[int | None, typer.Option(help="Rows to answer, from --start on.", min=1)] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="enable_thinking of the chat template.")
    ] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of greedy decoding.")] = False,
    temperature: Annotated[float, typer.Option(help="With --sample.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="With --sample.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="With --sample; 0: off.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed for --sample.")] = 0,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    device_map: Annotated[str | None, typer.Option(help="For example auto.")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Ask this OpenAI-compatible server, e.g. http://localhost:8000/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the target on the server; --target by default.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Bearer token for the server.", envvar="OPENAI_API_KEY")] = None,
) -> None:
    """Write the target's own answers, for `dflash-hf train --data`. Killed at any moment, it goes on where it was.

    An answer that reaches --max-new-tokens is kept with `finished: false`; training uses it as it is, without an end.
    """
    from transformers import set_seed

    from ..data.answers import AnswerFile, digest_of
    from ..data.features import fingerprint_model
    from ..data.prompts import read_conversations
    from ..data.regeneration import BATCHES_IN_A_WINDOW, local_answerer
    from ..data.regeneration import regenerate as answer_all
    from ..data.server import server_answerer
    from ..data.sources import load_rows
    from ..errors import DFlashError

    if prompt_template is not None:
        prompt_template = prompt_template.replace("\\n", "\n")
    rows = load_rows(data, split=split)
    how = {"prompt_column": prompt_column, "prompt_template": prompt_template, "system": system, "max_turns": turns}
    conversations = list(read_conversations(rows, **how))
    if start >= len(conversations):
        raise DFlashError(f"--start is {start}, but the dataset has {len(conversations)} rows.")
    chosen = conversations[start:] if limit is None else conversations[start : start + limit]
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k} if sample else {}
    settings = {
        "prompts_sha256": digest_of([c.turns, c.tools] for c in conversations),
        "max_new_tokens": max_new_tokens,
        "sampling": {**sampling, "seed": seed} if sample else "greedy",
        "thinking": thinking,
    }
    if base_url is None:
        target_model, tokenizer = load_target(target, gguf_file=gguf_file, dtype=dtype, device_map=device_map)
        settings |= {
            "target_fingerprint": fingerprint_model(target_model),
            "chat_template_sha256": digest_of([tokenizer.chat_template]),
        }
        pad = tokenizer.pad_token_id
        answerer = local_answerer(
            target_model,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            pad_token_id=0 if pad is None else pad,
            generate_options={"do_sample": sample, **sampling},
        )
        context = getattr(target_model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        room = None if context is None else context - max_new_tokens
        if room is not None and room < 1:
            raise DFlashError(f"--max-new-tokens {max_new_tokens} exceeds the target's context of {context} tokens.")
    else:
        tokenizer = load_tokenizer(target, gguf_file=gguf_file)
        settings |= {"model": model or target, "chat_template_sha256": digest_of([tokenizer.chat_template])}
        if tokenizer.eos_token_id is None:
            raise DFlashError(f"The tokenizer of {target} has no end-of-sequence token, so answers cannot be ended.")
        fields = {"seed": seed, **sampling} if sample else {"temperature": 0.0}
        if fields.get("top_k") == 0:
            fields.pop("top_k")
        answerer = server_answerer(
            base_url,
            model=model or target,
            tokenizer=tokenizer,
            eos_token_id=tokenizer.eos_token_id,
            max_new_tokens=max_new_tokens,
            concurrency=batch_size,
            api_key=api_key,
            sampling=fields,
        )
        room = None
    with AnswerFile(output, settings) as file:
        total = sum(len(conversation.turns) for conversation in chosen)
        before = sum(min(file.turns_of(c.index), len(c.turns)) for c in chosen)
        if before:
            console.print(f"{before} of {total} answers are in {output} already", markup=False, highlight=False)
        set_seed(seed + file.rows)  # a run that goes on does not draw the same numbers again
        with Rate(console, total=total, before=before, unit="answers") as rate:
            progress = None
            for progress in answer_all(
                chosen,
                tokenizer=tokenizer,
                answerer=answerer,
                file=file,
                window=batch_size * BATCHES_IN_A_WINDOW,
                max_prompt_tokens=room,
                enable_thinking=thinking,
            ):
                rate.update(before + progress.answers, tokens=progress.tokens)
        console.print(
            f"{progress.answers} answers, {progress.tokens} tokens, {progress.cut} cut at {max_new_tokens} tokens, "
            f"{progress.too_long} prompts too long. Train with: dflash-hf train --target {target} --data {output} ...",
            markup=False,
            highlight=False,
        )
