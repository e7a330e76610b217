"""From reviews to predictions by Lightning's Trainer."""

import lightning
import torch
import torch.nn.functional as F
from reviews import classifier, collate, read, settings, write
from torch.utils.data import DataLoader

from quietgrad import PrivacyConfig
from quietgrad.integrations.lightning import PrivateLightningModule


class Classifier(PrivateLightningModule):
    privacy = PrivacyConfig(**settings["privacy"])

    def __init__(self):
        super().__init__()
        self.net = classifier()

    def per_example_loss(self, batch):
        logits = self.net(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits, batch["labels"], reduction="none")

    def predict_step(self, batch):
        return self.net(**batch).logits

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=settings["rate"], weight_decay=0.0)


model = Classifier()
trainer = lightning.Trainer(
    default_root_dir="in_lightning", devices=1, logger=False, enable_checkpointing=False
)
trainer.fit(model, DataLoader(read("train.csv"), batch_size=64, collate_fn=collate))
model.net.save_pretrained("in_lightning/model")
public = DataLoader(read("public.csv"), batch_size=64, collate_fn=collate)
write("in_lightning", torch.cat(trainer.predict(model, public)))
