"""In a Hugging Face Trainer: python examples/hf_trainer.py STORE DATASET STUDENT OUTPUT [STEPS]"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from logitstore.consumer import DistillationMixin, LogitStoreDataset


class DistillationTrainer(DistillationMixin, Trainer):
    """A Trainer of a student."""


store, name, student, output, steps = (*sys.argv[1:], "100")[:5]
trainer = DistillationTrainer(
    model=AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32),
    args=TrainingArguments(output, max_steps=int(steps), learning_rate=3e-4, logging_steps=1, report_to="none"),
    train_dataset=LogitStoreDataset(store, name, tokenizer=student, seq_length=256, batch_tokens=4096),
    objective="kl:0.9,ce:0.1",
    processing_class=AutoTokenizer.from_pretrained(student),
)
trainer.train()
print(trainer.evaluate())
trainer.save_model()
