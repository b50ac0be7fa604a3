"""The Trainer of Hugging Face's transformers, with a tiny GPT-2 that begins with random weights.

python jobs/scripts/trainer.py        hpcsync launch -n 4 -- python jobs/scripts/trainer.py
"""

from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.optimization import get_cosine_schedule_with_warmup

import hpcsync  # hpcsync: new


class Text(Dataset):
    """Windows of 32 bytes of this file."""

    def __init__(self, n_samples):
        self.bytes, self.n_samples = torch.tensor(list(Path(__file__).read_bytes())), n_samples

    def __len__(self):
        return self.n_samples

    def __getitem__(self, index):
        begin = 7 * index % (len(self.bytes) - 32)
        return {"input_ids": self.bytes[begin : begin + 32], "labels": self.bytes[begin : begin + 32]}


def arguments(n_steps, batch_size):
    clip = 0.0  # hpcsync: was clip = 0.5
    others = {"max_grad_norm": clip, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    steps = {"max_steps": n_steps, "gradient_accumulation_steps": 2}
    return TrainingArguments(per_device_train_batch_size=batch_size, **steps, **others)


def train(model, data, arguments, paradigm="bsp", **settings):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule, size = get_cosine_schedule_with_warmup(optimizer, 5, arguments.max_steps), arguments.train_batch_size
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule))
    with hpcsync.connect(model, optimizer, paradigm, clip_norm=0.5, **settings) as sync:  # hpcsync: new
        trainer.get_train_dataloader = lambda: sync.shard(data, size, None, accumulate=2)  # hpcsync: new
        model.register_forward_hook(lambda module, _, output: sync.record(output.loss))  # hpcsync: new
        return trainer.train()


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    result = train(model, Text(2000), arguments(n_steps=30, batch_size=8))
    print(f"loss {result.training_loss:.3f}")
