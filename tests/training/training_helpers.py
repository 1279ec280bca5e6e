"""Small data sets, arguments and slow reference computations that the training tests share."""

import math
import random

import conftest
import torch
from conftest import tiny_target
from datasets import Dataset

from dflash_hf import DFlashTrainer, DFlashTrainingArguments

UNEVEN = (9, 31, 14, 22, 12, 27, 18, 25)  # example lengths; every other one needs padding in a batch


def tiny_drafter(target, **more):
    """A random drafter with taps 0 and 2, input scale 1; `more` may name the conventions of other families."""
    conventions = {name: more.pop(name) for name in ("sample_from_anchor", "window_rule") if name in more}
    drafter = conftest.tiny_drafter(target, **{"target_layer_ids": [0, 2], **more})
    if conventions:
        for name, value in conventions.items():
            setattr(drafter.config, name, value)
        torch.manual_seed(1)
        drafter = type(drafter)(drafter.config).eval()
    return drafter


def rows(lengths=UNEVEN, *, prompt=4, vocab=97, seed=0, holes=False):
    """Examples with random tokens, supervised after the prompt; `holes` drops some supervised tokens in the middle."""
    source = random.Random(seed)
    ids = [[source.randrange(4, vocab) for _ in range(length)] for length in lengths]
    masks = [[0] * prompt + [1] * (length - prompt) for length in lengths]
    if holes:
        for mask in masks:
            for position in range(prompt + 3, len(mask), 5):
                mask[position] = 0
    return Dataset.from_dict({"input_ids": ids, "loss_mask": masks})


def arguments(folder, **more):
    """Arguments of a quiet run on a CPU."""
    common = dict(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        num_anchors=6,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=3,
        max_steps=1,
        warmup_steps=0,
        dataloader_pin_memory=False,
    )
    return DFlashTrainingArguments(**{**common, **more})


def make_trainer(
    folder,
    *,
    train=None,
    evaluation=None,
    target=None,
    drafter=None,
    optimizers=(None, None),
    callbacks=None,
    peft_config=None,
    **more,
):
    """A trainer of a tiny drafter on `rows()`."""
    target = tiny_target() if target is None else target
    drafter = tiny_drafter(target) if drafter is None else drafter
    return DFlashTrainer(
        model=drafter,
        target_model=target,
        args=arguments(folder, **more),
        train_dataset=rows() if train is None else train,
        eval_dataset=evaluation,
        optimizers=optimizers,
        callbacks=callbacks,
        peft_config=peft_config,
    )


def collate(trainer, indices=None, split="train"):
    """A batch of a trainer's own examples."""
    dataset = trainer.train_dataset if split == "train" else trainer.eval_dataset
    return trainer.data_collator([dataset[i] for i in (range(len(dataset)) if indices is None else indices)])


def weights_of(model):
    """A detached copy of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def first_slot(config):
    """The slot that proposes the token after the anchor."""
    return 0 if config.sample_from_anchor else 1


def documents_of(batch, row):
    """(first place, token ids) of each example in a row, packed or not."""
    length = int(batch["attention_mask"][row].sum())
    numbers = batch["document_ids"][row, :length] if "document_ids" in batch else torch.zeros(length, dtype=torch.long)
    for number in numbers.unique().tolist():
        places = (numbers == number).nonzero().flatten()
        yield int(places[0]), batch["input_ids"][row, places]


def reference_blocks(trainer, batch, with_target=False):
    """Full-vocabulary logits of each kept block, one example and one block at a time, without any training mask.

    Yields (row, block number, logits [B, V], labels [B]), and with `with_target` the target's logits [B, V] for the
    tokens that the slots predict. The features are the target's own hidden_states of the example alone; the drafter
    runs on the prefix before the anchor, without cache.
    """
    target, drafter = trainer.target_model, trainer.model
    config = drafter.config
    for row in range(len(batch["input_ids"])):
        for start, ids in documents_of(batch, row):
            with torch.no_grad():
                output = target(input_ids=ids[None], output_hidden_states=True)
            # taps below the last layer only, where hidden_states[i + 1] is the raw output of layer i
            features = torch.cat([output.hidden_states[tap + 1] for tap in config.target_layer_ids], dim=-1)
            for number, (place, keep) in enumerate(zip(batch["anchors"][row].tolist(), batch["keep"][row].tolist())):
                anchor = place - start
                if not keep or not 0 <= anchor < len(ids):
                    continue
                noise_ids = torch.tensor([int(ids[anchor])] + [config.mask_token_id] * (config.block_size - 1))
                noise = target.get_input_embeddings().weight[noise_ids][None] * (config.input_embedding_scale or 1.0)
                hidden = drafter(noise_embeds=noise, context_hidden_states=features[:, :anchor]).last_hidden_state[0]
                found = row, number, hidden @ target.get_output_embeddings().weight.T, batch["labels"][row, number]
                places = (anchor + torch.arange(config.block_size) - first_slot(config)).clamp(0, len(ids) - 1)
                yield (*found, output.logits[0, places]) if with_target else found


def reference_loss(trainer, batch, gamma, vocabulary=None):
    """Decayed cross-entropy by loops, with gradient; `vocabulary` restricts softmax and labels to these tokens."""
    total, weight_sum = 0.0, 0.0
    supervised = None if vocabulary is None else set(vocabulary[0])
    for _, _, logits, labels in reference_blocks(trainer, batch):
        first = first_slot(trainer.model.config)
        for slot in range(first, len(labels)):
            label = int(labels[slot])
            if label < 0 or (supervised is not None and label not in supervised):
                continue
            row = logits[slot] if vocabulary is None else logits[slot][torch.tensor(vocabulary[1])]
            weight = math.exp(-(slot - first) / gamma)
            total = total + weight * (torch.logsumexp(row, 0) - logits[slot, label])
            weight_sum += weight
    return total / weight_sum
