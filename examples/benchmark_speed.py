"""Tokens per second against what a user would run instead: over texts, batch sizes, contexts and loops.

    python examples/benchmark_speed.py texts    --data gsm8k_test.jsonl   # default, every fixed length, plain
    python examples/benchmark_speed.py batches  --data gsm8k_test.jsonl   # batch 1, 2, 4, 8
    python examples/benchmark_speed.py loops    --data gsm8k_test.jsonl   # transformers' own DFlash loop, z-lab's
    python examples/benchmark_speed.py contexts --data gsm8k_test.jsonl   # 512 to 8,192 tokens of context

Target and drafter as in quickstart.py, `--dtype bfloat16` for a CPU with AMX. Every way of generating is run in turn,
`--repeats` times after a warm-up; medians. `--data` is a JSONL file with a `question` column, openai/gsm8k from the Hub
by default. About five minutes each on two CPU cores; run nothing beside it.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import load_dataset
from quickstart import DRAFTER, Drafter, Dtype, Json, Pack, Target, configure, console, load_target
from rich.table import Table

from dflash_hf import DFlashDraftModel, calibrate
from dflash_hf.data.sources import load_rows
from dflash_hf.evaluation.comparison import write_result

CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance -= amount
        return self.balance
"""
EDIT = f"""Here is a Python class:

```python
{CODE}```

Write the same class again, with the name Account changed to Wallet."""
POEM = "Write a strange poem about rust, moths and the sea."

app = typer.Typer(add_completion=False)
Data = Annotated[str | None, typer.Option(help="JSONL file with a `question` column.")]
Repeats = Annotated[int, typer.Option(help="Runs of each way.", min=1)]
NewTokens = Annotated[int, typer.Option(help="Most new tokens of an answer.", min=2)]
# One way of generating: runs, and returns the ids.
Way = Callable[[], torch.Tensor]


class Pair:
    """Target, drafter and tokenizer, as the options ask; `most` is a whole block's number of proposals."""

    def __init__(self, target: str | None, drafter: str, dtype: str | None, pack: bool | None):
        self.model, self.tokenizer = load_target(target, dtype)
        self.drafter = DFlashDraftModel.from_pretrained(drafter, dtype=self.model.dtype).to(self.model.device)
        self.settings = configure(self.model, self.drafter, pack=pack, whole_vocabulary=False)
        self.most = self.drafter.config.block_size - self.drafter.config.first_slot
        self.settings["threads"] = torch.get_num_threads()
        console.print(self.settings)

    def prompts(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """Inputs of `generate` for a batch of user messages, padded on the left."""
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        chats = [[{"role": "user", "content": text}] for text in texts]
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
        return self.tokenizer.apply_chat_template(chats, **options).to(self.model.device)

    def generate(self, inputs, **options) -> torch.Tensor:
        """Plain, or with `assistant_model` in the options."""
        return self.model.generate(**inputs, **{"do_sample": False, **options})

    def with_length(self, count: int | str | None, run: Way) -> Way:
        """`run` with that many proposals a round; None: chosen by cost, the default."""
        knobs = self.drafter.generation_config

        def way() -> torch.Tensor:
            knobs.num_assistant_tokens = count
            try:
                return run()
            finally:
                knobs.num_assistant_tokens = None

        return way


def questions(data: str | None, count: int) -> list[str]:
    """The first questions of GSM8K's test set, as the shipped drafter's target was asked."""
    rows = load_rows(data) if data else load_dataset("openai/gsm8k", "main", split="test")
    return [f"{row['question']}\nSolve the problem step by step." for row in rows.select(range(count))]


def measure(
    ways: dict[str, list[Way]], lengths: list[int], repeats: int, *, sampled: bool = False
) -> dict[str, dict[str, Any]]:
    """Medians over interleaved runs: a way is a list of calls, one a prompt.

    Args:
        ways: calls by name; the first one is plain generation.
        lengths: prompt length of each call.
        repeats: runs of each after the warm-up.
        sampled: outputs differ by chance.

    Returns:
        for each way its `tokens_per_second`, `ratio` to the first way, and whether it gave the `same_tokens` as that
        one in every run (None when sampled).
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, list[int]] = {name: [] for name in ways}
    same = dict.fromkeys(ways, True)
    for repeat in range(repeats + 1):
        reference: list[torch.Tensor] = []
        for name, calls in ways.items():
            torch.manual_seed(repeat)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            started = time.perf_counter()
            outputs = [call() for call in calls]
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
                tokens[name].append(sum(_new_tokens(ids, length) for ids, length in zip(outputs, lengths)))
            reference = reference or outputs
            same[name] &= all(torch.equal(one, other) for one, other in zip(outputs, reference))
    speeds = {
        name: statistics.median(count / time for count, time in zip(tokens[name], seconds[name])) for name in ways
    }
    plain = next(iter(speeds.values()))
    return {
        name: {"tokens_per_second": speed, "ratio": speed / plain, "same_tokens": None if sampled else same[name]}
        for name, speed in speeds.items()
    }


def _new_tokens(ids: torch.Tensor, length: int) -> int:
    # Rows of a batch are padded after their end; that is what plain generation computes as well.
    return ids.shape[0] * (ids.shape[1] - length)


def show(title: str, measured: dict[str, dict[str, Any]]) -> None:
    """A table of `measure`."""
    table = Table("way", "tokens/s", "ratio", "same tokens", title=title)
    for name, numbers in measured.items():
        same = {True: "yes", False: "no", None: ""}[numbers["same_tokens"]]
        table.add_row(name, f"{numbers['tokens_per_second']:.1f}", f"{numbers['ratio']:.2f}", same)
    console.print(table)


def finish(result: dict[str, Any], json_file: Path | None) -> None:
    """Write the numbers, if asked to."""
    if json_file is not None:
        write_result(result, json_file)


@app.command()
def texts(
    data: Data = None,
    target: Target = None,
    drafter: Drafter = str(DRAFTER),
    dtype: Dtype = None,
    pack: Pack = None,
    measured_costs: Annotated[
        bool, typer.Option("--calibrate", help="Choose lengths by costs measured here, not by the device's usual ones.")
    ] = False,
    proposals: Annotated[
        list[int] | None, typer.Option(help="Fixed lengths to run; all of them by default, which takes long.")
    ] = None,
    repeats: Repeats = 3,
    new_tokens: NewTokens = 160,
    json_file: Json = None,
) -> None:
    """A code edit, GSM8K questions and a poem at temperature 1: the default against every fixed length and plain."""
    pair = Pair(target, drafter, dtype, pack)
    if measured_costs:
        calibrate(pair.drafter, pair.model)
    result: dict[str, Any] = {"settings": pair.settings, "calibrated": measured_costs}
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    for name, batch, options in (
        ("code edit", [EDIT], {}),
        ("GSM8K", questions(data, 2), {}),
        ("poem, temperature 1", [POEM] * 3, sampling),
    ):
        inputs = [pair.prompts([text]) for text in batch]
        options["max_new_tokens"] = new_tokens

        def calls(count=None, *, inputs=inputs, options=options, **more):
            return [pair.with_length(count, lambda i=i: pair.generate(i, **options, **more)) for i in inputs]

        assisted = {"assistant_model": pair.drafter}
        ways = {"plain": calls(), "DFlash": calls(**assisted)}
        for count in proposals or range(1, pair.most + 1):
            ways[f"{count} proposals"] = calls(count, **assisted)
        lengths = [i["input_ids"].shape[1] for i in inputs]
        measured = measure(ways, lengths, repeats, sampled="do_sample" in options)
        fixed = [numbers["ratio"] for way, numbers in measured.items() if way.endswith("proposals")]
        share = measured["DFlash"]["ratio"] / max(*fixed, 1.0)
        result[name] = {"ways": measured, "of_best_fixed": share}
        show(f"{name}: the default is at {share:.2f} of the best fixed length, 0 included", measured)
    finish(result, json_file)


@app.command()
def batches(
    data: Data = None,
    target: Target = None,
    drafter: Drafter = str(DRAFTER),
    dtype: Dtype = None,
    pack: Pack = None,
    size: Annotated[list[int] | None, typer.Option(help="Batch size; 1, 2, 4 and 8 by default.")] = None,
    repeats: Repeats = 3,
    new_tokens: NewTokens = 128,
    json_file: Json = None,
) -> None:
    """GSM8K questions in batches, plain and with the drafter at the same batch size."""
    pair = Pair(target, drafter, dtype, pack)
    sizes = size or [1, 2, 4, 8]
    asked = questions(data, max(sizes))
    result: dict[str, Any] = {"settings": pair.settings}
    for count in sizes:
        inputs = [pair.prompts(asked[start : start + count]) for start in range(0, max(sizes), count)]

        def calls(inputs=inputs, **more):
            return [lambda i=i: pair.generate(i, max_new_tokens=new_tokens, **more) for i in inputs]

        ways = {"plain": calls(), "DFlash": calls(assistant_model=pair.drafter)}
        result[f"batch {count}"] = measure(ways, [i["input_ids"].shape[1] for i in inputs], repeats)
        show(f"batch {count}", result[f"batch {count}"])
    finish(result, json_file)


@app.command()
def loops(
    data: Data = None,
    target: Target = None,
    drafter: Drafter = str(DRAFTER),
    dtype: Dtype = None,
    pack: Pack = None,
    limit: Annotated[int, typer.Option(help="Questions.")] = 4,
    repeats: Repeats = 3,
    new_tokens: NewTokens = 160,
    json_file: Json = None,
) -> None:
    """Same weights, same questions: plain generation, transformers' own DFlash loop, z-lab's, and this package.

    Packing works on the models themselves, so that all loops gain from it; whole blocks, which is all the others know.
    """
    pair = Pair(target, drafter, dtype, pack)
    inputs = [pair.prompts([text]) for text in questions(data, limit)]
    assisted = {"assistant_model": pair.drafter, "max_new_tokens": new_tokens}

    def calls(count=None, **more):
        return [pair.with_length(count, lambda i=i: pair.generate(i, **more)) for i in inputs]

    ways = {
        "plain": calls(max_new_tokens=new_tokens),
        "transformers": calls(speculation_type="dflash", **assisted),
        "dflash_hf, whole blocks": calls(pair.most, **assisted),
        "dflash_hf": calls(**assisted),
    }
    zlab = _zlab(pair, new_tokens)
    if zlab is not None:
        ways["z-lab 0.1.0"] = [lambda i=i: zlab(i["input_ids"]) for i in inputs]
    measured = measure(ways, [i["input_ids"].shape[1] for i in inputs], repeats)
    for other in ("transformers", "z-lab 0.1.0"):
        if other in measured:
            measured["dflash_hf"][f"ratio to {other}"] = measured["dflash_hf"]["ratio"] / measured[other]["ratio"]
    show(f"{limit} questions", measured)
    console.print({key: round(value, 3) for key, value in measured["dflash_hf"].items() if key.startswith("ratio to")})
    finish({"settings": pair.settings, "loops": measured}, json_file)


def _zlab(pair: Pair, new_tokens: int):
    """z-lab's loop on the same weights, where its package is installed (pip install --no-deps dflash==0.1.0)."""
    if importlib.util.find_spec("dflash") is None:
        return None
    from dflash.model import DFlashDraftModel as ZLabDraftModel
    from dflash.model import dflash_generate

    with tempfile.TemporaryDirectory() as folder:
        pair.drafter.save_pretrained(folder)
        theirs = ZLabDraftModel.from_pretrained(folder, dtype=pair.drafter.dtype).to(pair.model.device).eval()
    if pair.settings["packed linear layers"]:
        from dflash_hf import pack_linears

        pack_linears(theirs)
    ends = pair.model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return lambda ids: dflash_generate(theirs, pair.model, ids, new_tokens, ends, temperature=0.0)


@app.command()
def contexts(
    data: Data = None,
    target: Target = None,
    drafter: Drafter = str(DRAFTER),
    dtype: Dtype = None,
    pack: Pack = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens of context; 512, 2048 and 8064 by default.")] = None,
    repeats: Repeats = 3,
    new_tokens: NewTokens = 48,
    json_file: Json = None,
) -> None:
    """Milliseconds a round after prompts of different length, whole blocks, against plain generation's a token."""
    pair = Pair(target, drafter, dtype, pack)
    pair.drafter.generation_config.num_assistant_tokens_schedule = "constant"
    longest = max(lengths := length or [512, 2048, 8064])
    ids = pair.tokenizer("\n\n".join(questions(data, 4)), return_tensors="pt")["input_ids"].to(pair.model.device)
    ids = ids.repeat(1, longest // ids.shape[1] + 1)  # what it says costs nothing
    result: dict[str, Any] = {"settings": pair.settings}
    table = Table("context", "plain, ms a token", "draft", "verification", "rest", "round, ms", "round / plain")
    options = {"do_sample": False, "eos_token_id": -1}  # every run is as long
    for count in lengths:
        inputs = {"input_ids": ids[:, :count], "attention_mask": torch.ones_like(ids[:, :count])}
        rows = []
        for repeat in range(repeats + 1):
            numbers = _round(pair, inputs, new_tokens, options)
            if repeat:
                rows.append(numbers)
        names = ("plain", "draft", "verification", "rest")
        medians = {name: statistics.median(row[name] for row in rows) for name in names}
        medians["round"] = sum(medians[name] for name in names[1:])
        result[str(count)] = medians
        cells = (f"{value:.1f}" for value in medians.values())
        table.add_row(str(count), *cells, f"{medians['round'] / medians['plain']:.2f}")
    console.print(table)
    finish(result, json_file)


def _round(pair: Pair, inputs, new_tokens: int, options: dict[str, Any]) -> dict[str, float]:
    """Milliseconds without the prefill, which is run apart for plain generation."""
    prefill = _seconds(lambda: pair.model.generate(**inputs, **options, max_new_tokens=1))
    plain = _seconds(lambda: pair.model.generate(**inputs, **options, max_new_tokens=new_tokens))
    pair.model.generate(**inputs, **options, max_new_tokens=new_tokens, assistant_model=pair.drafter)
    stats = pair.drafter.last_generation_stats
    rest = stats.total_seconds - stats.prefill_seconds - stats.draft_seconds - stats.verify_seconds
    return {
        "plain": 1000 * (plain - prefill) / (new_tokens - 1),
        "draft": 1000 * stats.draft_seconds / stats.rounds,
        "verification": 1000 * stats.verify_seconds / stats.rounds,
        "rest": 1000 * rest / stats.rounds,
    }


def _seconds(run: Way) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    app()
