"""The target's answers: equal to plain `generate` one prompt at a time, resumable at any moment, in order by file."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import tiny_target
from datasets import Dataset
from test_chat import make_tokenizer

from dflash_hf.data.answers import AnswerFile
from dflash_hf.data.chat import prepare_dataset
from dflash_hf.data.prompts import read_conversations
from dflash_hf.data.regeneration import local_answerer, regenerate
from dflash_hf.errors import DatasetError

WORDS = ["hi", "there", "how", "is", "it", "one", "two", "three", "four"]
ENDS = [12, 15]  # ordinary words of the tiny vocabulary end an answer, so that answers end at many lengths


def speaking_target():
    """A tiny target over the word tokenizer's vocabulary."""
    target = tiny_target(vocab=len(make_tokenizer()), layers=2)
    target.generation_config.eos_token_id = ENDS
    return target


def questions(count=13):
    """User messages of 1 to 5 words."""
    return [" ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(1 + i % 5)) for i in range(count)]


def conversations(count=13, **more):
    return list(read_conversations(Dataset.from_dict({"question": questions(count)}), prompt_column="question", **more))


def alone(target, tokenizer, messages, max_new_tokens):
    """Prompt and answer by plain `generate`, no batch, no padding."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = target.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)[0].tolist()
    return output, prompt["input_ids"].shape[1]


def run(path, target, tokenizer, given, *, batch_size=4, max_new_tokens=12, window=8, settings=None, **options):
    answerer = local_answerer(target, batch_size=batch_size, max_new_tokens=max_new_tokens, **options)
    with AnswerFile(path, settings or {"max_new_tokens": max_new_tokens}) as file:
        runs = regenerate(given, tokenizer=tokenizer, answerer=answerer, file=file, window=window)
        *_, progress = runs
    return progress


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("batch_size", [1, 4, 13])
def test_answers_equal_plain_generate(tmp_path, batch_size):
    """Padding, sorting and rows that leave the batch early change nothing; the mask covers the answer and its end."""
    target, tokenizer = speaking_target(), make_tokenizer()
    progress = run(tmp_path / "a.jsonl", target, tokenizer, conversations(), batch_size=batch_size)
    rows = read(tmp_path / "a.jsonl")
    assert sorted(row["index"] for row in rows) == list(range(13)) and {row["turn"] for row in rows} == {0}
    lengths = set()
    for row in rows:
        expected, length = alone(target, tokenizer, row["messages"][:-1], 12)
        assert row["input_ids"] == expected
        assert row["loss_mask"] == [0] * length + [1] * (len(expected) - length)
        assert row["finished"] == (expected[-1] in ENDS)
        assert row["messages"][0] == {"role": "user", "content": questions()[row["index"]]}
        assert row["messages"][-1]["content"] == tokenizer.decode(expected[length:], skip_special_tokens=True)
        lengths.add(len(expected) - length)
    assert len(lengths) >= 4, "the case must have answers that end at different steps"
    assert progress.answers == 13 and progress.cut == sum(not row["finished"] for row in rows) > 0
    assert progress.tokens == sum(sum(row["loss_mask"]) for row in rows)


def test_finished_rows_are_not_computed_any_further(tmp_path):
    """Rows of all forward passes stay well below batch x longest answer."""
    target, tokenizer = speaking_target(), make_tokenizer()
    widths = []
    target.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    run(tmp_path / "a.jsonl", target, tokenizer, conversations(), batch_size=13, max_new_tokens=40, window=13)
    longest = max(sum(row["loss_mask"]) for row in read(tmp_path / "a.jsonl"))
    assert len(widths) == longest, "one forward pass a token: nothing is computed again"
    assert widths[0] == 13 and widths[-1] <= 7 and sum(widths) < 0.8 * 13 * longest


def test_training_reads_the_file(tmp_path):
    """Ids and mask are taken as they are."""
    target, tokenizer = speaking_target(), make_tokenizer()
    run(tmp_path / "a.jsonl", target, tokenizer, conversations(4))
    rows = read(tmp_path / "a.jsonl")
    prepared = prepare_dataset(Dataset.from_list(rows))
    usable = [row for row in rows if sum(row["loss_mask"]) > 1]
    assert prepared.to_list() == [{key: row[key] for key in ("input_ids", "loss_mask")} for row in usable]


def test_several_turns_are_answered_one_after_the_other(tmp_path):
    """Every turn is a row; the target's own answer stands before the next question."""
    target, tokenizer = speaking_target(), make_tokenizer()
    talk = [
        {"from": "system", "value": "you are helpful"},
        {"from": "human", "value": "hi there"},
        {"from": "gpt", "value": "never"},
        {"from": "human", "value": "one two"},
        {"from": "gpt", "value": "seen"},
    ]
    given = list(read_conversations(Dataset.from_dict({"conversations": [talk]})))
    run(tmp_path / "a.jsonl", target, tokenizer, given, max_new_tokens=100)
    rows = read(tmp_path / "a.jsonl")
    assert [row["turn"] for row in rows] == [0, 1] and rows[0]["finished"]
    assert [m["role"] for m in rows[1]["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert rows[1]["messages"][2] == rows[0]["messages"][2]
    for row in rows:
        assert row["input_ids"] == alone(target, tokenizer, row["messages"][:-1], 100)[0]
    assert "never" not in (tmp_path / "a.jsonl").read_text()


def test_a_run_goes_on_between_turns(tmp_path):
    """With the first turn's line only, the second is answered with that line's answer before it."""
    target, tokenizer = speaking_target(), make_tokenizer()
    given = list(read_conversations(Dataset.from_dict({"q": [["hi there", "one two"]]}), prompt_column="q"))
    whole, begun = tmp_path / "whole.jsonl", tmp_path / "begun.jsonl"
    run(whole, target, tokenizer, given, max_new_tokens=100)
    run(begun, target, tokenizer, list(read_conversations(Dataset.from_dict({"q": ["hi there"]}), prompt_column="q")),
        max_new_tokens=100)  # fmt: skip
    assert read(begun) == read(whole)[:1]
    run(begun, target, tokenizer, given, max_new_tokens=100)
    assert read(begun) == read(whole) and len(read(whole)) == 2


@pytest.mark.parametrize("cut", [1, 7, -1])
def test_a_half_written_line_is_dropped_and_answered_again(tmp_path, cut):
    """Whatever byte the last line ends at."""
    target, tokenizer = speaking_target(), make_tokenizer()
    path = tmp_path / "a.jsonl"
    run(path, target, tokenizer, conversations())
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:cut])
    progress = run(path, target, tokenizer, conversations())
    assert progress.answers == 8 and path.read_bytes().startswith(b"".join(lines[:5]))
    assert sorted(row["index"] for row in read(path)) == list(range(13))
    expected = {row["index"]: row for row in map(json.loads, lines)}
    assert all(row == expected[row["index"]] for row in read(path))


def test_a_half_line_behind_a_complete_file_is_cut_off(tmp_path):
    """Nothing is written over it, so it must go by itself."""
    target, tokenizer = speaking_target(), make_tokenizer()
    path = tmp_path / "a.jsonl"
    run(path, target, tokenizer, conversations(3))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"index": 99, "tu')
    run(path, target, tokenizer, conversations(3))
    assert path.read_bytes() == whole


def test_a_complete_file_runs_nothing(tmp_path):
    target, tokenizer = speaking_target(), make_tokenizer()
    run(tmp_path / "a.jsonl", target, tokenizer, conversations())
    before = (tmp_path / "a.jsonl").read_bytes()

    def fail(*_):
        raise AssertionError("the target ran")

    target.get_decoder().register_forward_pre_hook(fail)
    assert run(tmp_path / "a.jsonl", target, tokenizer, conversations()).answers == 0
    assert (tmp_path / "a.jsonl").read_bytes() == before


def test_other_settings_are_refused(tmp_path):
    """The error names file, setting, both values and the remedies; nothing is written."""
    AnswerFile(tmp_path / "a.jsonl", {"max_new_tokens": 12, "sampling": "greedy"}).close()
    with pytest.raises(DatasetError) as caught:
        AnswerFile(tmp_path / "a.jsonl", {"max_new_tokens": 13, "sampling": "greedy"})
    for word in ("a.jsonl", "max_new_tokens 12", "13", "another file"):
        assert word in str(caught.value)
    with pytest.raises(DatasetError, match="seed None.*5"):
        AnswerFile(tmp_path / "a.jsonl", {"max_new_tokens": 12, "sampling": "greedy", "seed": 5})


def test_a_file_of_unknown_origin_is_not_appended_to(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"my": "data"}\n')
    with pytest.raises(DatasetError, match="another file"):
        AnswerFile(tmp_path / "a.jsonl", {})
    assert (tmp_path / "a.jsonl").read_text() == '{"my": "data"}\n'


def test_prompts_that_do_not_fit_are_left_out_and_counted(tmp_path):
    target, tokenizer = speaking_target(), make_tokenizer()
    answerer = local_answerer(target, batch_size=4, max_new_tokens=4)
    with AnswerFile(tmp_path / "a.jsonl", {}) as file:
        runs = regenerate(
            conversations(10), tokenizer=tokenizer, answerer=answerer, file=file, window=8, max_prompt_tokens=8
        )
        *_, last = runs
    lengths = [len(text.split()) for text in questions(10)]
    assert last.too_long == sum(5 + length > 8 for length in lengths) > 0 and last.answers == 10 - last.too_long


def test_sampled_answers_have_the_target_s_distribution(tmp_path):
    """First two tokens of 4,000 sampled answers against the target's own probabilities (chi-squared)."""
    target, tokenizer = speaking_target(), make_tokenizer()
    torch.manual_seed(0)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi there"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    answerer = local_answerer(
        target, batch_size=1000, max_new_tokens=2, generate_options={"do_sample": True, "top_k": 0, "top_p": 1.0}
    )
    counts = {}
    for _, ids, _ in answerer([prompt] * 4000):
        counts[tuple(ids)] = counts.get(tuple(ids), 0) + 1
    with torch.no_grad():
        first = target(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        others = [token for token in range(len(first)) if token not in ENDS]
        second = target(torch.tensor([[*prompt, token] for token in others])).logits[:, -1].double().softmax(-1)
    expected = {(token,): float(first[token]) for token in ENDS}
    for row, token in enumerate(others):
        expected |= {(token, after): float(first[token] * second[row, after]) for after in range(len(first))}
    assert set(counts) <= set(expected)
    large = {pair: 4000 * chance for pair, chance in expected.items() if 4000 * chance >= 5}
    rest = 4000 - sum(large.values())
    statistic = sum((counts.get(pair, 0) - mean) ** 2 / mean for pair, mean in large.items())
    statistic += (sum(n for pair, n in counts.items() if pair not in large) - rest) ** 2 / rest
    freedom = len(large)
    assert freedom > 20 and statistic < freedom + 4 * (2 * freedom) ** 0.5


KILLED = """
import sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}, {here!r}]
from test_regeneration import conversations, run, speaking_target, make_tokenizer
from dflash_hf.data.answers import AnswerFile
append = AnswerFile.append
def slow(self, row):
    append(self, row)
    print("row", flush=True)
    time.sleep(0.02)
AnswerFile.append = slow
run(Path({path!r}), speaking_target(), make_tokenizer(), conversations())
"""


def test_killed_and_started_again(tmp_path):
    """SIGKILL after a few lines, twice; the third run completes the file, and no answer is there twice."""
    here = Path(__file__).parent
    path = tmp_path / "a.jsonl"
    script = KILLED.format(tests=str(here.parent), here=str(here), path=str(path))
    for lines in (2, 3):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(lines):
            assert child.stdout.readline() == "row\n"
        time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
    target, tokenizer = speaking_target(), make_tokenizer()
    assert 5 <= path.read_text().count("\n") < 13
    run(path, target, tokenizer, conversations())
    run(tmp_path / "b.jsonl", target, tokenizer, conversations())
    by_index = sorted(read(path), key=lambda row: row["index"])
    assert by_index == sorted(read(tmp_path / "b.jsonl"), key=lambda row: row["index"]) and len(by_index) == 13
