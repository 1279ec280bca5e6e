"""The command line, run as a user types it, on tiny real files."""

import json
import shutil

import pytest
from conftest import GOLDEN
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

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
    for part in ("0, 1, 2", "8 (anchor + 7 proposals)", "127", "fits"):
        assert part in result.output


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
