"""The one place that touches transformers: `generate(assistant_model=<DFlashDraftModel>)` and the Auto classes.

Two methods of `GenerationMixin` are wrapped behind an isinstance gate: the assisted decoding loop, and the validation
before it, which would refuse drafters without a vocabulary of their own. Every other call reaches the originals
unchanged, and so does a call that asks for transformers' own loop with `speculation_type="dflash"`.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import AutoConfig, AutoModel, GenerationMixin
from transformers.generation import GenerationMode

from ..configuration_dflash import DFlashConfig
from ..errors import UnsupportedGenerationError
from ..modeling_dflash import DFlashDraftModel
from .decoding import DFlashDecoding
from .misuse import install_pipeline_gate, refuse_mistaken_drafter, uninstall_pipeline_gate

# What transformers' own loop does not do: it would draft wrong tokens, slowly.
_BEYOND_STOCK = ("sample_from_anchor", "own_embedding", "own_head", "selector_rank", "markov_rank", "gru_hidden_dim")

_DECODING = "_assisted_decoding"
_VALIDATION = "_validate_generation_mode"


def as_drafter(assistant_model: Any) -> DFlashDraftModel | None:
    """The drafter in `assistant_model`, through PEFT, torch.compile and data-parallel wrappers; None if it is none."""
    model = assistant_model
    while model is not None and not isinstance(model, DFlashDraftModel):
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            model = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    return model


def install() -> None:
    """Register the Auto classes and let `generate` accept drafters. Doing it again changes nothing."""
    AutoConfig.register(DFlashConfig.model_type, DFlashConfig, exist_ok=True)
    AutoModel.register(DFlashConfig, DFlashDraftModel, exist_ok=True)
    for name, wrap in ((_DECODING, _wrap_decoding), (_VALIDATION, _wrap_validation)):
        original = getattr(GenerationMixin, name)
        if not hasattr(original, "_dflash_original"):
            wrapper = wrap(original)
            wrapper._dflash_original = original
            setattr(GenerationMixin, name, wrapper)
    install_pipeline_gate()


def uninstall() -> None:
    """Give `GenerationMixin` its own methods back. The Auto classes stay registered."""
    for name in (_DECODING, _VALIDATION):
        original = getattr(getattr(GenerationMixin, name), "_dflash_original", None)
        if original is not None:
            setattr(GenerationMixin, name, original)
    uninstall_pipeline_gate()


def _wrap_decoding(original):
    @functools.wraps(original)  # generate reads the signature of the method that it calls
    def _assisted_decoding(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        inputs_tensor=None,
        assistant_model=None,
        **kwargs,
    ):
        drafter = as_drafter(assistant_model)
        if drafter is None or _wants_stock_loop(generation_config):
            return original(
                self,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                inputs_tensor=inputs_tensor,
                assistant_model=assistant_model,
                **kwargs,
            )
        model_kwargs = {key: value for key, value in kwargs.items() if key not in ("assistant_tokenizer", "tokenizer")}
        decoding = DFlashDecoding(
            self,
            drafter,
            input_ids=input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=streamer,
            model_kwargs=model_kwargs,
            synced_gpus=synced_gpus,
        )
        return decoding.run()

    return _assisted_decoding


def _wrap_validation(original):
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = as_drafter(generation_mode_kwargs.get("assistant_model"))
        if drafter is None:
            refuse_mistaken_drafter(generation_mode_kwargs.get("assistant_model"))
        if drafter is None or _wants_stock_loop(generation_config):
            if drafter is not None:
                _validate_stock(drafter.config)
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        _validate(self, generation_mode, generation_config)
        # What is left to check are the rules of plain generation, which this takes the place of.
        plain = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
        others = {key: value for key, value in generation_mode_kwargs.items() if key != "assistant_model"}
        return original(self, plain, generation_config, others)

    return _validate_generation_mode


def _wants_stock_loop(generation_config) -> bool:
    return getattr(generation_config, "speculation_type", None) == "dflash"


def _validate_stock(config: DFlashConfig) -> None:
    beyond = [name for name in _BEYOND_STOCK if getattr(config, name)]
    if beyond or config.window_rule != "query":
        raise UnsupportedGenerationError(
            f"speculation_type='dflash' is transformers' own loop, which drafts with the target's tables from slot 1 "
            f"on and knows nothing of {beyond[0] if beyond else 'window_rule'} = "
            f"{getattr(config, beyond[0] if beyond else 'window_rule')!r}. Leave speculation_type out."
        )


def _validate(target, generation_mode, generation_config) -> None:
    if target.config.is_encoder_decoder:
        raise UnsupportedGenerationError(
            f"{type(target).__name__} is an encoder-decoder model; DFlash drafters read a decoder-only target."
        )
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise UnsupportedGenerationError(
            f"A DFlash drafter works with greedy decoding and sampling, but these options ask for "
            f"{generation_mode.value.replace('_', ' ')} (num_beams={generation_config.num_beams}). Set num_beams=1 and "
            "leave other modes out, or generate without assistant_model."
        )
    if generation_config.use_cache is False:
        raise UnsupportedGenerationError(
            "use_cache=False: generation with a DFlash drafter needs the target's key-value cache. Set use_cache=True."
        )
    for option in ("use_mtp", "assistant_early_exit", "dola_layers"):
        if getattr(generation_config, option, None):
            raise UnsupportedGenerationError(
                f"{option}={getattr(generation_config, option)} is another way of decoding. Leave it out, or generate "
                "without assistant_model."
            )
    if generation_config.prompt_lookup_num_tokens is not None:
        raise UnsupportedGenerationError(
            f"prompt_lookup_num_tokens={generation_config.prompt_lookup_num_tokens} and assistant_model both propose "
            "tokens. Pass one of them."
        )
