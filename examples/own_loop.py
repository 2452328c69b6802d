"""A loop of one's own: python examples/own_loop.py STORE DATASET STUDENT OUTPUT [STEPS]"""

import sys
from itertools import islice

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from logitstore.consumer import DistillationLoss, LogitStoreDataset

store, name, student, output, steps = (*sys.argv[1:], "100")[:5]
dataset = LogitStoreDataset(store, name, tokenizer=student, seq_length=256, batch_tokens=4096)
model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
loss_of = DistillationLoss(model, dataset, objective="kl:0.9,ce:0.1")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

model.train()
for step, batch in enumerate(islice(dataset, int(steps)), 1):
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")

print({name: round(value, 4) for name, value in loss_of.evaluate().items()})
model.save_pretrained(output)
AutoTokenizer.from_pretrained(student).save_pretrained(output)
