"""What is exported, loaded by the packages that it is meant for: the same draft there.

`pytest -m peers --speculators-python PYTHON`, where PYTHON has speculators 0.9.0; z-lab's `dflash` 0.1.0 is in this
environment (`pip install --no-deps dflash==0.1.0`).
"""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, Golden, tiny_target
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.draft_head import DraftHead
from dflash_hf.hub.export import export_drafter
from dflash_hf.target import FeatureCapture

pytestmark = pytest.mark.peers

TOLERANCE = 2e-5  # the two packages add up in another order
T = 40  # tokens of the sequence; speculators puts no anchor into the last block
ANCHORS = (1, 7, 23)


def new_drafter(folder, target, *, seed=3, **more):
    """A random drafter for `target`, saved."""
    torch.manual_seed(seed)
    config = DFlashConfig.from_target(
        target.config,
        mask_token_id=3,
        num_hidden_layers=2,
        block_size=6,
        target_layer_ids=[-1, 1, 4],
        initializer_range=0.2,
    )
    drafter = DFlashDraftModel(DFlashConfig(**(config.to_dict() | more)))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    drafter.save_pretrained(folder)


def covering_window(**more):
    return {"layer_types": ["sliding_attention"] * 2, "sliding_window": 512, **more}


NEW = {
    "new": {},
    "covering_window": covering_window(),
    "covering_window_bidirectional": covering_window(is_causal=False),
    "dflash2": covering_window(
        is_causal=False, family="dflash2", conv_kernel_size=2, conv_group_size=8, selector_rank=8, selector_top_k=6
    ),
}
RECORDED = ("zlab_qwen3_full", "zlab_gptoss_bias_yarn", "zlab_kimi_yarn_mscale", "deepspec_block7")


def make_case(folder: Path, name: str) -> None:
    """`source`, `target`, `drafter` (the export) and `inputs.safetensors` in a folder."""
    target_folder = folder / "target"
    if name in NEW:
        target = tiny_target("qwen3", head_dim=8)
        target.save_pretrained(target_folder)
        new_drafter(folder / "source", target, **NEW[name])
        source = folder / "source"
    else:
        source = GOLDEN / name
        config = DFlashDraftModel.from_pretrained(source).config
        layers, hidden, rows = config.num_target_layers or 8, config.hidden_size, config.vocab_size
        target = tiny_target("qwen3", layers=layers, hidden=hidden, vocab=rows, head_dim=8)
        if name.startswith("deepspec"):
            tables = load_file(source / "model.safetensors")
            target.get_input_embeddings().weight.data.copy_(tables["embed_tokens.weight"])
            target.get_output_embeddings().weight.data.copy_(tables["lm_head.weight"])
        target.save_pretrained(target_folder)
    export_drafter(source, to="speculators", output=folder / "drafter", target=str(target_folder))
    config = DFlashDraftModel.from_pretrained(source).config
    ids = torch.randint(4, config.vocab_size, (1, T), generator=torch.Generator().manual_seed(11))
    with torch.no_grad():
        states = torch.cat(target(ids, output_hidden_states=True).hidden_states)
    inputs = {"input_ids": ids, "hidden_states": states, "anchors": torch.tensor(ANCHORS)}
    save_file(inputs, folder / "inputs.safetensors")


@torch.no_grad()
def our_draft(drafter, target, ids, anchor):
    """Hidden states [B, H] and draft logits [B, V] of the original drafter for one anchor."""
    config = drafter.config
    with FeatureCapture(target, config.target_layer_ids) as capture, capture.recording():
        target(ids)
        features = capture.take(ids.device)
    block = torch.full((1, config.block_size), config.mask_token_id)
    block[:, 0] = ids[:, anchor]
    head = DraftHead(drafter, target)
    hidden = drafter(noise_embeds=head.embed(block), context_hidden_states=features[:, :anchor]).last_hidden_state
    return hidden[0], head.logits(hidden)[0]


@pytest.fixture(scope="module")
def speculators_runs(tmp_path_factory, pytestconfig):
    """Every case, exported, and run by speculators in one process."""
    python = pytestconfig.getoption("--speculators-python")
    if python is None:
        pytest.fail("--speculators-python is needed: the Python of an environment with speculators 0.9.0")
    root = tmp_path_factory.mktemp("speculators")
    for name in (*NEW, *RECORDED):
        (root / name).mkdir()
        make_case(root / name, name)
    script = Path(__file__).with_name("run_speculators.py")
    command = [python, str(script), *(str(root / name) for name in (*NEW, *RECORDED))]
    # Not this checkout's package, nor its pytest's path: what is tested must load on its own.
    run = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": str(root)})
    assert run.returncode == 0, run.stderr[-4000:]
    return root


@pytest.mark.parametrize("name", [*NEW, *RECORDED])
def test_speculators_loads_the_export_and_drafts_the_same(speculators_runs, name):
    folder = speculators_runs / name
    source = folder / "source" if name in NEW else GOLDEN / name
    drafter = DFlashDraftModel.from_pretrained(source, dtype=torch.float32).eval()
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    inputs, outputs = load_file(folder / "inputs.safetensors"), load_file(folder / "outputs.safetensors")
    first = 0 if drafter.config.sample_from_anchor else 1
    for number, anchor in enumerate(ANCHORS):
        hidden, logits = our_draft(drafter, target, inputs["input_ids"], anchor)
        assert (hidden - outputs["hidden"][number]).abs().max() < TOLERANCE
        assert (logits - outputs["logits"][number]).abs().max() < 10 * TOLERANCE
        proposals = outputs["logits"][number][first:].argmax(dim=-1)
        assert proposals.tolist() == logits[first:].argmax(dim=-1).tolist()


def zlab_model(folder):
    from dflash.model import DFlash2DraftModel
    from dflash.model import DFlashDraftModel as ZlabDraftModel

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    cls = DFlash2DraftModel if architecture == "DFlash2DraftModel" else ZlabDraftModel
    return cls.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def test_zlab_loads_an_exported_speculators_drafter(tmp_path):
    """Against what speculators itself recorded for the drafter before it was exported, several rounds deep."""
    case = Golden("speculators_dflash_full")
    target = tiny_target("qwen3", layers=8, hidden=24, vocab=104, head_dim=8)
    target.save_pretrained(tmp_path / "target")
    export_drafter(case.path, to="dflash", output=tmp_path / "out", target=str(tmp_path / "target"))
    model = zlab_model(tmp_path / "out")
    assert model.target_layer_ids == case.meta["zlab_target_layer_ids"]
    assert (model.block_size, model.mask_token_id) == (6, 100)
    features = torch.zeros(1, 0, case.io["r0.target_hidden"].shape[-1])
    for number in range(len(case.meta["rounds"])):
        features = torch.cat([features, case.io[f"r{number}.target_hidden"]], dim=1)
        block = case.io[f"r{number}.noise_embedding"]
        hidden = model(
            target_hidden=features,
            noise_embedding=block,
            position_ids=torch.arange(features.shape[1] + block.shape[1])[None],
        )
        recorded = case.io[f"r{number}.last_hidden_state"]
        assert (hidden - recorded).abs().max() < case.meta["tolerance_suggested"]
        proposals = (hidden[:, 1:] @ case.io["lm_head_weight"].T).argmax(dim=-1)
        assert proposals.flatten().tolist() == case.io[f"r{number}.greedy_proposals"].flatten().tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", ["muse_assistant", "muse_assistant_mixed"])
def test_zlab_loads_an_exported_muse_assistant(tmp_path, name):
    """Its inclusive window, past the window."""
    tiny_target("qwen3", layers=8, hidden=24, vocab=104, head_dim=8).save_pretrained(tmp_path / "target")
    export_drafter(GOLDEN / name, to="dflash", output=tmp_path / "out", target=str(tmp_path / "target"))
    ours, theirs = DFlashDraftModel.from_pretrained(GOLDEN / name).eval(), zlab_model(tmp_path / "out")
    config = ours.config
    generator = torch.Generator().manual_seed(5)
    rows = 2 * config.sliding_window + 3
    context = torch.randn(1, rows, len(config.target_layer_ids) * config.hidden_size, generator=generator)
    block = torch.randn(1, config.block_size, config.hidden_size, generator=generator)
    positions = torch.arange(rows + config.block_size)[None]
    hidden = theirs(target_hidden=context, noise_embedding=block, position_ids=positions)
    expected = ours(noise_embeds=block, context_hidden_states=context).last_hidden_state
    assert (hidden - expected).abs().max() < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", list(NEW))
def test_zlab_loads_what_came_back_from_speculators(speculators_runs, tmp_path, name):
    """z-lab -> speculators -> z-lab, run by z-lab's package beside the drafter that it started from."""
    from dflash.model import extract_context_feature

    export_drafter(speculators_runs / name / "drafter", to="dflash", output=tmp_path / "back")
    before, after = zlab_model(speculators_runs / name / "source"), zlab_model(tmp_path / "back")
    inputs = load_file(speculators_runs / name / "inputs.safetensors")
    block = torch.randn(1, before.block_size, 32, generator=torch.Generator().manual_seed(5))
    positions = torch.arange(T + before.block_size)[None]
    drafts = [
        model(
            target_hidden=extract_context_feature(inputs["hidden_states"][:, None], model.target_layer_ids),
            noise_embedding=block,
            position_ids=positions,
        )
        for model in (before, after)
    ]
    assert drafts[0].equal(drafts[1]) and before.target_layer_ids == after.target_layer_ids
