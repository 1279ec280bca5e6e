"""Answers from an OpenAI-compatible server: a loopback one in which the tiny target itself generates."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from test_chat import make_tokenizer
from test_regeneration import ENDS, conversations, read, run, speaking_target

from dflash_hf.data.answers import AnswerFile
from dflash_hf.data.regeneration import regenerate
from dflash_hf.data.server import server_answerer
from dflash_hf.errors import DatasetError

END = ENDS[0]


class Server:
    """`POST /v1/completions` of the tiny target; `gives_ids` as vLLM does, `busy` requests are sent away first."""

    def __init__(self, *, gives_ids=True, busy=0, reply=None, status=200):
        self.target, self.tokenizer = speaking_target(), make_tokenizer()
        self.target.generation_config.eos_token_id = END
        self.gives_ids, self.busy, self.reply, self.status = gives_ids, busy, reply, status
        self.requests, self.lock = [], threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.requests.append((self.path, self.headers.get("Authorization"), request))
                    server.busy -= 1
                    body = server.answer(request) if server.reply is None else server.reply
                status = 503 if server.busy >= 0 else server.status
                content = body.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def answer(self, request):
        prompt = torch.tensor([request["prompt"]])
        output = self.target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request["max_tokens"],
            do_sample=False,
            pad_token_id=0,
        )
        ids = output[0, prompt.shape[1] :].tolist()
        ended = ids[-1] == END
        choice = {
            "text": self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False),
            "finish_reason": "stop" if ended else "length",
        }
        if self.gives_ids and request["return_token_ids"]:
            choice["token_ids"] = ids
        return json.dumps({"choices": [choice]})

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def ask(path, server, *, count=7, url=None, **more):
    tokenizer = make_tokenizer()
    answerer = server_answerer(
        url or server.url,
        model="tiny",
        tokenizer=tokenizer,
        eos_token_id=END,
        max_new_tokens=12,
        concurrency=3,
        **{"retries": 0, **more},
    )
    with AnswerFile(path, {}) as file:
        *_, progress = regenerate(conversations(count), tokenizer=tokenizer, answerer=answerer, file=file, window=5)
    return progress


def by_index(path):
    return sorted(read(path), key=lambda row: row["index"])


@pytest.mark.parametrize("gives_ids", [True, False])
def test_the_same_rows_as_the_local_target(tmp_path, gives_ids):
    """Whether the server gives token ids or only text: ids, mask, messages and `finished` are the local run's."""
    with Server(gives_ids=gives_ids) as server:
        ask(tmp_path / "server.jsonl", server, api_key="secret")
        run(tmp_path / "local.jsonl", server.target, server.tokenizer, conversations(7))
    rows = by_index(tmp_path / "server.jsonl")
    assert rows == by_index(tmp_path / "local.jsonl") and {row["finished"] for row in rows} == {True, False}
    path, key, request = server.requests[0]
    assert path == "/v1/completions" and key == "Bearer secret"
    assert request["model"] == "tiny" and request["max_tokens"] == 12 and request["temperature"] == 0.0


def test_an_end_token_in_the_text_is_not_doubled(tmp_path):
    """Some servers leave it in."""
    reply = json.dumps({"choices": [{"text": "one two " + make_tokenizer().convert_ids_to_tokens(END),
                                     "finish_reason": "stop"}]})  # fmt: skip
    with Server(reply=reply) as server:
        ask(tmp_path / "a.jsonl", server, count=1)
    row = read(tmp_path / "a.jsonl")[0]
    answer = [token for token, mask in zip(row["input_ids"], row["loss_mask"]) if mask]
    assert answer == [*make_tokenizer()("one two")["input_ids"], END] and row["finished"]


def test_a_busy_server_is_asked_again(tmp_path):
    """503 three times, then answers."""
    with Server(busy=3) as server:
        assert ask(tmp_path / "a.jsonl", server, retries=4).answers == 7
    assert len(server.requests) == 10


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (dict(status=400, reply='{"message": "prompt is too long"}'), ["400", "prompt is too long", "go on"]),
        (dict(reply='{"object": "list"}'), ["choices[0]", '{"object": "list"}']),
        (dict(reply="<html>"), ["no answer"]),
    ],
)
def test_refusals_are_answered_in_words(tmp_path, more, words):
    """The address and what the server said."""
    with Server(**more) as server, pytest.raises(DatasetError) as caught:
        ask(tmp_path / "a.jsonl", server)
    for word in [*words, f"{server.url}/completions"]:
        assert word in str(caught.value)


def test_no_server_keeps_what_was_answered(tmp_path):
    """The connection fails in mid-run: the error says so, the file keeps its rows, the next run adds the rest."""
    with Server() as server:
        ask(tmp_path / "a.jsonl", server, count=3)
    before = read(tmp_path / "a.jsonl")
    with pytest.raises(DatasetError, match="gave no answer.*same command again"):
        ask(tmp_path / "a.jsonl", server)
    assert read(tmp_path / "a.jsonl") == before and len(before) == 3
    with Server() as server:
        assert ask(tmp_path / "a.jsonl", server).answers == 4
