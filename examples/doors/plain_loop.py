"""From reviews to predictions by a loop of one's own."""

import torch
import torch.nn.functional as F
from reviews import classifier, collate, read, settings, write

from quietgrad import PrivacyConfig


def loss_of_a_review(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


train, public, model = read("train.csv"), read("public.csv"), classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=settings["rate"], weight_decay=0.0)
plan = PrivacyConfig(**settings["privacy"]).build(len(train))
with plan.start("plain_loop/ledger.jsonl") as run:
    for batch in run.loader(train, collate_fn=collate, physical_batch_size=64, steps=plan.steps):
        run.backward(model, loss_of_a_review, batch)
        optimizer.step()
        optimizer.zero_grad()
model.save_pretrained("plain_loop/model")

model.eval()
with torch.no_grad():
    parts = torch.utils.data.DataLoader(public, batch_size=64, collate_fn=collate)
    write("plain_loop", torch.cat([model(**part).logits for part in parts]))
