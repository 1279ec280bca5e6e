"""What several commands share: loading a target, reporting errors of the package."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import DFlashError

console = Console()
errors = Console(stderr=True)


def reports_errors(command: Callable) -> Callable:
    """Print errors of the package and of missing files as one message and exit with 1; others keep their traceback."""

    @functools.wraps(command)
    def run(*args, **kwargs):
        try:
            return command(*args, **kwargs)
        except (DFlashError, OSError) as error:  # a missing file or repository is the user's to mend as well
            errors.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False)
            raise typer.Exit(1) from error

    return run


def command_line(ctx: typer.Context) -> str:
    """The command as it could be typed again, for a card: without defaults, and absolute paths by their last name."""
    words = ["dflash-hf", ctx.info_name or ""]
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name)
        if value is None or value == parameter.default:
            continue
        if isinstance(value, bool):
            words += parameter.opts[:1] if value else parameter.secondary_opts[:1]
            continue
        option = [parameter.opts[0]] if parameter.opts[0].startswith("-") else []
        for each in value if isinstance(value, (list, tuple)) else [value]:
            words += [*option, Path(each).name if Path(str(each)).is_absolute() else str(each)]
    return shlex.join(words)


def gguf_file_in(target: str, gguf_file: str | None) -> str | None:
    """The GGUF file to load from `target`: the one named, or the only one in a folder that has no config.json."""
    folder = Path(target)
    if gguf_file is not None or not folder.is_dir() or (folder / "config.json").exists():
        return gguf_file
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise DFlashError(
            f"{target} holds {len(found)} GGUF files; name one with --gguf-file: {[f.name for f in found]}"
        )
    return found[0].name if found else None


def load_tokenizer(target: str, *, gguf_file: str | None):
    """The target's tokenizer alone."""
    from transformers import AutoTokenizer

    where = {"gguf_file": gguf} if (gguf := gguf_file_in(target, gguf_file)) else {}
    return AutoTokenizer.from_pretrained(target, **where)


def load_target(target: str, *, gguf_file: str | None, dtype: str, device_map: str | None = None):
    """Target model and tokenizer from a Hub repository, a folder, or a GGUF file in either.

    Returns:
        `(model, tokenizer)`.
    """
    from transformers import AutoModelForCausalLM

    where = {"gguf_file": gguf} if (gguf := gguf_file_in(target, gguf_file)) else {}
    with console.status(f"Loading the target {escape(target)}"):
        tokenizer = load_tokenizer(target, gguf_file=gguf_file)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, device_map=device_map, **where)
    return model.eval(), tokenizer


def parse_taps(taps: str | None) -> list[int] | None:
    """`"1,8,14"` -> `[1, 8, 14]`."""
    if taps is None:
        return None
    try:
        return [int(part) for part in taps.split(",")]
    except ValueError as error:
        raise DFlashError(
            f"--taps is {taps!r}; give layer numbers with commas between them, such as 1,8,14."
        ) from error
