"""`pack_linears`: the same numbers to rounding, the same greedy text, undone without a trace."""

import copy
import pickle

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from generation_helpers import assert_same_ids, drafter_for, prompt
from peft import LoraConfig, get_peft_model
from torch import nn

from dflash_hf import pack_linears, unpack_linears
from dflash_hf.draft_head import DraftHead
from dflash_hf.errors import UnsupportedGenerationError
from dflash_hf.packing import FEWEST_ROWS, PackedLinear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(48, 70, bias=bias).requires_grad_(False)
    pack_linears(linear)
    return linear


@pytest.fixture
def packed_calls(monkeypatch):
    """Rows of the inputs that the packed kernel gets."""
    calls = []
    real = PackedLinear.pack

    def pack(self):
        calls.append(self)
        return real(self)

    monkeypatch.setattr(PackedLinear, "pack", pack)
    return calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 16, 33, 200])
def test_layer(rows, bias, packed_calls):
    """Against the plain product in fp64; which kernel runs depends on the rows."""
    linear = layer(bias)
    del packed_calls[:]
    x = torch.randn(1, rows, 48)
    expected = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    torch.testing.assert_close(linear(x), expected.float(), atol=1e-5, rtol=1e-5)
    assert len(packed_calls) == (rows >= FEWEST_ROWS)


def test_inputs_of_any_shape_and_stride():
    linear = layer()
    plain = nn.functional.linear
    wide = torch.randn(6, 96)
    for x in (wide[:, ::2], wide[:, :48], torch.randn(48, 9).T, torch.randn(2, 3, 5, 48), torch.randn(0, 48)):
        torch.testing.assert_close(linear(x), plain(x, linear.weight, linear.bias), atol=1e-5, rtol=1e-5)


def test_gradients_flow():
    """With autograd the plain kernel runs; the packed one has no backward."""
    linear = layer().requires_grad_(True)
    x = torch.randn(8, 48, requires_grad=True)
    linear(x).sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.detach().sum(0).expand(8, -1), atol=1e-4, rtol=1e-4)
    assert linear.weight.grad is not None


def change_in_place(linear):
    linear.weight.mul_(2)


def load(linear):
    linear.load_state_dict({name: 2 * value for name, value in linear.state_dict().items()})


def new_parameter(linear):
    linear.weight = nn.Parameter(2 * linear.weight, requires_grad=False)


@pytest.mark.parametrize("change", [change_in_place, load, new_parameter, lambda linear: linear.double().float()])
def test_changed_weights_are_seen(change):
    """A packed copy must not outlive the weight that it was made of."""
    linear = layer()
    x = torch.randn(8, 48)
    linear(x)
    change(linear)
    torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight, linear.bias), atol=1e-4, rtol=1e-4)


def test_a_stale_copy_is_what_that_test_would_find(monkeypatch):
    """The fault put back: the first copy is kept for ever."""
    linear = layer()
    first = linear.pack()
    monkeypatch.setattr(PackedLinear, "pack", lambda self: first)
    with pytest.raises(AssertionError):
        change_in_place(linear)
        x = torch.randn(8, 48)
        torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight, linear.bias))


def test_other_dtypes_copies_and_pickles():
    linear = layer()
    x = torch.randn(8, 48)
    expected = linear(x)
    for other in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert torch.equal(other(x), expected) and other.weight is not linear.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16
    assert linear.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_text_and_its_rounds(tied, packed_calls):
    """A packed target and drafter against the same packed target; then against the plain one."""
    target = tiny_target(tie_word_embeddings=tied)
    drafter = drafter_for(target)
    ids = prompt(12)
    before = assert_same_ids(target, drafter, ids, max_new_tokens=40)
    rounds = drafter.last_generation_stats.acceptance_lengths
    names = list(target.state_dict())
    added = pack_linears(target) + pack_linears(drafter)
    linears = [m for model in (target, drafter) for m in model.modules() if isinstance(m, nn.Linear)]
    assert added == sum(4 * m.weight.numel() for m in linears)
    del packed_calls[:]
    assert torch.equal(assert_same_ids(target, drafter, ids, max_new_tokens=40), before)
    assert drafter.last_generation_stats.acceptance_lengths == rounds
    assert {id(m) for m in packed_calls} == {id(m) for m in linears}
    assert list(target.state_dict()) == names
    assert (target.lm_head.weight is target.get_input_embeddings().weight) == tied
    unpack_linears(target)
    unpack_linears(drafter)
    assert all(type(m) is nn.Linear and "_packed" not in vars(m) for m in linears)


def test_the_head_over_frequent_tokens_is_packed_too(packed_calls):
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.frequent_token_ids = list(range(5, 60))
    hidden = torch.randn(1, 7, target.config.hidden_size)
    expected = DraftHead(drafter, target).frequent_logits(hidden)
    pack_linears(target)
    del packed_calls[:]
    with torch.no_grad():
        torch.testing.assert_close(DraftHead(drafter, target).frequent_logits(hidden), expected, atol=1e-5, rtol=1e-5)
    assert [m.out_features for m in packed_calls] == [55]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny_target().bfloat16(), "bfloat16 on cpu"),
        (lambda: tiny_target().to("meta"), "offloaded"),
        (lambda: get_peft_model(tiny_target(), LoraConfig(target_modules=["q_proj"])), "merge_and_unload"),
        (lambda: nn.LayerNorm(4), "no nn.Linear"),
    ],
)
def test_what_it_refuses(make, message):
    """And nothing is packed by halves."""
    model = make()
    with pytest.raises(UnsupportedGenerationError, match=message):
        pack_linears(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_a_quantised_model_is_refused():
    target = tiny_target()
    target.model.layers[1].mlp.up_proj.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))
    with pytest.raises(UnsupportedGenerationError, match="quantised"):
        pack_linears(target)


def test_a_dequantised_model_is_packed():
    """transformers leaves the quantizer of a GGUF file on the fp32 model that it made of it."""
    target = tiny_target()
    target.is_quantized, target.hf_quantizer = True, object()
    assert pack_linears(target) > 0
