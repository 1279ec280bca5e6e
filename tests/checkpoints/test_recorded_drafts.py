"""Every published family against what its original computed: hidden states, logits, proposals, and q of a walk."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import GOLDEN
from torch import nn
from transformers import LlamaConfig

from dflash_hf import DFlashDraftModel
from dflash_hf.draft_head import DraftHead, without_empty_rows
from dflash_hf.errors import DFlashError, TargetMismatchError
from dflash_hf.masks import block_visibility

PREFIXES = ("deepspec", "dflash2", "domino", "dspark", "muse", "speculators")
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.name.startswith(PREFIXES))
WALKS = [
    name for name in CASES if name.startswith(("dflash2", "domino", "dspark", "speculators_dflash2", "deepspec_ds"))
] + ["deepspec_gemma4_markov"]


def load(case, **kwargs) -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(case.path, **kwargs).eval()


def rounds_of(case) -> int:
    return next(index for index in itertools.count() if f"r{index}.last_hidden_state" not in case.io)


def target_of(case, model, *, rows: int | None = None):
    """Stands for the target: the recorded tables, padded or cut to `rows`."""
    width = model.config.hidden_size
    vocabulary = rows or model.config.vocab_size or case.io["embed_weight"].shape[0]
    embedding, head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
    for module, name, own in (
        (embedding, "embed_weight", model.config.own_embedding),
        (head, "lm_head_weight", model.config.own_head),
    ):
        table = case.io.get(name)
        module.weight.data.zero_()
        if not own:
            module.weight.data[: len(table)] = table[:vocabulary]
    return SimpleNamespace(
        get_input_embeddings=lambda: embedding, get_output_embeddings=lambda: head, config=LlamaConfig()
    )


@torch.no_grad()
def hidden_states(model, case, *, cached: bool):
    cache = model.new_cache()
    contexts, context_positions = [], []
    for index in range(rounds_of(case)):
        noise, new = case.io[f"r{index}.noise_embedding"], case.io[f"r{index}.target_hidden"]
        positions = case.io[f"r{index}.position_ids"]
        if cached:
            yield model(noise, new, positions, cache=cache).last_hidden_state
            cache.crop(int(positions[0, new.shape[1]]))
        else:
            contexts.append(new)
            context_positions.append(positions[:, : new.shape[1]])
            everything = torch.cat([*context_positions, positions[:, new.shape[1] :]], dim=1)
            yield model(noise, torch.cat(contexts, dim=1), everything).last_hidden_state


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_are_the_original_s(golden, name, cached):
    """All slots of every recorded round; a wrong window, causality or convolution is off by 0.1 and more."""
    case = golden(name)
    for index, found in enumerate(hidden_states(load(case), case, cached=cached)):
        assert torch.allclose(found, case.io[f"r{index}.last_hidden_state"], atol=2e-5, rtol=0), index


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("speculators")])
def test_speculators_tap_ids_count_hidden_states(golden, name):
    """One higher than the layer whose output they mean."""
    case = golden(name)
    config = load(case).config
    assert config.target_layer_ids == case.meta["zlab_target_layer_ids"]
    assert [layer_id + 1 for layer_id in config.target_layer_ids] == case.meta["aux_hidden_state_layer_ids"]


@pytest.mark.parametrize("name", ["deepspec_block7", "deepspec_embed_tap"])
def test_deepspec_tap_ids_count_layers(golden, name):
    """-1 is the embedding output; the recorded features are the recorded states of those layers."""
    case = golden(name)
    states, rows = case.io["target_all_hidden_states"], 0
    for index in range(rounds_of(case)):
        features = case.io[f"r{index}.target_hidden"]
        part = states[:, rows : rows + features.shape[1]]
        expected = torch.cat([part[layer_id + 1] for layer_id in load(case).config.target_layer_ids], dim=-1)
        assert torch.equal(features[0], expected)
        rows += features.shape[1]


@torch.no_grad()
def greedy_walk(head, hidden, anchor, count):
    slots = head.slots(hidden, count)
    walk = head.walk(slots, head.logits(slots))
    tokens, scores = [], []
    for index in range(count):
        scores.append(walk.scores(index, tokens[-1] if tokens else anchor))
        tokens.append(scores[-1].argmax(dim=-1))
    return torch.stack(tokens, dim=1), torch.stack(scores, dim=1)


@pytest.mark.parametrize("name", CASES)
def test_embedding_logits_and_proposals_are_the_original_s(golden, name):
    """From the recorded hidden states: own tables or the target's, slot 0 or 1 first, trimmed vocabulary, walk."""
    case = golden(name)
    model = load(case)
    head = DraftHead(model, target_of(case, model))
    for index in range(rounds_of(case)):
        ids = case.io[f"r{index}.noise_ids"]
        assert torch.equal(head.embed(ids), case.io[f"r{index}.noise_embedding"])
        expected = case.io[f"r{index}.greedy_proposals"]
        count = expected.shape[1]
        hidden = case.io[f"r{index}.last_hidden_state"]
        tokens, scores = greedy_walk(head, hidden, ids[:, 0], count)
        assert tokens.tolist() == expected.tolist()
        logits = head.logits(head.slots(hidden, count))
        assert logits.shape[-1] == head.vocab_size
        recorded = case.io.get(f"r{index}.draft_logits")
        if recorded is not None:
            assert torch.allclose(head._on_own_rows(logits), recorded, atol=2e-5, rtol=0)
        corrected = case.io.get(f"r{index}.corrected_logits")
        if corrected is not None:
            assert torch.allclose(scores, corrected, atol=2e-5, rtol=0)
    if name not in ("domino_like", "domino_shifted"):
        assert head.max_proposals(model.config.block_size) == count
    # SpecForge leaves the last slot of a shifted Domino block unused, though it is trained like the others.


@pytest.mark.parametrize("name", WALKS)
def test_plain_argmax_would_not_do(golden, name):
    """The walk changes proposals or logits in these recordings, so that the test above can fail."""
    case = golden(name)
    model = load(case)
    head = DraftHead(model, target_of(case, model))
    changed, largest = 0, 0.0
    for index in range(rounds_of(case)):
        expected = case.io[f"r{index}.greedy_proposals"]
        logits = head.logits(head.slots(case.io[f"r{index}.last_hidden_state"], expected.shape[1]))
        changed += int((logits.argmax(dim=-1) != expected).sum())
        corrected = case.io.get(f"r{index}.corrected_logits")
        if corrected is not None:
            largest = max(largest, (corrected - logits).abs().max().item())
    assert changed > 0 or largest > 0.01


@pytest.mark.parametrize("name", ["dflash2_muse_like", "dflash2_qwen_like"])
@pytest.mark.parametrize("run", ["T1.0.seed7", "T0.7.seed11"])
def test_q_along_a_sampled_path_is_the_original_s(golden, name, run):
    """The softmax of the scattered scores, after temperature, is z-lab's q over its candidates; zero elsewhere."""
    case = golden(name)
    model = load(case)
    head = DraftHead(model, target_of(case, model))
    temperature = float(run[1:4])
    for index in range(rounds_of(case)):
        prefix = f"r{index}.{run}."
        path = case.io[f"{prefix}draft_tokens"]
        slots = head.slots(case.io[f"r{index}.last_hidden_state"], path.shape[1])
        walk, previous = head.walk(slots, head.logits(slots)), case.io[f"r{index}.noise_ids"][:, 0]
        for slot in range(path.shape[1]):
            q = (walk.scores(slot, previous) / temperature).softmax(dim=-1)
            candidates = case.io[f"{prefix}draft_indices_sorted"][:, slot]
            assert torch.allclose(q.gather(-1, candidates), case.io[f"{prefix}draft_probs_sorted"][:, slot], atol=2e-5)
            assert q.gather(-1, candidates).sum().item() == pytest.approx(1.0, abs=1e-5)
            previous = path[:, slot]


@pytest.mark.parametrize("name", WALKS)
def test_rows_of_a_batch_walk_by_themselves(golden, name):
    """Two rounds stacked as a batch: each row's scores are those of its own walk, state included."""
    case = golden(name)
    model = load(case)
    head = DraftHead(model, target_of(case, model))
    rows = [0, 1] if rounds_of(case) > 1 else [0, 0]
    hidden = torch.cat([case.io[f"r{row}.last_hidden_state"] for row in rows])
    anchors = torch.cat([case.io[f"r{row}.noise_ids"][:, 0] for row in rows])
    anchors[1] = (anchors[1] + 1) % 50
    count = head.max_proposals(model.config.block_size)
    tokens, scores = greedy_walk(head, hidden, anchors, count)
    for row in range(2):
        alone, alone_scores = greedy_walk(head, hidden[row : row + 1], anchors[row : row + 1], count)
        assert torch.equal(tokens[row : row + 1], alone)
        assert torch.allclose(scores[row : row + 1], alone_scores, atol=1e-5)


@pytest.mark.parametrize("change", [-3, 5])
@pytest.mark.parametrize("name", ["dflash2_qwen_like", "domino_shifted", "dspark_rnn", "deepspec_block7"])
def test_a_target_padded_otherwise(golden, name, change):
    """The target's table has fewer or more rows than the drafter's: padded ids are never proposed, the rest is kept."""
    case = golden(name)
    model = load(case)
    rows = model.config.vocab_size
    whole, other = (DraftHead(model, target_of(case, model, rows=size)) for size in (rows, rows + change))
    hidden = case.io["r0.last_hidden_state"]
    count = whole.max_proposals(model.config.block_size)
    both = min(rows, rows + change)
    anchor = torch.tensor([rows + change - 1])  # in the padding, when there is more of it
    found = other.walk(other.slots(hidden, count), other.logits(other.slots(hidden, count))).scores(0, anchor)
    assert found.shape == (1, rows + change)
    assert (found[:, both:] == -torch.inf).all()
    logits = whole.logits(whole.slots(hidden, count))
    assert torch.equal(other.logits(other.slots(hidden, count))[..., :both], logits[..., :both])


def test_a_trimmed_vocabulary_of_another_target_is_refused(golden):
    """A draft token beyond the target's vocabulary would be an index error, or another word."""
    case = golden("speculators_dflash_trimmed")
    model = load(case)
    with pytest.raises(TargetMismatchError, match="d2t.*has 60 tokens"):
        DraftHead(model, target_of(case, model, rows=60))


def test_rows_without_a_possible_token_become_uniform():
    """All others are left as they are."""
    scores = torch.tensor([[[-torch.inf, -torch.inf], [-torch.inf, 2.0]]])
    assert without_empty_rows(scores).tolist() == [[[0.0, 0.0], [-torch.inf, 2.0]]]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [1, 3, 6, 50])
def test_the_anchor_rule_against_two_loops(is_causal, window):
    """speculators: every slot sees the same W context rows before the anchor, and the block as causality allows."""
    for block, context in ((4, 9), (7, 3), (3, 0)):
        expected = torch.zeros(block, context + block, dtype=torch.bool)
        for slot in range(block):
            for key in range(context + block):
                in_block = key >= context
                expected[slot, key] = (
                    (not is_causal or key - context <= slot) if in_block else context - window <= key < context
                )
        found = block_visibility(
            block_length=block,
            num_keys=context + block,
            is_causal=is_causal,
            sliding_window=window,
            padding_mask=None,
            device=torch.device("cpu"),
            window_rule="anchor",
        )
        assert torch.equal(torch.ones_like(expected) if found is None else found[0, 0], expected)


def test_the_anchor_rule_reaches_the_layers(golden):
    """With a window shorter than the context, a row outside it changes nothing, the first one inside does."""
    case = golden("speculators_dflash_swa_noncausal")
    model = load(case)
    config = model.config
    for layer in model.layers:
        layer.self_attn.sliding_window = 4
    noise, features = case.io["r0.noise_embedding"], case.io["r0.target_hidden"]
    with torch.no_grad():
        expected = model(noise, features).last_hidden_state
        for row, changes in ((features.shape[1] - 5, False), (features.shape[1] - 4, True)):
            other = features.clone()
            other[:, row] += 1
            difference = (model(noise, other).last_hidden_state - expected).abs().amax(dim=(0, 2))
            assert difference.shape == (config.block_size,)
            assert bool((difference > 1e-4).all()) if changes else bool((difference == 0).all())


def test_a_convolution_does_not_cross_blocks(golden):
    """Two blocks in a row, as in training, are refused instead of mixed."""
    case = golden("dflash2_qwen_like")
    model = load(case)
    noise = case.io["r0.noise_embedding"]
    with pytest.raises(DFlashError, match="16 slots"):
        model(torch.cat([noise, noise], dim=1), case.io["r0.target_hidden"])


def test_a_new_dflash2_drafter_starts_as_the_plain_one(golden):
    """Identity convolutions and a selector without an opinion, so that training starts where DFlash 1 is."""
    on_disk = json.loads((GOLDEN / "dflash2_qwen_like" / "config.json").read_text())
    case = golden("dflash2_qwen_like")
    torch.manual_seed(0)
    model = DFlashDraftModel(load(case).config).eval()
    plain_config = type(model.config).from_pretrained(case.path)
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        setattr(plain_config, key, None)
    plain_config.family = "zlab"
    plain = DFlashDraftModel(plain_config).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    noise, features = case.io["r0.noise_embedding"], case.io["r0.target_hidden"]
    with torch.no_grad():
        assert torch.allclose(model(noise, features)[0], plain(noise, features)[0], atol=1e-6)
    head = DraftHead(model, target_of(case, model))
    slots = head.slots(torch.randn(1, on_disk["dflash_config"]["block_size"], 24), 7)
    logits = head.logits(slots)
    scores = head.walk(slots, logits).scores(0, torch.tensor([5]))
    top = logits[:, 0].topk(8).indices
    assert torch.equal(scores.gather(-1, top), logits[:, 0].gather(-1, top))
