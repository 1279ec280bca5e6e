"""`dflash-hf chat`: a conversation with a target and a drafter."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import console, load_target, reports_errors


@reports_errors
def chat(
    target: Annotated[str, typer.Option(help="Target: Hub repository or folder (a folder with one GGUF file too).")],
    drafter: Annotated[str, typer.Option(help="Drafter: Hub repository or folder.")],
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of greedy decoding.")] = False,
    temperature: Annotated[float, typer.Option(help="With --sample.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="With --sample.")] = 1.0,
    num_assistant_tokens: Annotated[
        int | None, typer.Option(help="Send only this many proposals of a block to the target.")
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    device_map: Annotated[str | None, typer.Option(help="For example auto.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the drafter's repository.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for --sample.")] = None,
) -> None:
    """Talk with a target, turn by turn, on one cache. /reset begins anew, /exit or the end of the input leaves."""
    from transformers import TextStreamer, set_seed

    from dflash_hf import DFlashDraftModel, DFlashError, DFlashSession

    model, tokenizer = load_target(target, gguf_file=gguf_file, dtype=dtype, device_map=device_map)
    if not getattr(tokenizer, "chat_template", None):
        raise DFlashError(f"The tokenizer of {target} has no chat template. Use `dflash-hf generate --raw` with it.")
    draft = DFlashDraftModel.from_pretrained(drafter, dtype=model.dtype, revision=revision or "main").to(model.device)
    if num_assistant_tokens is not None:
        draft.generation_config.num_assistant_tokens = num_assistant_tokens
    options = {"max_new_tokens": max_new_tokens, "do_sample": sample}
    if sample:
        options |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
    if seed is not None:
        set_seed(seed)
    session = DFlashSession(model, draft)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    while True:
        try:
            text = console.input("[bold cyan]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if text == "/exit":
            break
        if text == "/reset":
            messages = list(beginning)
            session.reset()
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        length = inputs["input_ids"].shape[1]
        cached = session.cached_tokens
        output = session.generate(inputs["input_ids"], streamer=streamer, **options)
        answer = tokenizer.decode(output[0, length:], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        stats = session.last_generation_stats
        console.print(
            f"[dim]{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, acceptance length "
            f"{stats.acceptance_length:.2f}; {length} tokens of conversation, {cached} from the cache[/]",
            highlight=False,
            soft_wrap=True,
        )
