"""The example scripts, run on the recorded tiny pair through the functions that a user's command line calls."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import typer
from conftest import GOLDEN
from test_cli import make_target_folder
from typer.testing import CliRunner

from dflash_hf.data.feature_store import FeatureStore

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name: str, *arguments: str):
    sys.path.insert(0, str(EXAMPLES))
    try:
        module = runpy.run_path(str(EXAMPLES / name))
    finally:
        sys.path.remove(str(EXAMPLES))
    app = module.get("app")  # a script with commands
    if app is None:
        app = typer.Typer()
        app.command()(module["main"])
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """`--target` and `--drafter` of the recorded pair."""
    folder = make_target_folder(tmp_path_factory.mktemp("target"), chat_template=True)
    return "--target", folder, "--drafter", str(GOLDEN / "generation" / "drafter")


def test_quickstart_writes_the_promised_numbers(pair, tmp_path):
    file = tmp_path / "result.json"
    arguments = ("--prompt", "w5 w9 w17", "--prompt", "w30 w31", "--max-new-tokens", "20", "--json", str(file))
    output = run_example("quickstart.py", *pair, *arguments)
    result = json.loads(file.read_text())
    for key in ("same_tokens", "acceptance_length", "rounds", "plain_tokens_per_second", "dflash_tokens_per_second"):
        assert key in result
    assert result["same_tokens"] is True and result["rounds"] > 0
    assert result["settings"] == {
        "dtype": "float32",
        "packed linear layers": True,
        "frequent tokens": "all",
    }
    assert result["draft_ms_per_round"] > 0 < result["verify_ms_per_round"]
    assert result["speedup"] == pytest.approx(result["dflash_tokens_per_second"] / result["plain_tokens_per_second"])
    assert "same tokens" in output


def test_benchmark_counts_identical_prompts_and_runs_the_stock_loop(pair, tmp_path):
    data, file = tmp_path / "q.jsonl", tmp_path / "result.json"
    data.write_text("\n".join(json.dumps({"question": f"w{i} w{i + 3}"}) for i in range(10, 14)))
    arguments = ("--data", str(data), "--limit", "3", "--max-new-tokens", "16", "--stock", "--json", str(file))
    run_example("benchmark_gsm8k.py", *pair, *arguments)
    result = json.loads(file.read_text())
    assert result["prompts"] == result["identical_prompts"] == result["identical_to_stock_loop"] == 3


def test_cache_features_builds_a_store_and_trains_from_it(pair, tmp_path):
    """Losses of both kinds are printed and agree to the rounding of the store."""
    data = tmp_path / "answers.jsonl"
    rows = [
        {"input_ids": [(7 * i + j) % 100 + 4 for j in range(20)], "loss_mask": [0] * 5 + [1] * 15} for i in range(8)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    arguments = ("--data", str(data), "--store", str(tmp_path / "store"), "--limit", "6", "--steps", "2")
    output = run_example("cache_features.py", *pair, *arguments)
    assert "bytes a token" in output and len(FeatureStore(tmp_path / "store" / "train")) == 6
    online, offline = (
        [float(loss) for loss in line.split("losses ")[1].split()]
        for line in output.splitlines()
        if "an update, losses" in line
    )
    assert len(online) == 2 and online == pytest.approx(offline, rel=2e-2)


def test_benchmark_round_measures_every_loop(tmp_path):
    file = tmp_path / "result.json"
    run_example("benchmark_round.py", "--new-tokens", "12", "--repeats", "1", "--json", str(file))
    result = json.loads(file.read_text())
    for mode in ("greedy", "sampling"):
        for loop in ("transformers", "dflash_hf"):
            assert all(result[mode][loop][part] > 0 for part in ("draft_ms", "verify_ms", "rest_ms"))


def test_publish_writes_weights_and_a_card_with_the_facts(tmp_path):
    """The card holds the numbers of the benchmark and of the log, and the folder loads again in the stored dtype."""
    import shutil

    import torch

    from dflash_hf import DFlashDraftModel

    trained = tmp_path / "trained"
    shutil.copytree(GOLDEN / "generation" / "drafter", trained)
    log = [{"step": 10, "loss": 3.5}, {"step": 10, "eval_loss": 3.25, "eval_block_acceptance_length": 1.5}]
    log[1]["eval_slot_accuracy"] = 0.125
    (trained / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    numbers = {"prompts": 4, "identical_prompts": 4, "same_tokens": True, "acceptance_length": 2.5, "rounds": 7}
    numbers |= {"plain_tokens_per_second": 20.0, "dflash_tokens_per_second": 30.0, "speedup": 1.5}
    (tmp_path / "bench.json").write_text(json.dumps(numbers))
    out = tmp_path / "published"
    arguments = ("--drafter", str(trained), "--output", str(out), "--base-model", "someone/target")
    arguments += ("--training-command", "dflash-hf train --seed 7", "--benchmark", str(tmp_path / "bench.json"))
    numbers = {"generation_prompts": 3, "generation_rounds": 9, "generation_acceptance_length": 1.75}
    (tmp_path / "chat.json").write_text(json.dumps(numbers))
    arguments += ("--benchmark", str(tmp_path / "chat.json"))
    for name, first, second in (
        ("name", "GSM8K", "MT-Bench"),
        ("type", "openai/gsm8k", "lmsys/mt_bench_human_judgments"),
    ):
        arguments += (f"--dataset-{name}", first, f"--dataset-{name}", second)
    for name in ("command", "description"):
        arguments += (f"--benchmark-{name}", "") * 2
    run_example("publish.py", *arguments)
    card = (out / "README.md").read_text()
    for part in (
        "base_model: someone/target",
        "dflash-hf train --seed 7",
        "| 10 |  | 3.500 | 3.250 | 1.500 | 0.125 |",
        "| GSM8K | 4 | 4 | 2.500 | 20.0 | 30.0 | 1.50 |",
        "| MT-Bench | 3 |  | 1.750 | | | |",
    ):
        assert part in card
    assert "model-index" in card
    model = DFlashDraftModel.from_pretrained(out)
    assert model.dtype == torch.bfloat16 and model.config.target_name_or_path == "someone/target"


@pytest.mark.parametrize("command", ["texts", "batches", "loops", "contexts"])
def test_benchmark_speed_runs_every_way(pair, tmp_path, command):
    """Every way gives plain generation's tokens, and has a speed."""
    data, file = tmp_path / "q.jsonl", tmp_path / "result.json"
    data.write_text("\n".join(json.dumps({"question": f"w{i} w{i + 3}"}) for i in range(10, 14)))
    more = {"texts": ["--calibrate"], "batches": ["--size", "1", "--size", "2"], "loops": ["--limit", "2"]}
    more["contexts"] = ["--length", "40", "--length", "80"]
    arguments = ("--data", str(data), "--repeats", "1", "--new-tokens", "8", "--json", str(file))
    run_example("benchmark_speed.py", command, *pair, *arguments, *more.get(command, []))
    result = json.loads(file.read_text())
    assert result.pop("settings")["packed linear layers"] is True
    if command == "contexts":
        assert set(result) == {"40", "80"} and all(min(numbers.values()) > 0 for numbers in result.values())
        return
    if command == "texts":
        assert result.pop("calibrated") is True
        assert all(text["of_best_fixed"] > 0 for text in result.values())
        ways = [text["ways"] for text in result.values()]
        assert all(len(way) == 2 + 7 for way in ways)
    else:
        ways = list(result.values())
    for way in ways:
        assert way["plain"]["ratio"] == 1.0 and len(way) >= 2
        assert all(numbers["same_tokens"] in (True, None) and numbers["ratio"] > 0 for numbers in way.values())


def grammar_data(folder, count=24):
    """Answers of a small grammar, as token ids."""
    rows = [{"prompt_ids": [1, 5 + i, 9], "response_ids": [10 + (i + j) % 80 for j in range(20)]} for i in range(count)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return str(folder / "data.jsonl")


def test_train_drafter_trains_and_saves(pair, tmp_path):
    from dflash_hf import DFlashDraftModel

    out = tmp_path / "out"
    arguments = ("--data", grammar_data(tmp_path), "--output", str(out), "--steps", "4", "--held-out", "4")
    arguments += ("--length", "64", "--anchors", "4", "--layers", "1", "--mask-token-id", "127")
    output = run_example("train_drafter.py", *pair[:2], *arguments)
    assert "block acceptance length" in output and (out / "training_curve.svg").exists()
    assert DFlashDraftModel.from_pretrained(out).config.block_size == 8


def test_lora_tune_writes_adapter_and_merged_drafter(pair, tmp_path):
    from dflash_hf import DFlashDraftModel

    out = tmp_path / "out"
    arguments = ("--data", grammar_data(tmp_path), "--output", str(out), "--steps", "2", "--held-out", "4")
    output = run_example("lora_tune.py", *pair, *arguments, "--rank", "2")
    assert "slot_accuracy" in output and "->" in output
    assert (out / "adapter_model.safetensors").exists()
    assert DFlashDraftModel.from_pretrained(out / "merged").config.target_layer_ids == [0, 1, 2]


def test_benchmark_training_runs_every_side(pair, tmp_path):
    """Without an environment that has speculators: ours with both objectives, and dense masks."""
    file = tmp_path / "result.json"
    arguments = ("--data", grammar_data(tmp_path), "--updates", "1", "--repeats", "1", "--examples", "3")
    arguments += ("--anchors", "4", "--layers", "1", "--mask-token-id", "127", "--json", str(file))
    run_example("benchmark_training.py", *pair[:2], *arguments)
    result = json.loads(file.read_text())
    assert set(result["results"]) == {"ours", "ours, argmax", "dense"}
    positions = {name: runs[0]["positions"] for name, runs in result["results"].items()}
    assert len(set(positions.values())) == 1 and positions["ours"] > 0
    for runs in result["results"].values():
        assert runs[0]["peak_memory_mb"] >= runs[0]["memory_before_mb"] > 0


def test_benchmark_memory_measures_a_step(tmp_path):
    file = tmp_path / "result.json"
    arguments = ("--vocabulary", "500", "--length", "64", "--chunk", "64", "--anchors", "8", "--json", str(file))
    run_example("benchmark_memory.py", *arguments)
    (case,) = json.loads(file.read_text())["cases"]
    assert case["anchors"] == 8 and case["labelled_slots"] > 80 and case["peak_mb"] > case["before_mb"] > 0


def test_benchmark_compiled_gives_the_same_tokens(pair, tmp_path):
    """With a backend that runs graphs as they are."""
    file = tmp_path / "result.json"
    arguments = ("--every-device", "--backend", "eager", "--new-tokens", "12", "--repeats", "1", "--json", str(file))
    run_example("benchmark_compiled.py", *pair, "--prompt", "w5 w9 w17", *arguments)
    result = json.loads(file.read_text())
    loops = [result[name] for name in ("plain", "plain, compiled", "DFlash", "DFlash, compiled")]
    assert all(loop["same_tokens"] and loop["tokens"] == 12 for loop in loops)
    assert result["DFlash, compiled"]["capture_seconds"] > 0


def test_varied_questions_have_other_numbers_of_the_same_kind_and_other_names(tmp_path):
    data, file, again = tmp_path / "q.jsonl", tmp_path / "varied.jsonl", tmp_path / "again.jsonl"
    question = "Mary paid $1,200 for 2 desks and 1/8 of 350 chairs at $3.50. Then Mary sold 350 for Tom, Marybeth saw."
    data.write_text(json.dumps({"question": question}) + "\n" + json.dumps({"question": "None of them?"}) + "\n")
    pattern = (
        r"(?P<a>[A-Z][a-z]+) paid \$1,\d00 for 2 desks and 1/[3-9] of (?P<chairs>[1-9]\d0) chairs "
        r"at \$[3-9]\.50\. Then (?P=a) sold (?P=chairs) for (?P<b>[A-Z][a-z]+), Marybeth saw\."
    )
    for output in (file, again):
        run_example("vary_questions.py", "--data", str(data), "--output", str(output), "--copies", "20", "--seed", "3")
    rows = [json.loads(line)["question"] for line in file.read_text().splitlines()]
    assert len(rows) == 20 and len(set(rows)) == 20  # what has nothing to vary is left out
    for row in rows:
        match = re.fullmatch(pattern, row)
        assert match and match["a"] != match["b"], row
    assert file.read_bytes() == again.read_bytes()
