"""`dflash-hf export`: write a drafter in the layout of other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .common import console, reports_errors


@reports_errors
def export(
    drafter: Annotated[str, typer.Argument(help="Drafter: Hub repository or folder.")],
    to: Annotated[str, typer.Option(help="speculators (vLLM's speculators) or dflash (z-lab's layout).")],
    output: Annotated[Path, typer.Option(help="Folder to write; it must not exist yet, or be empty.")],
    target: Annotated[
        str | None, typer.Option(help="The drafter's target, where the drafter does not record it.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the drafter's repository.")] = None,
) -> None:
    """Convert a drafter, load the result and compare one draft; refuse what the other layout cannot say."""
    from ..checkpoints import FAMILIES
    from ..hub.export import export_drafter

    with console.status(f"Exporting {escape(drafter)}"):
        report = export_drafter(drafter, to=to, output=output, target=target, revision=revision)
    console.print(
        f"{FAMILIES[report.source_family].TITLE} -> {FAMILIES[report.family].TITLE}: {output}\n"
        f"One draft on {report.context_rows} random context rows, loaded back: hidden states differ by "
        f"{report.difference:g}, same proposals.",
        markup=False,
        highlight=False,
    )
    if report.dropped:
        console.print(f"Not stored, because they equal the target's: {', '.join(report.dropped)}", markup=False)
