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


@pytest.mark.parametrize("command", ["generate", "train", "info"])
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


def test_train_writes_a_drafter_that_loads(target_folder, tmp_path):
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
    arguments += ["--max-steps", "2", "--eval-examples", "2", "--log-every", "1", "--optimizer", "muon", "--muon-fp32"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "eval_block_acceptance_length" in result.output
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
