"""Random calls of `generate` with a drafter, each compared with plain `generate` on the same batch.

    python tests/generation/fuzzing.py --seed 17                       one case, with what differs
    python tests/generation/fuzzing.py --cases 2000 --jsonl out.jsonl  many; goes on where an earlier run ended

Greedy, fp32. A case that differs is run again in float64: where both calls then agree, fp32 rounding decided between
two tokens (or two experts) of nearly equal score, and the case is counted as a tie.
"""

import argparse
import copy
import json
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

from dflash_hf.errors import UnsupportedGenerationError

sys.path.append(str(Path(__file__).parent.parent))  # conftest.py, when this file runs as a script

from fuzz_cases import Case, draw_case, options_of, prompt_of  # noqa: E402
from fuzz_targets import CANNOT_VERIFY, build_target, image_inputs  # noqa: E402
from generation_helpers import CACHE_NAME, cache_of  # noqa: E402
from knowing_drafter import knowing_drafter, recorded  # noqa: E402

from dflash_hf.generation.round_costs import conditions_of  # noqa: E402

# Margin between the two largest scores below which the choice is rounding.
TIE = 1e-4
SAME, REFUSED, NO_ORACLE, DRAW = "same", "refused", "plain fails", "tie"


class PlainFails(Exception):
    """Plain generate cannot do what a case asks of this target."""


@dataclass
class Result:
    """What came of a case."""

    status: str
    detail: str = ""
    rounds: int = 0
    new_tokens: int = 0

    @property
    def failed(self) -> bool:
        return self.status not in (SAME, REFUSED, NO_ORACLE, DRAW)


def _inputs(case: Case, target) -> dict:
    ids, mask = prompt_of(case)
    if case.image:
        full = torch.ones_like(ids) if mask is None else mask
        return image_inputs(case.target, ids, full, case.seed)
    inputs = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
    if case.embeds:
        ids = inputs.pop("input_ids")
        inputs["inputs_embeds"] = target.get_input_embeddings()(ids).detach()
    if case.cache not in ("turn_full_ids", "turn_new_ids"):
        return inputs
    turn = _oracle(target, inputs, {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True})
    more = torch.randint(4, 90, (len(ids), 4), generator=torch.Generator().manual_seed(case.seed + 2))
    given = turn.sequences if case.cache == "turn_full_ids" else turn.sequences[:, -1:]
    inputs["input_ids"] = torch.cat([given, more], dim=1)
    if mask is not None or case.cache == "turn_new_ids":
        mask = torch.ones_like(ids) if mask is None else mask
        inputs["attention_mask"] = torch.nn.functional.pad(mask, (0, 9), value=1)
    inputs[CACHE_NAME] = cache_of(turn)
    return inputs


def _generate(target, inputs: dict, options: dict, **more):
    inputs = {**inputs, CACHE_NAME: copy.deepcopy(inputs[CACHE_NAME])} if CACHE_NAME in inputs else inputs
    return target.generate(**inputs, **options, **more)


def _oracle(target, inputs: dict, options: dict):
    """Plain generate.

    Raises:
        PlainFails: if this target cannot do that.
    """
    try:
        return _generate(target, inputs, options)
    except Exception as error:  # whatever a target raises
        raise PlainFails(f"{type(error).__name__}: {str(error)[:200]}") from error


def _plain(case: Case, target, inputs: dict, width: int):
    """What plain generate says without the options, what it says with them, and the features of that."""
    said = _oracle(target, inputs, {"max_new_tokens": max(case.new_tokens, 3), "do_sample": False})[:, width:].tolist()
    options = {**options_of(case, width, said), "return_dict_in_generate": True, "output_scores": True}
    expected, features = recorded(target, case.taps, lambda: _oracle(target, inputs, options))
    if "guidance_scale" in case.processors:  # the processor ran the target too
        features = _features_of_text(case, target, inputs, expected.sequences[:, :-1])
    return said, expected, features


def _assisted(case: Case, target, inputs: dict, options: dict, expected, features):
    """The same call with a drafter that knows the answer as well as the case says; the output and the drafter."""
    drafter = knowing_drafter(target, block_size=case.block_size, layers=1, target_layer_ids=case.taps)
    knobs = drafter.generation_config
    knobs.num_assistant_tokens = case.num_assistant_tokens
    if case.by_cost is not None:  # copying too
        knobs.num_assistant_tokens_schedule = None
    if case.by_cost == "free":
        costs = {"draft": [[1, 0.01]], "verify": [[1, 1.0], [40, 1.01]], "batch_size": 1, "context_length": 8}
        knobs.dflash_round_costs = [{**conditions_of(target), **costs}]
    text = expected.sequences
    if "input_ids" not in inputs:  # embeddings stand in front of the text
        text = torch.nn.functional.pad(text, (inputs["inputs_embeds"].shape[1], 0))
    drafter.know(target, features, text, right=case.right, seed=case.seed)
    drafter.to(target.dtype)
    return _generate(target, inputs, options, assistant_model=drafter), drafter


def _features_of_text(case: Case, target, inputs: dict, text: torch.LongTensor) -> torch.Tensor:
    """The features of a whole text from one prefill; none where its prompt is not only ids."""
    if case.image or case.embeds or case.cache == "turn_new_ids" or not text.shape[1]:
        return torch.zeros(len(text), 0, len(case.taps) * target.config.get_text_config().hidden_size)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
    simple = {"max_new_tokens": 1, "do_sample": False}
    return recorded(target, case.taps, lambda: _oracle(target, {"input_ids": text, "attention_mask": mask}, simple))[1]


def _compare(case: Case, target) -> Result:
    """Run both calls once."""
    inputs = _inputs(case, target)
    width = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    said, expected, features = _plain(case, target, inputs, width)
    options = options_of(case, width, said)
    if case.scores:
        options.update(return_dict_in_generate=True, output_scores=True)
    output, drafter = _assisted(case, target, inputs, options, expected, features)
    stats = drafter.last_generation_stats
    ids = output.sequences if case.scores else output
    result = Result(SAME, rounds=stats.rounds, new_tokens=stats.new_tokens)
    if ids.tolist() != expected.sequences.tolist():
        margin = _margin(ids, expected, width)
        result.status = DRAW if margin < TIE else "different"
        result.detail = f"margin {margin:.1e}\n  plain    {expected.sequences[:, width:].tolist()}\n"
        result.detail += f"  assisted {ids[:, width:].tolist()}"
    elif case.scores and (detail := _scores_differ(output.scores, expected.scores, ids[:, width:])):
        result.status, result.detail = "scores", detail
    elif drafter.guesses and "guidance_scale" not in case.processors:
        result.status, result.detail = "features", f"{drafter.guesses} draft rows had features of no prefix of the text"
    return result


def _margin(ids: torch.LongTensor, expected, width: int) -> float:
    """Smallest margin of plain generate where a row first differs."""
    ours, theirs = ids[:, width:], expected.sequences[:, width:]
    margins = []
    for row in range(len(theirs)):
        for step in range(theirs.shape[1]):
            if step >= ours.shape[1] or ours[row, step] != theirs[row, step]:
                best = expected.scores[step][row].topk(2).values
                margins.append(float(best[0] - best[1]))
                break
    return min(margins, default=float("inf"))


def _scores_differ(ours: tuple, theirs: tuple, new: torch.LongTensor) -> str:
    """Where scores of live rows differ; a row is live until it says pad."""
    if len(ours) != len(theirs):
        return f"{len(ours)} scores instead of {len(theirs)}"
    live = torch.ones(len(new), dtype=torch.bool)
    for step, (mine, plain) in enumerate(zip(ours, theirs)):
        live &= new[:, step] != 0
        a, b = mine[live].float(), plain[live].float()
        if not torch.allclose(a, b, atol=2e-3, rtol=2e-3):
            return f"scores of step {step} differ by {(a - b).abs().nan_to_num(0).max():.1e}"
    return ""


def run_case(case: Case) -> Result:
    """Compare; options that plain generate cannot do for this target are left out."""
    target = build_target(case.target)
    for left_out in ({}, {"chunk": None}, {"chunk": None, "cache": None, "embeds": False, "processors": []}):
        try:
            result = _compare(replace(case, **left_out), target)
            if result.status == "different":
                exact = copy.deepcopy(target).double()
                if _compare(replace(case, **left_out), exact).status == SAME:
                    result.status = DRAW
            return result
        except PlainFails as error:
            result = Result(NO_ORACLE, str(error))
        except Exception as error:  # a fuzzer reports whatever happens
            frames = traceback.extract_tb(error.__traceback__)
            where = next((frame for frame in reversed(frames) if "/dflash_hf/" in frame.filename), frames[-1])
            detail = f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
            refused = isinstance(error, UnsupportedGenerationError) and case.target in CANNOT_VERIFY
            return Result(REFUSED if refused else "error", detail)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="one case")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jsonl", type=Path, help="results; seeds that it holds already are not run again")
    parser.add_argument("--target", help="only this configuration class")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    seeds = [options.seed] if options.seed is not None else range(options.start, options.start + options.cases)
    records = []
    if options.jsonl and options.jsonl.exists():
        records = [json.loads(line) for line in options.jsonl.read_text().splitlines()]
    done = {record["seed"] for record in records}
    for seed in seeds:
        case = draw_case(seed)
        if seed in done or options.target not in (None, case.target):
            continue
        started = time.perf_counter()
        result = run_case(case)
        record = {"seed": seed, "case": str(case), "target": case.target, **vars(result)}
        record["seconds"] = round(time.perf_counter() - started, 2)
        records.append(record)
        if options.jsonl:
            with options.jsonl.open("a") as file:
                file.write(json.dumps(record) + "\n")
        if result.failed or options.seed is not None:
            print(f"{result.status}: {case}\n  {result.detail}", flush=True)
    summary: dict[str, Counter] = {}
    for record in records:
        summary.setdefault(record["target"], Counter())[record["status"]] += 1
    for target in sorted(summary):
        print(f"{target:24}", dict(summary[target]))
    print("all", dict(Counter(record["status"] for record in records)), f"{len(summary)} classes")


if __name__ == "__main__":
    with torch.no_grad():
        main()
