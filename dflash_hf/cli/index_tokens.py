"""`dflash-hf index-tokens`: give an existing drafter an index of frequent tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .common import console, load_tokenizer, reports_errors


@reports_errors
def index_tokens(
    drafter: Annotated[Path, typer.Argument(help="Folder of the drafter; only frequent_tokens.json is written.")],
    data: Annotated[
        list[str],
        typer.Option(help="Responses of the target, as `train` takes them; may be given several times."),
    ],
    size: Annotated[int, typer.Option(help="Tokens in the index.", min=1)] = 8192,
    target: Annotated[
        str | None, typer.Option(help="Whose tokenizer renders messages; by default the target of the drafter.")
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target.")] = None,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    max_length: Annotated[int, typer.Option(help="Longest example, in tokens.")] = 3072,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="enable_thinking of the chat template.")
    ] = None,
) -> None:
    """Let a drafter propose only the most frequent tokens of some data: a cheaper draft, the same output."""
    from dflash_hf import DFlashConfig

    from ..data.token_counts import count_tokens, most_frequent
    from ..errors import DFlashError
    from ..token_index import FILE_NAME, checked_index, write_index
    from .examples import load_sources, prepare_examples, thinking_of

    if not (drafter / "config.json").is_file():
        raise DFlashError(f"{drafter} is not the folder of a drafter: it has no config.json. Download it first.")
    config = DFlashConfig.from_pretrained(drafter)
    if config.draft_vocab_size is not None:
        raise DFlashError(f"{drafter} proposes {config.draft_vocab_size} tokens only already (draft_vocab_size).")
    sources, _ = load_sources(data, split=split, eval_data=None, eval_split=None)
    needed = any({"messages", "conversations"} & set(rows.column_names) for rows in sources)
    name = target or config.target_name_or_path
    if needed and name is None:
        raise DFlashError("The data holds messages and the drafter does not record its target: name it with --target.")
    examples = prepare_examples(
        sources,
        tokenizer=load_tokenizer(name, gguf_file=gguf_file) if needed else None,
        max_length=max_length,
        enable_thinking=thinking_of(data, config.enable_thinking if thinking is None else thinking),
        num_rows=config.vocab_size,
    )
    counts = count_tokens(examples)
    index = checked_index(most_frequent(counts, size), vocab_size=config.vocab_size)
    write_index(index, drafter)
    covered = sum(counts[token] for token in index.tolist()) / counts.total()
    console.print(
        f"{escape(str(drafter / FILE_NAME))}: {len(index)} of {config.vocab_size} tokens, "
        f"{100 * covered:.2f}% of the {counts.total()} response tokens in the data",
        highlight=False,
    )
