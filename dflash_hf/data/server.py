"""Answers from an OpenAI-compatible server (vLLM, SGLang, llama.cpp), for targets that run in one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from ..errors import DatasetError
from .regeneration import Answerer


def server_answerer(
    base_url: str,
    *,
    model: str,
    tokenizer: Any,
    eos_token_id: int,
    max_new_tokens: int,
    concurrency: int,
    api_key: str | None = None,
    sampling: dict[str, Any] | None = None,
    timeout: float = 600.0,
    retries: int = 5,
) -> Answerer:
    """Answers by `POST {base_url}/completions`.

    Completions take the prompt as token ids, so the server reads exactly the ids that are written to the file; its own
    chat template and reasoning parser have no part in it. Where the server gives no token ids (`return_token_ids`, a
    vLLM extension), the text is tokenised here and the end token added if the answer ended by itself.

    Args:
        base_url: such as `http://localhost:8000/v1`.
        model: name of the model on the server.
        tokenizer: the target's.
        eos_token_id: what ends an answer.
        max_new_tokens: length limit of an answer.
        concurrency: requests under way at once.
        api_key: sent as a bearer token.
        sampling: further fields of a request; greedy by default.
        timeout: seconds for one answer.
        retries: further tries where the connection fails or the server is busy.

    Raises:
        DatasetError: if the server cannot be reached, or refuses.
    """
    url = f"{base_url.rstrip('/')}/completions"
    session = requests.Session()
    waits = Retry(total=retries, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=None)
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=waits, pool_maxsize=concurrency))
    if api_key is not None:
        session.headers["Authorization"] = f"Bearer {api_key}"
    fixed = {
        "model": model,
        "max_tokens": max_new_tokens,
        "skip_special_tokens": False,
        "return_token_ids": True,
        **(sampling or {"temperature": 0.0}),
    }

    def ask(prompt: list[int]) -> tuple[list[int], bool]:
        try:
            reply = session.post(url, json={**fixed, "prompt": prompt}, timeout=timeout)
            reply.raise_for_status()
            choice = reply.json()["choices"][0]
            text, reason = choice["text"], choice["finish_reason"]
        except requests.RequestException as error:
            detail = "" if error.response is None else f" It said: {error.response.text[:300]}"
            raise DatasetError(
                f"{url} gave no answer ({error}).{detail} What was answered is kept; run the same command again to go "
                "on."
            ) from error
        except (KeyError, IndexError, TypeError) as error:
            raise DatasetError(
                f"{url} answered without `choices[0]` with `text` and `finish_reason`. It is no OpenAI-compatible "
                f"completions endpoint. It said: {reply.text[:300]}"
            ) from error
        finished = reason == "stop"
        ids = choice.get("token_ids")
        if ids is None:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = list(ids)
        if finished and ids[-1:] != [eos_token_id]:
            ids.append(eos_token_id)
        return ids, finished

    def answer(prompts: list[list[int]]) -> Iterator[tuple[int, list[int], bool]]:
        pool = ThreadPoolExecutor(concurrency)
        try:
            numbers = {pool.submit(ask, prompt): number for number, prompt in enumerate(prompts)}
            for future in as_completed(numbers):
                yield numbers[future], *future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    return answer
