"""`dflash-hf generate`: answer a prompt with a target and a drafter, streaming."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import console, load_target, reports_errors


@reports_errors
def generate(
    target: Annotated[str, typer.Option(help="Target: Hub repository or folder (a folder with one GGUF file too).")],
    drafter: Annotated[str, typer.Option(help="Drafter: Hub repository or folder.")],
    prompt: Annotated[str, typer.Option(help="The user's message.")],
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="enable_thinking of the template; as the drafter was trained."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of greedy decoding.")] = False,
    temperature: Annotated[float, typer.Option(help="With --sample.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="With --sample.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="With --sample; 0: off.")] = 0,
    block_size: Annotated[int | None, typer.Option(help="Run the drafter with a smaller block.")] = None,
    num_assistant_tokens: Annotated[
        int | None, typer.Option(help="Send only this many proposals of a block to the target.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also run the target alone and compare.")] = False,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    device_map: Annotated[str | None, typer.Option(help="For example auto.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the drafter's repository.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for --sample.")] = None,
) -> None:
    """Generate with a drafter; the text streams, the statistics follow."""
    import time

    import torch
    from transformers import TextStreamer, set_seed

    from dflash_hf import DFlashDraftModel

    model, tokenizer = load_target(target, gguf_file=gguf_file, dtype=dtype, device_map=device_map)
    draft = DFlashDraftModel.from_pretrained(drafter, dtype=model.dtype, revision=revision or "main")
    draft.to(model.device)
    if block_size is not None:
        draft.generation_config.block_size = block_size
    if num_assistant_tokens is not None:
        draft.generation_config.num_assistant_tokens = num_assistant_tokens
    if raw or not getattr(tokenizer, "chat_template", None):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        thinking = draft.config.enable_thinking if thinking is None else thinking
        inputs = tokenizer.apply_chat_template(
            messages,
            **({} if thinking is None else {"enable_thinking": thinking}),
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
    inputs = inputs.to(model.device)
    options = {"max_new_tokens": max_new_tokens, "do_sample": sample}
    if sample:
        options |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    if seed is not None:
        set_seed(seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = model.generate(**inputs, **options, assistant_model=draft, streamer=streamer)
    stats = draft.last_generation_stats
    console.print(f"[bold]{stats}[/]", highlight=False)
    if compare:
        started = time.perf_counter()
        plain = model.generate(**inputs, **options)
        seconds = time.perf_counter() - started
        tokens = plain.shape[1] - inputs["input_ids"].shape[1]
        same = "" if sample else f", same tokens: {'yes' if torch.equal(plain, output) else 'no'}"
        console.print(
            f"plain generate: {tokens} tokens, {tokens / seconds:.1f} tokens/s, speed-up "
            f"{stats.tokens_per_second * seconds / tokens:.2f}{same}",
            highlight=False,
        )
