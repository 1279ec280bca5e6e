"""What a fuzzing case is: everything drawn from one seed, and the options of `generate` that it stands for."""

import random
from dataclasses import asdict, dataclass, field

import torch
from fuzz_targets import BEFORE_524, TARGETS, VISION, VOCAB, available
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

PROCESSORS = [
    "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "min_length", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "sequence_bias", "forced_eos_token_id", "exponential_decay", "prefix_allowed_tokens_fn",
    "guidance_scale", "stateful", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "renormalize_logits",
    "watermarking",
]  # fmt: skip
STOPS = ["eos", "several_eos", "stop_strings", "content", "row_lengths"]
CACHES = ["static", "turn_full_ids", "turn_new_ids"]


@dataclass
class Case:
    """One call of `generate`, as plain data."""

    seed: int
    target: str
    right: float
    block_size: int
    taps: list[int]
    lengths: list[int]
    new_tokens: int
    masked: bool = True
    num_assistant_tokens: int | None = None
    processors: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    cache: str | None = None
    chunk: int | None = None
    image: bool = False
    embeds: bool = False
    scores: bool = False
    by_cost: str | None = None

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in asdict(self).items() if value is not None and value != [])


def draw_case(seed: int) -> Case:
    """The case of a seed; the classes take turns."""
    names = [name for name in TARGETS if available(name)]
    rng = random.Random(seed)
    batch = rng.choice([1, 1, 2, 3, 4])
    case = Case(
        seed=seed,
        target=names[seed % len(names)],
        right=rng.choice([0.0, 0.5, 0.9, 1.0]),
        block_size=rng.choice([2, 3, 4, 5, 8, 11, 16]),
        taps=rng.sample(range(4), rng.choice([1, 2])),
        lengths=[rng.randint(1, 13) for _ in range(batch)],
        new_tokens=rng.choice([1, 2, rng.randint(3, 12), rng.randint(10, 22), 22]),
        num_assistant_tokens=rng.choice([None, None, None, rng.randint(1, 6)]),
        processors=rng.sample(PROCESSORS, rng.choice([0, 0, 1, 1, 2, 3])),
        stops=rng.sample(STOPS, rng.choice([0, 0, 1, 1, 2])),
        cache=rng.choice([None, None, None, *CACHES]),
        chunk=rng.choice([None, None, None, rng.randint(1, 9)]),
        scores=rng.random() < 0.3,
    )
    case.by_cost = random.Random(-seed).choice([None, "usual", "free"])  # does not change the rest of a seed's case
    case.masked = batch > 1 or rng.random() < 0.5
    case.image = case.target in VISION and rng.random() < 0.6
    case.embeds = case.target not in VISION and case.cache is None and rng.random() < 0.08
    if case.image:  # plain generate takes the whole prompt of an image at once
        case.chunk = None
        case.cache = None if case.cache != "static" else case.cache
    if BEFORE_524 and case.cache == "static":  # cannot be cropped there
        case.cache = None
    if BEFORE_524 and case.cache is not None:  # plain generate itself runs the prompt twice there
        case.chunk = None
    return case


def prompt_of(case: Case) -> tuple[torch.LongTensor, torch.LongTensor | None]:
    """Left-padded ids `[b, L]` and their mask; one row without a mask has no padding."""
    generator = torch.Generator().manual_seed(case.seed)
    padding = 0 if len(case.lengths) > 1 else case.seed % 3
    width = max(case.lengths) + (padding if case.masked else 0)
    ids = torch.randint(4, 90, (len(case.lengths), width), generator=generator)
    if not case.masked:
        return ids, None
    mask = (torch.arange(width) >= width - torch.tensor(case.lengths)[:, None]).long()
    return ids * mask, mask


class Rolling(LogitsProcessor):
    """Keeps state: how often it was called decides what it does."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.roll(self.calls % 3, dims=-1)


class StopByContent(StoppingCriteria):
    """Ends a row by what it says."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(dim=1) % 11 == 4


class StopByRow(StoppingCriteria):
    """Ends each row of the batch at a length of its own."""

    def __init__(self, lengths: list[int]):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.lengths


def words() -> PreTrainedTokenizerFast:
    """A tokenizer with one word a token."""
    vocabulary = {f"w{index}": index for index in range(VOCAB) if index != 1}
    vocabulary["abcdef"] = 1  # the word by which StopStringCriteria finds out how tokens become text
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", eos_token="w2")


def options_of(case: Case, width: int, said: list[list[int]]) -> dict:
    """The keyword arguments of a case, made anew for each call because some keep state.

    Args:
        width: prompt columns.
        said: what plain generate says without them, so that they change something.
    """
    rng = random.Random(case.seed + 1)
    token = [rng.choice(rng.choice(said)) for _ in range(8)]
    row = rng.choice(said)
    at = rng.randrange(len(row))
    steps = rng.sample(range(2, 40), 4)
    options = {"max_new_tokens": case.new_tokens, "do_sample": False}
    eos = {"eos": token[0], "several_eos": token[:3]}
    for name in eos.keys() & set(case.stops):
        options["eos_token_id"] = eos[name]
    table = {
        "repetition_penalty": {"repetition_penalty": 1.4},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": options.get("eos_token_id", token[0])},
        "min_length": {"min_length": width + 5, "eos_token_id": options.get("eos_token_id", token[0])},
        "bad_words_ids": {"bad_words_ids": [[token[1]], row[at : at + 2]]},
        "suppress_tokens": {"suppress_tokens": token[2:4]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [row[0]]},
        "sequence_bias": {"sequence_bias": [[[token[4]], -9.0], [row[at : at + 3] or [5], -9.0], [[7], 1.0]]},
        "forced_eos_token_id": {"forced_eos_token_id": 50},
        "exponential_decay": {
            "exponential_decay_length_penalty": (3, 1.3),
            "eos_token_id": options.get("eos_token_id", token[5]),
        },
        "prefix_allowed_tokens_fn": {
            "prefix_allowed_tokens_fn": lambda which, ids: [
                4 + (int(ids[-1]) * step + len(ids) + which) % 90 for step in steps
            ]
        },
        "guidance_scale": {"guidance_scale": 1.5},
        "stateful": {"logits_processor": LogitsProcessorList([Rolling()])},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
        "renormalize_logits": {"renormalize_logits": True},
        "watermarking": {"watermarking_config": WatermarkingConfig(bias=3.0, context_width=1)},
    }
    for name in case.processors:
        options.update(table[name])
    criteria = StoppingCriteriaList()
    for name in case.stops:
        if name == "stop_strings":
            options.update(stop_strings=[f"w{token[6]}", f"w{row[0]} w{token[7]}"], tokenizer=words())
        elif name == "content":
            criteria.append(StopByContent())
        elif name == "row_lengths":
            criteria.append(StopByRow([width + rng.randint(1, case.new_tokens) for _ in case.lengths]))
    if criteria:
        options["stopping_criteria"] = criteria
    if case.cache == "static":
        options["cache_implementation"] = "static"
    if case.chunk:
        options["prefill_chunk_size"] = case.chunk
    return options
