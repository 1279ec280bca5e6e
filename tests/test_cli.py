"""The command line, run as a user types it, on tiny real files."""

import json
import shutil

import pytest
import torch
from conftest import GOLDEN, Golden
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from dflash_hf import DFlashDraftModel
from dflash_hf.cli.info import _costs
from dflash_hf.cli.main import app

PAIR = GOLDEN / "generation"
runner = CliRunner()


def make_target_folder(folder, *, chat_template=False):
    """The recorded tiny target with a word-level tokenizer of its vocabulary beside it; the folder as a string."""
    shutil.copytree(PAIR / "target", folder, dirs_exist_ok=True)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")
    if chat_template:
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A target as it lies on disk."""
    return make_target_folder(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("command", ["generate", "train", "info", "index-tokens"])
def test_help(command):
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output


def test_info_names_shape_and_fit(target_folder):
    result = runner.invoke(app, ["info", str(PAIR / "drafter"), "--target", target_folder])
    assert result.exit_code == 0, result.output
    for part in ("0, 1, 2", "8: 7 proposals, from slot 1 on", "127", "fits"):
        assert part in result.output


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("dflash2_muse_like", ["DFlash 2", "candidate selector, top 8, rank 12", "2 taps", "7 proposals, from slot 1"]),
        ("deepspec_dspark_markov", ["DeepSpec", "vanilla Markov head, rank 4", "7 proposals, from slot 0", "its own"]),
        ("speculators_dflash_selfcontained", ["speculators", "56 of 104 tokens", "0, 2, 4, 6"]),
        ("speculators_dflash_swa_causal", ["counted from the anchor", "sliding (causal block)"]),
        ("domino_like", ["Domino", "GRU over the block, width 16"]),
        ("muse_assistant", ["MuseGlimmerAssistantModel", "sliding window"]),
    ],
)
def test_info_tells_families_apart(case, parts):
    result = runner.invoke(app, ["info", str(PAIR.parent / case)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert [part for part in parts if part not in result.output] == []


@pytest.mark.parametrize("case", ["zlab_swa_mixed", "deepspec_block7", "dflash2_qwen_like"])
def test_info_counts_the_operations_of_a_draft(case):
    """Against torch's own count of the matrix products of one forward pass with half a block of new context."""
    model = DFlashDraftModel.from_pretrained(PAIR.parent / case).eval()
    config = model.config
    noise = torch.randn(1, config.block_size, config.hidden_size)
    features = torch.randn(1, config.block_size // 2, model.fc.in_features)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        hidden = model(noise, features).last_hidden_state
        first = 0 if config.sample_from_anchor else 1
        if model.lm_head is not None:
            model.lm_head(hidden[:, first:])
        if model.candidate_selector is not None:
            model.candidate_selector.hidden_projection(hidden[:, first:])
    products = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    half = config.block_size / (2 * (config.block_size // 2))  # info takes half of an odd block as a fraction
    told = dict(_costs(model))["a draft computes"]
    assert float(told.split()[0]) * 1e3 == pytest.approx(products, rel=0.01 if half == 1 else 0.06)
    assert told.endswith("kFLOP")


def test_info_says_in_words_that_a_target_does_not_fit(tmp_path):
    config = json.loads((PAIR / "target" / "config.json").read_text()) | {"hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = runner.invoke(app, ["info", str(PAIR / "drafter"), "--target", str(tmp_path)])
    assert result.exit_code == 1
    assert "64" in result.output and "32" in result.output


def test_generate_compares_with_plain(target_folder):
    arguments = ["generate", "--target", target_folder, "--drafter", str(PAIR / "drafter"), "--prompt", "w5 w9 w17 w30"]
    result = runner.invoke(app, [*arguments, "--max-new-tokens", "24", "--compare", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert "acceptance length" in result.output and "same tokens: yes" in result.output


@pytest.mark.parametrize("precision", [["--muon-fp32"], ["--bf16"]])
def test_train_writes_a_drafter_that_loads(target_folder, tmp_path, precision):
    rows = [{"prompt_ids": [3, 4, 5 + i], "response_ids": list(range(6, 30))} for i in range(6)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    out = tmp_path / "out"
    arguments = [
        "train",
        "--target",
        target_folder,
        "--data",
        str(data),
        "--output",
        str(out),
        "--mask-token-id",
        "127",
    ]
    arguments += ["--layers", "1", "--block-size", "4", "--taps", "0,1", "--anchors", "4", "--batch-size", "2"]
    arguments += ["--max-steps", "2", "--eval-examples", "2", "--log-every", "1", "--optimizer", "muon", *precision]
    arguments += ["--frequent-tokens", "5"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert DFlashDraftModel.from_pretrained(out).frequent_token_ids.tolist() == [6, 7, 8, 9, 10]
    assert "eval_block_acceptance_length" in result.output
    card = (out / "README.md").read_text()
    command = next(line for line in card.splitlines() if line.startswith("dflash-hf train"))
    for part in ("--data data.jsonl", "--mask-token-id 127", "--taps 0,1", "--optimizer muon", *precision):
        assert part in command
    assert "--epochs" not in command and "data.jsonl, 4 examples" in card and str(tmp_path) not in card
    arguments = ["generate", "--target", target_folder, "--drafter", str(out), "--prompt", "w5", "--dtype", "float32"]
    result = runner.invoke(app, [*arguments, "--max-new-tokens", "8"])
    assert result.exit_code == 0, result.output


def test_train_asks_for_a_mask_token(target_folder, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt_ids": [1], "response_ids": [2, 3, 4]}))
    result = runner.invoke(
        app, ["train", "--target", target_folder, "--data", str(data), "--output", str(tmp_path / "o")]
    )
    assert result.exit_code == 1
    assert "--mask-token-id" in result.output


def tiny_data(folder, count=4):
    data = folder / "data.jsonl"
    rows = [{"prompt_ids": [3, 4, 5 + i], "response_ids": list(range(6, 30))} for i in range(count)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    return str(data)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--taps", "a,b", "--mask-token-id", "127"], ["--taps", "'a,b'"]),
        (["--init-from", str(PAIR / "drafter"), "--layers", "4"], ["--layers", "brings its own"]),
        (["--mask-token-id", "127", "--resume"], ["--resume", "no checkpoint"]),
        (["--mask-token-id", "127", "--data", "nowhere.jsonl"], ["There is no file nowhere.jsonl"]),
        (["--mask-token-id", "127", "--taps", "1,2", "--eval-examples", "9"], ["--eval-examples 9", "4 examples"]),
        (["--init-from", str(PAIR / "drafter"), "--init-from-target"], ["--init-from-target", "brings its own"]),
        (["--mask-token-id", "127", "--lora-rank", "4"], ["--lora-rank", "--init-from"]),
        (["--init-from", str(PAIR / "drafter"), "--merge-lora"], ["--merge-lora", "--lora-rank"]),
        (["--mask-token-id", "127", "--taps", "1,2", "--objective", "kl"], ["objective is 'kl'", "target_kl"]),
        (["--mask-token-id", "127", "--taps", "1,2", "--attention", "flash"], ["'flash'", "dflash_blocks"]),
    ],
)
def test_mistakes_are_answered_in_words(target_folder, tmp_path, options, parts):
    """One message and exit 1, no traceback."""
    arguments = ["train", "--target", target_folder, "--output", str(tmp_path / "out")]
    result = runner.invoke(app, [*arguments, "--data", tiny_data(tmp_path), *options])
    assert result.exit_code == 1, result.output
    for part in parts:
        assert part in " ".join(result.output.split())


def test_a_missing_drafter_is_named(tmp_path):
    result = runner.invoke(app, ["info", str(tmp_path / "nowhere")])
    assert result.exit_code == 1 and "nowhere" in result.output and "Traceback" not in result.output


def test_messages_may_hold_what_looks_like_markup(target_folder, tmp_path):
    """A tokenizer's `[/INST]` is text, not a closing tag of rich."""
    folder = make_target_folder(tmp_path / "target")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["[/INST]"])
    tokenizer.save_pretrained(folder)
    arguments = ["train", "--target", folder, "--output", str(tmp_path / "out"), "--data", tiny_data(tmp_path)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1 and "[/INST]" in result.output


def test_generate_keeps_the_drafter_s_own_block_size(target_folder, tmp_path):
    """The option overrides only when it is given."""
    from dflash_hf import DFlashDraftModel

    drafter = DFlashDraftModel.from_pretrained(PAIR / "drafter")
    drafter.generation_config.block_size = 2
    drafter.save_pretrained(tmp_path)
    words = " ".join(f"w{token}" for token in Golden("generation").io["p0.input_ids"][0].tolist())
    arguments = ["generate", "--target", target_folder, "--drafter", str(tmp_path), "--prompt", words]
    arguments += ["--num-assistant-tokens", "7"]  # whatever the costs
    short = runner.invoke(app, [*arguments, "--max-new-tokens", "25", "--dtype", "float32"]).output
    full = runner.invoke(app, [*arguments, "--max-new-tokens", "25", "--dtype", "float32", "--block-size", "8"]).output
    rounds = [int(text.split(" rounds")[0].split()[-1]) for text in (short, full)]
    assert rounds[0] >= 12 and rounds[1] <= 8


def test_init_from_keeps_taps_and_resume_goes_on(target_folder, tmp_path):
    """A warm start has the drafter's own shape; a second call with --resume trains the missing steps."""
    out = tmp_path / "out"
    arguments = ["train", "--target", target_folder, "--data", tiny_data(tmp_path), "--output", str(out)]
    arguments += ["--init-from", str(PAIR / "drafter"), "--anchors", "4", "--save-every", "1", "--log-every", "1"]
    first = runner.invoke(app, [*arguments, "--max-steps", "1"])
    second = runner.invoke(app, [*arguments, "--max-steps", "2", "--resume"])
    assert first.exit_code == second.exit_code == 0, first.output + second.output
    assert "taps [0, 1, 2]" in " ".join(first.output.split())
    assert "step 2 " in second.output and "step 1 " not in second.output
    assert "2 updates" in (out / "README.md").read_text()


def test_lora_run_writes_an_adapter_and_a_whole_drafter(target_folder, tmp_path):
    """--lora-rank on packed rows, resumed, merged: OUTPUT holds the adapter, OUTPUT/merged a drafter that generates."""
    out = tmp_path / "out"
    arguments = ["train", "--target", target_folder, "--data", tiny_data(tmp_path), "--output", str(out)]
    arguments += ["--init-from", str(PAIR / "drafter"), "--anchors", "4", "--save-every", "1", "--log-every", "1"]
    arguments += [
        "--lora-rank",
        "4",
        "--packing",
        "--max-length",
        "60",
        "--objective",
        "target_kl",
        "--batch-size",
        "1",
    ]
    first = runner.invoke(app, [*arguments, "--max-steps", "1"])
    second = runner.invoke(app, [*arguments, "--max-steps", "3", "--resume", "--merge-lora"])
    assert first.exit_code == second.exit_code == 0, first.output + second.output
    assert "2 training rows" in " ".join(first.output.split()) and "step 3 " in second.output
    assert "slot_accuracy_1 " not in second.output and "block_acceptance_length" in second.output
    adapter = json.loads((out / "adapter_config.json").read_text())
    assert adapter["r"] == 4 and adapter["lora_alpha"] == 8
    assert (out / "training_curve.svg").exists() and not (out / "model.safetensors").exists()
    arguments = ["generate", "--target", target_folder, "--drafter", str(out / "merged"), "--prompt", "w5"]
    result = runner.invoke(app, [*arguments, "--dtype", "float32", "--max-new-tokens", "8"])
    assert result.exit_code == 0, result.output


def chat_target(folder):
    """The recorded tiny target with a chat template that ends in a marker word for the answer."""
    return make_target_folder(folder, chat_template=True)


def test_regenerate_answers_a_column_and_train_reads_it(tmp_path):
    """The file of the answers goes into `train` as it is; a second call does nothing, another limit is refused."""
    target, data, answers = chat_target(tmp_path / "target"), tmp_path / "q.jsonl", tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps({"q": f"w{i} w9 w17", "n": i}) + "\n" for i in range(5, 11)))
    arguments = ["regenerate", "--target", target, "--data", str(data), "--output", str(answers), "--batch-size", "4"]
    arguments += ["--prompt-template", "{q}\\nw30", "--start", "1", "--max-new-tokens"]
    first = runner.invoke(app, [*arguments, "12"])
    assert first.exit_code == 0, first.output
    assert "5 answers, 60 tokens, 5 cut" in " ".join(first.output.split())
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == [1, 2, 3, 4, 5]
    assert all(row["messages"][0]["content"] == f"w{row['index'] + 5} w9 w17\nw30" for row in rows)
    again = runner.invoke(app, [*arguments, "12"])
    assert again.exit_code == 0 and "5 of 5 answers are in" in again.output and "0 answers" in again.output
    assert len(answers.read_text().splitlines()) == 5
    refused = runner.invoke(app, [*arguments, "13"])
    assert refused.exit_code == 1 and "max_new_tokens" in refused.output
    arguments = ["train", "--target", target, "--data", str(answers), "--output", str(tmp_path / "out")]
    arguments += ["--mask-token-id", "127", "--layers", "1", "--block-size", "4", "--anchors", "4", "--max-steps", "1"]
    result = runner.invoke(app, [*arguments, "--taps", "0,1"])
    assert result.exit_code == 0 and "5 training examples" in result.output, result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["no `messages`", "prompt template"]),
        (["--prompt-column", "question"], ["no column 'question'", "'q'"]),
        (["--prompt-template", "w5"], ["names no column"]),
        (["--prompt-column", "q", "--start", "7"], ["--start is 7", "1 rows"]),
        (["--prompt-column", "q", "--max-new-tokens", "100000"], ["100000", "context"]),
    ],
)
def test_regenerate_answers_mistakes_in_words(tmp_path, options, words):
    data = tmp_path / "q.jsonl"
    data.write_text('{"q": "w5"}\n')
    arguments = ["regenerate", "--target", chat_target(tmp_path / "target"), "--data", str(data)]
    result = runner.invoke(app, [*arguments, "--output", str(tmp_path / "a.jsonl"), *options])
    assert result.exit_code == 1, result.output
    for word in words:
        assert word in " ".join(result.output.split())
    assert not (tmp_path / "a.jsonl").exists()


def test_cache_features_and_train_on_them(tmp_path):
    """The store that cache-features writes is the one that `train --features` opens; nothing is computed twice."""
    from dflash_hf.data.feature_store import FeatureStore

    target, data, store = chat_target(tmp_path / "target"), tiny_data(tmp_path, 6), tmp_path / "features"
    common = ["--target", target, "--data", data, "--data", data, "--eval-examples", "2", "--taps", "0,2"]
    result = runner.invoke(app, ["cache-features", *common, "--output", str(store), "--final-hidden-states"])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "train: 10 examples" in words and "eval: 2 examples" in words and "GB to write" in words
    assert len(FeatureStore(store / "train")) == 10 and FeatureStore(store / "train").final_hidden_states is not None
    assert len(FeatureStore(store / "eval")) == 2 and FeatureStore(store / "eval").final_hidden_states is None
    times = {file: file.stat().st_mtime_ns for file in store.rglob("*.safetensors")}
    arguments = ["train", *common, "--output", str(tmp_path / "out"), "--mask-token-id", "127", "--layers", "1"]
    arguments += ["--block-size", "4", "--anchors", "4", "--max-steps", "1", "--features", str(store)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert {file: file.stat().st_mtime_ns for file in store.rglob("*.safetensors")} == times
    other = runner.invoke(app, [*arguments[:-2], "--taps", "0,1", "--features", str(store)])
    assert other.exit_code == 1 and "target_layer_ids" in other.output and "[0, 2]" in other.output
    folders = runner.invoke(app, [*arguments, "--features-dir", str(tmp_path)])
    assert folders.exit_code == 1 and "both name a folder" in " ".join(folders.output.split())


@pytest.mark.parametrize(
    ("options", "word"),
    [(["--taps", "0", "--drafter", str(PAIR / "drafter")], "--drafter"), (["--features-dtype", "int8"], "'int8'")],
)
def test_cache_features_answers_mistakes_in_words(target_folder, tmp_path, options, word):
    arguments = ["cache-features", "--target", target_folder, "--data", tiny_data(tmp_path)]
    result = runner.invoke(app, [*arguments, "--output", str(tmp_path / "f"), *options])
    assert result.exit_code == 1 and word in result.output and not (tmp_path / "f").exists()


def test_inspect_shows_supervised_tokens_in_colour(tmp_path, monkeypatch):
    """Prompt dimmed, answer in bold green, and what they sum up to; no drafter is made."""
    from rich.console import Console
    from transformers import AutoTokenizer

    target, data = chat_target(tmp_path / "target"), tmp_path / "chat.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}a {% endif %}"
    )
    tokenizer.save_pretrained(target)
    talk = [{"role": "user", "content": "w5 w9"}, {"role": "assistant", "content": "w17 w30 w31"}]
    data.write_text(json.dumps({"messages": talk}) + "\n")
    terminal = Console(force_terminal=True, width=100, color_system="standard")
    monkeypatch.setattr("dflash_hf.cli.examples.console", terminal)
    result = runner.invoke(app, ["train", "--target", target, "--data", str(data), "--inspect"])
    assert result.exit_code == 0, result.output
    assert "\x1b[1;32mw17 w30 w31\x1b[0m" in result.output and "\x1b[2mw0 w5 w9 w0\x1b[0m" in result.output
    assert "3 of 7 tokens supervised" in result.output and "1 examples, 7 tokens, 3 supervised" in result.output
    result = runner.invoke(app, ["train", "--target", target, "--data", str(data)])
    assert result.exit_code == 1 and "--output is needed" in result.output


def test_thinking_is_recorded_in_config_and_card(target_folder, tmp_path):
    """As --thinking says, or as `regenerate` made the data; a contradiction is refused; `info` shows it."""
    data, out = tiny_data(tmp_path), tmp_path / "out"
    (tmp_path / "data.jsonl.settings.json").write_text('{"thinking": false}')
    arguments = ["train", "--target", target_folder, "--data", data, "--output", str(out), "--mask-token-id", "127"]
    arguments += ["--layers", "1", "--block-size", "4", "--taps", "0,1", "--anchors", "4", "--max-steps", "1"]
    refused = runner.invoke(app, [*arguments, "--thinking"])
    assert refused.exit_code == 1 and "--no-thinking" in refused.output
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads((out / "config.json").read_text())["enable_thinking"] is False
    card = (out / "README.md").read_text()
    assert card.count("enable_thinking=False") == 2
    assert "thinking" in runner.invoke(app, ["info", str(out)]).output
    (tmp_path / "data.jsonl.settings.json").unlink()
    warm = ["train", "--target", target_folder, "--data", data, "--output", str(tmp_path / "warm"), "--init-from"]
    assert runner.invoke(app, [*warm, str(out), "--anchors", "4", "--max-steps", "1"]).exit_code == 0
    assert json.loads((tmp_path / "warm" / "config.json").read_text())["enable_thinking"] is False


def test_evaluate_reports_blocks_and_generation(target_folder, tmp_path):
    """On data with answers: teacher-forced blocks and, with --generate, real rounds; the same numbers in --json."""
    rows = [
        {"prompt_ids": Golden("generation").io[f"p{i}.input_ids"][0].tolist(),
         "response_ids": Golden("generation").io[f"p{i}.greedy_ids"][0, 4 + 3 * i :].tolist()}
        for i in range(3)
    ]  # fmt: skip
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    arguments = ["evaluate", "--target", target_folder, "--drafter", str(PAIR / "drafter"), "--data", str(data)]
    arguments += ["--dtype", "float32", "--json", str(tmp_path / "n.json")]
    result = runner.invoke(app, [*arguments, "--generate", "--max-new-tokens", "24"])
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert numbers["examples"] == numbers["generation_prompts"] == 3
    assert numbers["generation_acceptance_length"] > 3 and numbers["block_acceptance_length"] > 3
    assert 0.5 < numbers["slot_accuracy_1"] <= 1 and numbers["loss"] > 0
    for name in numbers:
        assert name in result.output
    only_blocks = runner.invoke(app, [*arguments, "--limit", "2"])
    assert only_blocks.exit_code == 0 and "generation_" not in only_blocks.output
    assert json.loads((tmp_path / "n.json").read_text())["examples"] == 2


def test_evaluate_generates_for_prompts_without_answers(tmp_path):
    """A prompt template in place of answers: generation alone."""
    data = tmp_path / "q.jsonl"
    data.write_text('{"q": "w5 w9"}\n{"q": "w17 w30 w31"}\n')
    arguments = ["evaluate", "--target", chat_target(tmp_path / "target"), "--drafter", str(PAIR / "drafter")]
    arguments += ["--data", str(data), "--prompt-template", "{q}\\nw2", "--max-new-tokens", "12", "--limit", "1"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "generation_acceptance_length" in result.output and "slot_accuracy" not in result.output


@pytest.mark.parametrize(("every", "steps"), [("0", [3]), ("2", [2, 3])])
def test_train_evaluates_once_at_the_end(target_folder, tmp_path, every, steps):
    """transformers evaluates after the last update by itself where it evaluates at all."""
    arguments = ["train", "--target", target_folder, "--data", tiny_data(tmp_path, 6)]
    arguments += ["--output", str(tmp_path / "out"), "--init-from", str(PAIR / "drafter"), "--anchors", "4"]
    result = runner.invoke(app, [*arguments, "--max-steps", "3", "--eval-examples", "2", "--eval-every", every])
    assert result.exit_code == 0, result.output
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "eval_loss" in entry] == steps


def test_train_runs_the_drafter_every_few_steps(target_folder, tmp_path):
    """--generate-every logs the acceptance length of real generation on held-out prompts."""
    arguments = [
        "train",
        "--target",
        target_folder,
        "--data",
        tiny_data(tmp_path, 6),
        "--output",
        str(tmp_path / "out"),
    ]
    arguments += ["--init-from", str(PAIR / "drafter"), "--anchors", "4", "--max-steps", "2", "--eval-examples", "2"]
    result = runner.invoke(app, [*arguments, "--generate-every", "1", "--generate-prompts", "1"])
    assert result.exit_code == 0, result.output
    assert result.output.count("generation_acceptance_length") == 2


def test_calibrate_writes_costs_beside_the_drafter(target_folder, tmp_path):
    """Into the drafter's own folder, whose weights stay, or to another one; a Hub name needs --output."""
    from dflash_hf import DFlashDraftModel

    own, other = tmp_path / "own", tmp_path / "other"
    shutil.copytree(PAIR / "drafter", own)
    weights = (own / "model.safetensors").read_bytes()
    arguments = [
        "calibrate",
        "--target",
        target_folder,
        "--repeats",
        "1",
        "--context-length",
        "8",
        "--dtype",
        "float32",
    ]
    result = runner.invoke(app, [*arguments, "--drafter", str(own)])
    assert result.exit_code == 0 and "verification, ms" in result.output, result.output
    (table,) = DFlashDraftModel.from_pretrained(own).generation_config.dflash_round_costs
    assert table["context_length"] == 8 and table["verify"][-1][0] == 17
    assert (own / "model.safetensors").read_bytes() == weights
    result = runner.invoke(app, [*arguments, "--drafter", str(own), "--output", str(other), "--batch-size", "2"])
    assert result.exit_code == 0, result.output
    (table,) = DFlashDraftModel.from_pretrained(other).generation_config.dflash_round_costs
    assert table["batch_size"] == 2
    result = runner.invoke(app, [*arguments, "--drafter", "someone/drafter"])
    assert result.exit_code == 1 and "--output" in result.output


def test_index_tokens_adds_a_file_and_touches_nothing_else(tmp_path):
    """A drafter that lies there: weights and config stay as they are, and the share of the data is told."""
    folder = tmp_path / "drafter"
    shutil.copytree(PAIR / "drafter", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = runner.invoke(app, ["index-tokens", str(folder), "--data", tiny_data(tmp_path), "--size", "6"])
    assert result.exit_code == 0, result.output
    assert "6 of 128 tokens, 25.00% of the 96 response tokens" in " ".join(result.output.split())
    assert DFlashDraftModel.from_pretrained(folder).frequent_token_ids.tolist() == [6, 7, 8, 9, 10, 11]
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.name in before}
    result = runner.invoke(app, ["info", str(folder)])
    assert "the 6 most frequent tokens" in result.output
    result = runner.invoke(app, ["index-tokens", str(tmp_path), "--data", tiny_data(tmp_path)])
    assert result.exit_code == 1 and "no config.json" in " ".join(result.output.split())
