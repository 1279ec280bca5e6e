"""Export between layouts: what can be said is the same drafter, what cannot is refused with the reason."""

import json

import pytest
import torch
from conftest import GOLDEN, tiny_drafter, tiny_target
from safetensors.torch import load_file
from typer.testing import CliRunner

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.cli.main import app
from dflash_hf.errors import CheckpointError, TargetMismatchError
from dflash_hf.hub.export import export_drafter
from dflash_hf.model_card import is_untouched

VOCAB = 104  # of the recorded cases, whose hidden size is 24


def recorded_target(folder, *, tables=None):
    """A target that fits the recorded drafters; `tables` are the embedding and head that it should have."""
    target = tiny_target("qwen3", layers=8, hidden=24, vocab=VOCAB, head_dim=8)
    if tables is not None:
        target.get_input_embeddings().weight.data.copy_(tables["embed_tokens.weight"])
        target.get_output_embeddings().weight.data.copy_(tables["lm_head.weight"])
    target.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return recorded_target(tmp_path_factory.mktemp("target"))


def same_weights(ours, theirs) -> bool:
    theirs = theirs.state_dict()
    return all(tensor.equal(theirs[name]) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize("case", ["zlab_qwen3_full", "zlab_gptoss_bias_yarn", "zlab_one_layer", "zlab_nested_block"])
def test_there_and_back(case, tmp_path):
    """z-lab -> speculators -> z-lab: ids + 1 and back, the same tensors, the same fields."""
    source = DFlashDraftModel.from_pretrained(GOLDEN / case)
    hidden, layers = source.config.hidden_size, source.config.num_target_layers
    tiny_target("qwen3", layers=layers, hidden=hidden, vocab=source.config.vocab_size, head_dim=8).save_pretrained(
        tmp_path / "target"
    )
    report = export_drafter(GOLDEN / case, to="speculators", output=tmp_path / "there", target=str(tmp_path / "target"))
    assert report.difference == 0 and report.dropped == []
    on_disk = json.loads((tmp_path / "there" / "config.json").read_text())
    assert on_disk["speculators_model_type"] == "dflash"
    assert on_disk["aux_hidden_state_layer_ids"] == [tap + 1 for tap in source.config.target_layer_ids]
    assert on_disk["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]
    assert set(load_file(tmp_path / "there" / "model.safetensors")) == set(source.state_dict())
    assert is_untouched((tmp_path / "there" / "README.md").read_text())
    export_drafter(tmp_path / "there", to="dflash", output=tmp_path / "back")
    back = DFlashDraftModel.from_pretrained(tmp_path / "back")
    assert same_weights(source, back)
    kept = ("target_layer_ids", "block_size", "mask_token_id", "layer_types", "rope_parameters", "num_target_layers")
    for name in kept:
        assert getattr(back.config, name) == getattr(source.config, name), name
    assert sorted(tmp_path.iterdir()) == [tmp_path / name for name in ("back", "target", "there")]  # nothing left over


def test_own_tables_are_dropped_only_if_they_are_the_target_s(tmp_path, target_folder):
    """DeepSpec stores its target's embedding and head."""
    source = GOLDEN / "deepspec_block7"
    tables = load_file(source / "model.safetensors")
    right = recorded_target(tmp_path / "right", tables=tables)
    report = export_drafter(source, to="speculators", output=tmp_path / "out", target=right)
    assert sorted(report.dropped) == ["embed_tokens.weight", "lm_head.weight"]
    exported = DFlashDraftModel.from_pretrained(tmp_path / "out")
    assert exported.config.sample_from_anchor and exported.embed_tokens is None
    with pytest.raises(CheckpointError, match="embed_tokens.weight of its own, which differs"):
        export_drafter(source, to="speculators", output=tmp_path / "no", target=target_folder)
    with pytest.raises(CheckpointError, match=r"target is not known.*--target"):
        export_drafter(source, to="speculators", output=tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("case", "to", "reason"),
    [
        ("zlab_swa_mixed", "speculators", "window of 8 counts from each slot, in speculators from the anchor"),
        ("zlab_embed_scale", "speculators", "input_embedding_scale = 4.89"),
        ("dflash2_qwen_like", "speculators", "counts from each slot"),
        ("domino_like", "speculators", "gru_hidden_dim"),
        ("domino_like", "dflash", "shifted by one"),
        ("speculators_dflash_trimmed", "dflash", "64 of 104 tokens"),
        ("speculators_sample_from_anchor", "dflash", "shifted by one"),
        ("speculators_dflash_selfcontained", "dflash", "embed_tokens.weight of its own"),
        ("speculators_dflash_swa_noncausal", "dflash", "counts from the anchor, in z-lab DFlash v1 from each slot"),
        ("speculators_dflash2", "dflash", "counts from the anchor"),
        ("zlab_qwen3_full", "dflash", "in that layout already"),
        ("zlab_qwen3_full", "gguf", "no layout to export to"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(case, to, reason, tmp_path, target_folder):
    with pytest.raises(CheckpointError, match=reason):
        export_drafter(GOLDEN / case, to=to, output=tmp_path / "out", target=target_folder)
    assert list(tmp_path.iterdir()) == []


def test_a_muse_assistant_keeps_its_inclusive_window(tmp_path, target_folder):
    """|q - k| <= W there is |q - k| < W + 1 here; the draft that is compared is longer than the window."""
    case = GOLDEN / "muse_assistant"
    report = export_drafter(case, to="dflash", output=tmp_path / "out", target=target_folder)
    window = json.loads((case / "config.json").read_text())["sliding_window"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["sliding_window"] == window + 1
    assert report.context_rows > window and report.difference == 0


def sliding_drafter(folder, *, window, **more):
    drafter = tiny_drafter(
        tiny_target(max_position_embeddings=64),
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=window,
    )
    fields = drafter.config.to_dict() | more
    drafter = DFlashDraftModel(DFlashConfig(**fields))
    drafter.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("is_causal", [None, False])
def test_a_window_that_covers_every_position_converts(tmp_path, is_causal):
    tiny_target(max_position_embeddings=64).save_pretrained(tmp_path / "target")
    source = sliding_drafter(tmp_path / "source", window=64, is_causal=is_causal)
    export_drafter(source, to="speculators", output=tmp_path / "there", target=str(tmp_path / "target"))
    on_disk = json.loads((tmp_path / "there" / "config.json").read_text())
    assert on_disk["sliding_window_non_causal"] is (is_causal is False)
    export_drafter(tmp_path / "there", to="dflash", output=tmp_path / "back")
    back = DFlashDraftModel.from_pretrained(tmp_path / "back").config
    assert back.window_rule == "query" and back.is_causal is is_causal and back.sliding_window == 64
    shorter = sliding_drafter(tmp_path / "shorter", window=63)
    with pytest.raises(CheckpointError, match="covers every position"):
        export_drafter(shorter, to="speculators", output=tmp_path / "no", target=str(tmp_path / "target"))


def test_causal_full_layers_have_no_place_in_speculators(tmp_path):
    tiny_target(max_position_embeddings=64).save_pretrained(tmp_path / "target")
    source = sliding_drafter(tmp_path / "source", window=64, is_causal=True)
    with pytest.raises(CheckpointError, match="causal full-attention"):
        export_drafter(source, to="speculators", output=tmp_path / "out", target=str(tmp_path / "target"))


def test_a_tap_on_the_last_layer_is_refused(tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    tiny_drafter(target, target_layer_ids=[1, 5]).save_pretrained(tmp_path / "source")
    with pytest.raises(CheckpointError, match="last layer"):
        export_drafter(tmp_path / "source", to="speculators", output=tmp_path / "out", target=str(tmp_path / "target"))


def test_the_target_must_be_known_and_fit(tmp_path):
    drafter = tiny_drafter(tiny_target())
    drafter.save_pretrained(tmp_path / "source")
    with pytest.raises(CheckpointError, match="--target"):
        export_drafter(tmp_path / "source", to="speculators", output=tmp_path / "out")
    tiny_target(hidden=64).save_pretrained(tmp_path / "other")
    with pytest.raises(TargetMismatchError, match="hidden size 64"):
        export_drafter(tmp_path / "source", to="speculators", output=tmp_path / "out", target=str(tmp_path / "other"))


def test_a_target_whose_embedding_scales_is_refused(tmp_path):
    """A published drafter without the key: speculators would embed raw rows."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    common = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    gemma = Gemma2ForCausalLM(Gemma2Config(vocab_size=97, num_key_value_heads=2, head_dim=8, **common))
    gemma.save_pretrained(tmp_path / "gemma")
    drafter = tiny_drafter(tiny_target())
    drafter.config.input_embedding_scale = None
    drafter.save_pretrained(tmp_path / "source")
    with pytest.raises(CheckpointError, match="input_embedding_scale = 5.65"):
        export_drafter(tmp_path / "source", to="speculators", output=tmp_path / "out", target=str(tmp_path / "gemma"))


def test_nothing_is_written_when_the_draft_differs(tmp_path, target_folder, monkeypatch):
    """A writer that gets the norms wrong: the comparison stops it, and the folder does not appear."""
    from dflash_hf.checkpoints import speculators

    write = speculators.write_config

    def forgets_the_epsilon(fields):
        out = write(fields)
        out["transformer_layer_config"]["rms_norm_eps"] = 1e-2
        return out

    monkeypatch.setattr(speculators, "write_config", forgets_the_epsilon)
    with pytest.raises(CheckpointError, match="does not draft as the original"):
        export_drafter(GOLDEN / "zlab_qwen3_full", to="speculators", output=tmp_path / "out", target=target_folder)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_touched(tmp_path, target_folder):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        export_drafter(GOLDEN / "zlab_qwen3_full", to="speculators", output=tmp_path, target=target_folder)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_command_line(tmp_path, target_folder):
    arguments = ["export", str(GOLDEN / "zlab_qwen3_full"), "--to", "speculators", "--target", target_folder]
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "same proposals" in result.output
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert drafter.config.family == "speculators" and drafter.dtype == torch.bfloat16
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 1 and "exists already" in " ".join(result.output.split())
