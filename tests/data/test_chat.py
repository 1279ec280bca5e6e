"""Examples from token ids and from chat messages: which tokens are supervised, and what is refused."""

import json

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_hf.data.chat import encode_conversation, has_anchor, prepare_dataset
from dflash_hf.data.messages import normalize_messages, normalize_tools
from dflash_hf.errors import DatasetError, DFlashError

WORDS = [
    "<|im_start|>",
    "<|im_end|>",
    "system",
    "user",
    "assistant",
    "tool",
    "you",
    "are",
    "helpful",
    "hi",
    "there",
    "how",
    "is",
    "it",
    "one",
    "two",
    "three",
    "four",
]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Drops the content of every assistant turn but the last one, as templates do that strip earlier thinking.
REWRITES = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and not loop.last %}one<|im_end|>\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONVERSATION = [
    {"role": "system", "content": "you are helpful"},
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "how is it"},
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three four three"},
]
SHAREGPT = [
    {"from": "system", "value": "you are helpful"},
    {"from": "human", "value": "hi there"},
    {"from": "gpt", "value": "how is it"},
    {"from": "human", "value": "one two"},
    {"from": "gpt", "value": "three four three"},
]


def make_tokenizer(template=CHATML, more=()):
    """One token a word, split at spaces and newlines; the two marks are special tokens."""
    words = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate([*WORDS, "<unk>", *more])}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def supervised(tokenizer, ids, mask):
    return " ".join(tokenizer.convert_ids_to_tokens([token for token, value in zip(ids, mask) if value]))


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED.replace("{% generation", "{%- generation")])
def test_assistant_turns_and_their_end_are_supervised(template):
    """By prefix rendering and by generation marks alike: every assistant turn with its end mark, nothing else."""
    tokenizer = make_tokenizer(template)
    [(ids, mask)] = encode_conversation(CONVERSATION, tokenizer)
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"] and len(ids) == len(mask)
    assert supervised(tokenizer, ids, mask) == "how is it <|im_end|> three four three <|im_end|>"
    starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    assert all(tokenizer.convert_ids_to_tokens(ids[start - 1]) == "assistant" for start in starts) and len(starts) == 2


def test_a_response_that_repeats_the_prompt_is_found_by_place():
    """Spans come from positions, so equal words in a user turn stay unsupervised."""
    tokenizer = make_tokenizer()
    [(ids, mask)] = encode_conversation(
        [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "one two"}], tokenizer
    )
    assert sum(mask) == 3 and mask[:4] == [0] * 4 and supervised(tokenizer, ids, mask) == "one two <|im_end|>"


def test_a_conversation_that_ends_with_the_user():
    """The open last turn adds nothing to the mask."""
    tokenizer = make_tokenizer()
    [(ids, mask)] = encode_conversation(CONVERSATION[:4], tokenizer)
    assert supervised(tokenizer, ids, mask) == "how is it <|im_end|>"


def test_sharegpt_equals_openai():
    """human and gpt are user and assistant."""
    assert normalize_messages(SHAREGPT) == CONVERSATION
    tokenizer = make_tokenizer()
    first = prepare_dataset(Dataset.from_dict({"messages": [CONVERSATION]}), tokenizer)
    second = prepare_dataset(Dataset.from_dict({"conversations": [SHAREGPT]}), tokenizer)
    assert first[0] == second[0]


def test_unknown_speaker_is_named():
    """The error gives the speaker and those that are known."""
    with pytest.raises(DatasetError, match="'narrator'.*human"):
        normalize_messages([{"from": "narrator", "value": "hi"}])


def test_empty_fields_of_openai_messages_are_dropped():
    """datasets fills absent keys with None, which templates would print."""
    assert normalize_messages([{"role": "user", "content": "hi", "tool_calls": None}]) == [
        {"role": "user", "content": "hi"}
    ]


def test_all_four_column_sets_give_input_ids_and_loss_mask():
    """Exactly two columns come out, whatever else goes in."""
    tokenizer = make_tokenizer()
    [(ids, mask)] = encode_conversation(CONVERSATION, tokenizer)
    split = mask.index(1)
    sources = {
        "ids": {"input_ids": [ids], "loss_mask": [mask], "source": ["x"]},
        "messages": {"messages": [CONVERSATION], "id": [7]},
        "conversations": {"conversations": [SHAREGPT]},
    }
    for name, columns in sources.items():
        prepared = prepare_dataset(Dataset.from_dict(columns), tokenizer)
        assert sorted(prepared.column_names) == ["input_ids", "loss_mask"], name
        assert prepared[0] == {"input_ids": ids, "loss_mask": mask}, name
    prepared = prepare_dataset(Dataset.from_dict({"prompt_ids": [ids[:split]], "response_ids": [ids[split:]]}))
    assert prepared[0] == {"input_ids": ids, "loss_mask": [0] * split + [1] * (len(ids) - split)}


def test_boolean_masks_become_integers():
    """A mask of True and False is taken."""
    prepared = prepare_dataset(Dataset.from_dict({"input_ids": [[5, 6, 7]], "loss_mask": [[False, True, True]]}))
    assert prepared[0]["loss_mask"] == [0, 1, 1]


def test_max_length_cuts_the_end_and_drops_what_loses_its_response():
    """Both lists are cut alike; an example whose response is cut off goes."""
    data = Dataset.from_dict({"prompt_ids": [[1] * 3, [1] * 9], "response_ids": [[2] * 9, [2] * 9]})
    prepared = prepare_dataset(data, max_length=6)
    assert len(prepared) == 1
    assert prepared[0] == {"input_ids": [1] * 3 + [2] * 3, "loss_mask": [0] * 3 + [1] * 3}
    assert len(prepare_dataset(data, max_length=None)[1]["input_ids"]) == 18


def test_examples_without_an_anchor_are_dropped():
    """An anchor needs two neighbouring supervised tokens."""
    data = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 3, "loss_mask": [[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]})
    assert prepare_dataset(data)["loss_mask"][:] == [[0, 0, 1, 1]]
    assert [has_anchor(mask) for mask in ([], [1], [1, 1], [1, 0, 1], [0, 1, 1, 0])] == [
        False,
        False,
        True,
        False,
        True,
    ]


def refuse(columns, tokenizer=None, **more):
    with pytest.raises(DatasetError) as caught:
        prepare_dataset(Dataset.from_dict(columns), tokenizer, **more)
    assert isinstance(caught.value, DFlashError) and isinstance(caught.value, ValueError)
    return str(caught.value)


def test_a_template_that_rewrites_earlier_turns_gives_an_example_an_answer():
    """Each is rendered as the target sees it when it answers, with only that answer supervised."""
    tokenizer = make_tokenizer(REWRITES)
    prepared = prepare_dataset(Dataset.from_dict({"messages": [CONVERSATION]}), tokenizer)
    assert [supervised(tokenizer, row["input_ids"], row["loss_mask"]) for row in prepared] == [
        "how is it <|im_end|>",
        "three four three <|im_end|>",
    ]
    for row, length in zip(prepared, (3, 5)):
        text = tokenizer.apply_chat_template(CONVERSATION[:length], tokenize=False)
        assert row["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "one <|im_end|>" in tokenizer.decode(prepared[1]["input_ids"]), (
        "the first answer as the template rewrites it"
    )


# Thinking as Qwen3's template has it: an empty block in the prompt when it is off, and in the last answer always.
THINKS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("thinking", "first"), [(False, "three"), (True, "<think>"), (None, "<think>")], ids=["off", "on", "default"]
)
def test_thinking_on_or_off(thinking, first):
    """Off: the empty thinking block is part of the prompt. On: it is the target's to write."""
    tokenizer = make_tokenizer(THINKS, more=["<think>", "</think>"])
    data = Dataset.from_dict({"messages": [CONVERSATION]})
    prepared = prepare_dataset(data, tokenizer, enable_thinking=thinking)
    answers = [supervised(tokenizer, row["input_ids"], row["loss_mask"]) for row in prepared]
    assert len(answers) == 2 and answers[1].split()[0] == first
    assert answers[1].endswith("three four three <|im_end|>")


def test_an_answer_that_the_prompt_does_not_lead_to_is_refused():
    """A prompt that opens a thinking block, and answers rendered without it."""
    template = CHATML.replace("assistant\n{% endif %}", "assistant\nthere{% endif %}")
    text = refuse({"messages": [CONVERSATION]}, make_tokenizer(template))
    for word in ("turn 2", "generation", "`input_ids` and `loss_mask`", template[:40]):
        assert word in text


def test_an_all_zero_mask_is_refused_with_the_template_s_name():
    """Marks in a branch that these messages never take leave the answers without loss."""
    template = MARKED.replace(
        "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}",
        "{% if message.reasoning %}{% generation %}{{ message.reasoning }}{% endgeneration %}{% endif %}"
        "{{ message['content'] }}<|im_end|>",
    )
    assert template != MARKED
    tokenizer = make_tokenizer(template)
    tokenizer.name_or_path = "someone/their-model"
    text = refuse({"messages": [CONVERSATION]}, tokenizer)
    for word in ("all zero", "someone/their-model", template[:40], "prefixes"):
        assert word in text


def test_a_template_that_refuses_is_quoted():
    """Its own message, the roles, and whose template it is."""
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system please') }}{% endif %}" + CHATML
    text = refuse({"messages": [CONVERSATION]}, make_tokenizer(template))
    assert "no system please" in text and "'system', 'user'" in text and "raise_exception" in text


TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments.town }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"name": "is", "arguments": '{"town": "there"}'}
OPENAI_TOOLS = [
    {"role": "user", "content": "how is it"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
    {"role": "tool", "content": "two", "tool_call_id": "1"},
    {"role": "assistant", "content": "two four"},
]
SHAREGPT_TOOLS = [
    {"from": "human", "value": "how is it"},
    {"from": "function_call", "value": '{"name": "is", "arguments": {"town": "there"}}'},
    {"from": "observation", "value": "two"},
    {"from": "gpt", "value": "two four"},
]


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize(("column", "messages"), [("messages", OPENAI_TOOLS), ("conversations", SHAREGPT_TOOLS)])
def test_tools(column, messages, as_text):
    """Calls are supervised, what tools say is not; descriptions and arguments reach the template."""
    tokenizer = make_tokenizer(TOOLS_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "one", "description": None}}]
    data = Dataset.from_list([{column: messages, "tools": json.dumps(tools) if as_text else tools}])
    prepared = prepare_dataset(data, tokenizer)
    row = prepared[0]
    assert supervised(tokenizer, row["input_ids"], row["loss_mask"]) == "is there <|im_end|> two four <|im_end|>"
    assert tokenizer.convert_ids_to_tokens(row["input_ids"])[2] == "one"


def test_tool_calls_that_are_not_json_are_refused():
    with pytest.raises(DatasetError, match="not JSON.*town"):
        normalize_messages([{"from": "function_call", "value": "is(town)"}])
    assert normalize_tools("") is normalize_tools(None) is normalize_tools([]) is None


def test_a_template_that_rewrites_is_fine_for_one_turn():
    """Nothing earlier to rewrite: used."""
    tokenizer = make_tokenizer(REWRITES)
    [(ids, mask)] = encode_conversation(CONVERSATION[:3], tokenizer)
    assert supervised(tokenizer, ids, mask) == "how is it <|im_end|>"


def test_a_tokenizer_without_template_is_refused():
    """The error names the class and the attribute to set."""
    text = refuse({"messages": [CONVERSATION]}, make_tokenizer(None))
    assert "has no chat template" in text and "tokenizer.chat_template" in text


def test_messages_without_tokenizer_are_refused():
    """The error names the argument."""
    assert "processing_class" in refuse({"messages": [CONVERSATION]})


def test_a_slow_tokenizer_without_marks_is_refused():
    """No offsets, no marks: the error offers a fast tokenizer or ids."""

    class Slow:
        chat_template = CHATML
        is_fast = False

        def get_chat_template(self, tools=None):
            return self.chat_template

    text = refuse({"messages": [CONVERSATION]}, Slow())
    assert "Slow" in text and "fast tokenizer" in text


@pytest.mark.parametrize(
    "columns",
    [
        {"input_ids": [[1, 2, 3]], "loss_mask": [[0, 0, 0]]},
        {"input_ids": [[1, 2, 3]], "loss_mask": [[1, 0, 1]]},
        {"prompt_ids": [[1, 2, 3]], "response_ids": [[4]]},
    ],
)
def test_nothing_to_train_on_is_refused(columns):
    """The error gives the number of examples and what to check."""
    text = refuse(columns, max_length=33)
    assert "None of the 1 examples" in text and "loss_mask" in text and "max_length (33)" in text


def test_responses_cut_off_by_max_length_are_refused():
    """max_length is named as a possible reason."""
    text = refuse({"prompt_ids": [[1] * 50], "response_ids": [[2] * 9]}, max_length=40)
    assert "max_length (40)" in text


def test_a_user_only_dataset_is_refused():
    """Messages without an assistant turn have nothing to learn from."""
    assert "nothing to train" in refuse({"messages": [CONVERSATION[:2]]}, make_tokenizer())


def test_unknown_columns_are_refused():
    """The error lists what is there and the four forms that are taken."""
    text = refuse({"text": ["hi"], "label": [1]})
    for word in ("['label', 'text']", "messages", "conversations", "loss_mask", "prompt_ids", "response_ids"):
        assert word in text, word


def test_lengths_that_differ_are_refused():
    """Both lengths are named."""
    text = refuse({"input_ids": [[1, 2, 3]], "loss_mask": [[1, 1]]})
    assert "3 input_ids" in text and "2 loss_mask" in text
