"""The `dflash-hf` command: names only. Heavy libraries are imported inside the commands."""

from __future__ import annotations

import typer

from .cache_features import cache_features
from .calibrate import calibrate
from .chat import chat
from .evaluate import evaluate
from .export import export
from .generate import generate
from .index_tokens import index_tokens
from .info import info
from .regenerate import regenerate
from .train import train

app = typer.Typer(
    help="DFlash drafters for Hugging Face transformers: train them, look at them, generate with them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(generate)
app.command()(chat)
app.command()(train)
app.command()(regenerate)
app.command()(cache_features)
app.command()(evaluate)
app.command()(calibrate)
app.command()(info)
app.command()(index_tokens)
app.command()(export)

if __name__ == "__main__":
    app()
