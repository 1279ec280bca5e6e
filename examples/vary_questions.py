"""Word problems with other numbers and names: more questions for the target to answer where a dataset has run out.

    python examples/vary_questions.py --data gsm8k_train.jsonl --output varied.jsonl
    dflash-hf regenerate --target TARGET --data varied.jsonl --prompt-column question --output answers.jsonl

Takes seconds. The new questions need not make sense as arithmetic: a drafter learns what its target says, and the
target answers them all the same. The same value becomes the same new value within a question; 1 and 2, zeros at the end
and what stands behind a decimal point stay, so that "1/2", "$1,200" and "3.50" stay what they are. Rows are shuffled,
so that any number of them from the first is a sample of the whole. Vary training questions only, never those that you
measure with.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Annotated

import typer

from dflash_hf.data.sources import load_rows

_NAMES = """
Adam Alex Alice Amy Andrew Anna Anthony Ben Beth Betty Bill Billy Bob Brian Carl Carol Charles Charlie Chris
Claire Cindy Dan Daniel Dave David Debra Diana Ed Elaine Ella Emily Emma Eric Ethan Eva Frank Fred Gary George
Grace Greg Hannah Harry Helen Henry Jack Jacob Jake James Jane Janet Jason Jeff Jenny Jerry Jessica Jill Jim
Joe John Johnny Jordan Josh Julia Karen Kate Katie Kelly Ken Kevin Kim Kyle Laura Lily Linda Lisa Lucy Luke
Maria Mark Martha Mary Matt Max Megan Melissa Mia Michael Mike Molly Nancy Nick Nina Noah Olivia Oscar Pam
Paul Peter Rachel Randy Ray Rebecca Robert Rose Roy Ryan Sally Sam Samantha Sara Sarah Sean Sharon Sophia
Steve Susan Tim Tina Toby Tom Tommy Tony Tracy Travis Violet Walter Wendy Will William Zoe
"""
NAMES = _NAMES.split()

_VARIABLE = re.compile(r"(?<![\d.])[1-9]\d*?(?=0*(?!\d))|\b(?:" + "|".join(NAMES) + r")\b")


def vary(*, question: str, random_state: random.Random) -> str:
    """Return `question` with numbers (of as many digits) and first names drawn anew; one may come out as it was."""
    chosen: dict[str, str] = {"1": "1", "2": "2"}

    def other(match: re.Match[str]) -> str:
        old = match.group()
        if old not in chosen:
            if old.isdigit():
                chosen[old] = str(random_state.randrange(max(3, 10 ** (len(old) - 1)), 10 ** len(old)))
            else:
                chosen[old] = random_state.choice([name for name in NAMES if name not in chosen.values()])
        return chosen[old]

    return _VARIABLE.sub(other, question)


def main(
    data: Annotated[str, typer.Option(help="Hub dataset, file or folder with the questions.")],
    output: Annotated[Path, typer.Option(help="JSONL file to write.")],
    column: Annotated[str, typer.Option(help="Column with the question.")] = "question",
    copies: Annotated[int, typer.Option(min=1, help="New questions made of each.")] = 1,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
) -> None:
    """Write `copies` new questions for each row; one that comes out as it was is left out."""
    rows = load_rows(data, split=split)
    if column not in rows.column_names:
        raise typer.BadParameter(f"{data} has no column {column!r}; it has {', '.join(rows.column_names)}.")
    random_state = random.Random(seed)
    new = [(vary(question=old, random_state=random_state), old) for old in list(rows[column]) * copies]
    new = [question for question, old in new if question != old]
    random_state.shuffle(new)
    temporary = output.with_name(output.name + ".tmp")
    rows.from_dict({column: new}).to_json(temporary)
    os.replace(temporary, output)
    print(f"{len(new)} of {len(rows) * copies} questions written to {output}.")


if __name__ == "__main__":
    typer.run(main)
