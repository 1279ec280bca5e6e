"""A real drafter that knows what the target will say, and is wrong as often as a test wants.

It recognises where a row stands by the newest context feature that it is given, so it follows any batching, padding
and rollback; wrong features make it guess.
"""

import torch
from conftest import in_whole_blocks, tiny_drafter

from dflash_hf import DFlashDraftModel
from dflash_hf.target import FeatureCapture, embed_tokens


class KnowingDrafter(DFlashDraftModel):
    """Runs the forward pass of any drafter, then replaces its result by hidden states that say the known text.

    Attributes:
        right: bool `[b, T]`, whether it proposes the text's token at that column.
        guesses: rows of draft calls whose features were not those of the text; no longer counted when a row of a
            batch may have ended, since what an ended row is given does not matter.
    """

    def know(self, target, features: torch.Tensor, text: torch.LongTensor, *, right: float, seed: int = 0) -> None:
        """Learn a batch of texts.

        Args:
            target: whose output head turns hidden states into tokens.
            features: `[b, n, K * H_t]` of the last n positions before the newest token.
            text: `[b, T]` prompt and continuation; n < T.
            right: chance that a proposal is right.
        """
        generator = torch.Generator().manual_seed(seed)
        head = target.get_output_embeddings().weight.detach()
        self._rows = 20 * head / head.square().sum(dim=-1, keepdim=True).clamp(min=1e-6)
        wrong = torch.rand(text.shape, generator=generator) >= right
        shift = torch.randint(1, len(head) - 1, text.shape, generator=generator)
        self.right = ~wrong
        self._says = torch.where(wrong, (text + shift) % len(head), text)
        self._embedded = embed_tokens(target, text, scale=self.config.input_embedding_scale).detach()
        self._features = features.flatten(0, 1)
        self._length, self._offset = features.shape[1], text.shape[1] - 1 - features.shape[1]
        columns = torch.arange(text.shape[1])
        self._first_end = (columns * (text != 0)).amax(dim=1).min().item()
        self._newest = 0
        self.guesses = 0

    def forward(self, noise_embeds, context_hidden_states, *args, **kwargs):
        output = super().forward(noise_embeds, context_hidden_states, *args, **kwargs)
        hidden = output.last_hidden_state.clone()
        for row, states in enumerate(context_hidden_states):
            place = self._place_of(states, noise_embeds[row, 0])
            if place is None:
                none_ended = len(hidden) == 1 or self._newest + 1 + hidden.shape[1] < self._first_end
                self.guesses += none_ended
                continue
            text, column = place
            self._newest = max(self._newest, column)
            tokens = self._says[text, column + 2 : column + 1 + hidden.shape[1]]  # the anchor is at column + 1
            hidden[row, 1 : 1 + len(tokens)] = self._rows[tokens].to(hidden)
        output.last_hidden_state = hidden
        return output

    def _place_of(self, states: torch.Tensor, anchor: torch.Tensor) -> tuple[int, int] | None:
        """Row and column of the text whose feature is the newest of `states [n, K * H_t]`; `anchor [H]` is next."""
        known, embedded = self._features.to(states), self._embedded.to(anchor)
        if not len(known):
            return None
        near = torch.cdist(states, known) < 1e-3 * known.norm(dim=1) + 1e-4
        best = None
        for index in near.any(dim=0).nonzero().flatten().tolist():
            text, column = index // self._length, index % self._length + self._offset
            # Two rows may begin alike.
            if torch.allclose(embedded[text, column + 1], anchor, rtol=1e-3, atol=1e-4):
                best = max(best or (text, column), (text, column), key=lambda place: place[1])
        return best


def knowing_drafter(target, **more) -> KnowingDrafter:
    """One that fits `target`; `know` must be called before it drafts."""
    drafter = in_whole_blocks(tiny_drafter(target, **more))
    drafter.__class__ = KnowingDrafter
    return drafter


def recorded(target, layer_ids: list[int], call) -> tuple:
    """The result of `call()` and the tapped features `[b, n, K * H_t]` of all positions that it ran the target on."""
    capture = FeatureCapture(target, layer_ids)
    with capture, capture.recording():
        result = call()
        features = capture.take(torch.device("cpu"))
    return result, features


def same_as_plain(
    target, inputs: dict, *, right: float = 0.8, seed: int = 0, make_options=dict, plain=None, **more
) -> tuple:
    """Greedy generate with and without a drafter that knows the answer; asserts equal ids.

    Args:
        inputs: prompt, mask, images: what both calls share.
        make_options: called once for each call, for options that keep state.
        plain: the target of the plain call, where another object shall say what is right.
        more: settings of the drafter.

    Returns:
        the ids, and the drafter after the call.
    """
    drafter = knowing_drafter(target, **{"target_layer_ids": [0, 2], "layers": 1, **more})
    plain = target if plain is None else plain
    expected, features = recorded(
        plain, drafter.config.target_layer_ids, lambda: plain.generate(**inputs, do_sample=False, **make_options())
    )
    text = getattr(expected, "sequences", expected)
    padding = 0 if "input_ids" in inputs else inputs["inputs_embeds"].shape[1]
    drafter.know(target, features, torch.nn.functional.pad(text, (padding, 0)), right=right, seed=seed)
    output = target.generate(**inputs, do_sample=False, **make_options(), assistant_model=drafter)
    assert getattr(output, "sequences", output).tolist() == text.tolist()
    assert drafter.guesses == 0, "the drafter was given features of no prefix of the text"
    return text, drafter


def padded_batch(lengths: list[int], *, seed: int = 0) -> dict:
    """Left-padded ids `[b, L]` and their mask."""
    ids = torch.randint(4, 90, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}
