"""Streamers get what plain generate gives them."""

import threading

import pytest
from generation_helpers import PutRecorder, assisted, drafter_for, plain, prompt, propose, small_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer


@pytest.fixture
def target():
    """A tiny Llama."""
    return small_target()


@pytest.fixture
def drafter(target):
    """A random drafter for the tiny Llama."""
    return drafter_for(target)


@pytest.fixture
def tokenizer():
    """One word a token."""
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_same_puts_as_plain_generate(options, right, target, drafter, monkeypatch):
    """The prompt, then one token a put, in order, then one end."""
    ids = prompt(6)
    reference, streamer = PutRecorder(), PutRecorder()
    text = plain(target, ids, max_new_tokens=19, streamer=reference, **options)
    if right:
        propose(monkeypatch, text)
    assisted(target, drafter, ids, max_new_tokens=19, streamer=streamer, **options)
    assert streamer.puts == reference.puts
    assert streamer.ends == reference.ends == 1


def test_text_streamer(target, drafter, tokenizer, capsys):
    """transformers' own streamer prints the same text."""
    ids = prompt(6)
    plain(target, ids, max_new_tokens=19, streamer=TextStreamer(tokenizer))
    expected = capsys.readouterr().out
    assisted(target, drafter, ids, max_new_tokens=19, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out == expected != ""


def test_text_iterator_streamer_in_a_thread(target, drafter, tokenizer, monkeypatch):
    """The usual way of serving: generate in a thread, read in this one."""
    ids = prompt(6)
    text = plain(target, ids, max_new_tokens=30)
    propose(monkeypatch, text)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    options = {"max_new_tokens": 30, "streamer": streamer}
    thread = threading.Thread(target=assisted, args=(target, drafter, ids), kwargs=options)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces).split() == tokenizer.decode(text[0, 6:]).split()
    assert len(pieces) > 10


def test_tokens_arrive_block_by_block(target, drafter, monkeypatch):
    """Accepted tokens are streamed when they are known, not at the end."""
    ids = prompt(6)
    text = plain(target, ids, max_new_tokens=30)
    propose(monkeypatch, text, wrong=lambda position: False)
    order = []

    class Ordered(PutRecorder):
        def put(self, value):
            super().put(value)
            order.append("put")

    handle = target.register_forward_hook(lambda *_: order.append("target"))
    try:
        assisted(target, drafter, ids, max_new_tokens=17, streamer=Ordered())
    finally:
        handle.remove()
    assert order == ["put", "target", "put", *(["target"] + ["put"] * 8) * 2]
