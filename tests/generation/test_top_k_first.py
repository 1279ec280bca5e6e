"""Top-k before the sorts: the same scores as the processors give on whole rows."""

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from dflash_hf.generation import processors as module
from dflash_hf.generation.processors import Processors

V = 4000


def on_whole_rows(processors, logits):
    return LogitsProcessorList(processors)(torch.empty((logits.shape[1], 0), dtype=torch.long), logits[0].clone())


def lists():
    temperature, top_k = hf.TemperatureLogitsWarper, hf.TopKLogitsWarper
    yield "all", [temperature(0.7), top_k(50), hf.TopPLogitsWarper(0.9)]
    yield "one kept", [temperature(0.3), top_k(40), hf.TopPLogitsWarper(0.05)]
    yield "top-k 1", [top_k(1)]
    yield "min-p", [temperature(1.8), top_k(20), hf.MinPLogitsWarper(0.02), hf.TopPLogitsWarper(0.95)]
    yield "no top-k", [temperature(0.7), hf.TopPLogitsWarper(0.9)]
    yield "others", [hf.TopPLogitsWarper(0.9), top_k(9), hf.TypicalLogitsWarper(0.9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "processors"), lists(), ids=[name for name, _ in lists()])
def test_same_scores(name, processors, dtype):
    """Every value; in bf16 many scores are equal, at the cuts too."""
    logits = (3 * torch.randn((1, 24, V), generator=torch.Generator().manual_seed(0))).to(dtype).float()
    logits[0, 1] = 0.0  # all equal
    logits[0, 2, 100:400] = 9.0  # more equal ones than top-k keeps
    logits[0, 3, 5:] = -torch.inf
    scores = Processors(LogitsProcessorList(processors)).on_rows(logits.clone(), draft=False)
    assert torch.equal(scores[0], on_whole_rows(processors, logits))


@pytest.mark.parametrize(("name", "processors"), lists(), ids=[name for name, _ in lists()])
def test_scores_of_drafts(name, processors):
    """The same where scores differ; among equal ones any may stay, but as many and no other tokens."""
    logits = 3 * torch.randn((1, 24, V), generator=torch.Generator().manual_seed(0))
    logits[0, 3, 5:] = -torch.inf
    ours = Processors(LogitsProcessorList(processors))
    assert torch.equal(ours.on_rows(logits.clone(), draft=True)[0], on_whole_rows(processors, logits))
    for small in (logits[..., :60], logits[..., :7]):
        assert torch.equal(ours.on_rows(small.clone(), draft=True)[0], on_whole_rows(processors, small))
    logits[0, 2, 100:400] = 99.0
    scores = ours.on_rows(logits.clone(), draft=True)[0, 2]
    kept = scores > -torch.inf
    assert kept.any() and kept.nonzero().min() >= 100 and kept.nonzero().max() < 400


def test_equal_scores_at_a_cut_need_the_whole_row(monkeypatch):
    """Without the look at equal scores the check above fails, and with it most rows are still short ones."""
    given = []
    real = module._apply
    monkeypatch.setattr(module, "_apply", lambda p, rows: given.append(tuple(rows.shape)) or real(p, rows))
    processors = Processors(LogitsProcessorList([hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.9)]))
    logits = torch.randn((1, 24, V), generator=torch.Generator().manual_seed(0))
    processors.on_rows(logits.clone(), draft=False)
    assert given == [(24, 100), (24, 100)]
    logits[0, 1] = 0.0
    processors.on_rows(logits.clone(), draft=False)
    assert given[2:] == [(24, 100), (24, 100), (1, V), (1, V)]
