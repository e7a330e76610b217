"""From reviews to predictions by Hugging Face's Trainer."""

import torch
from reviews import classifier, collate, read, settings, write
from transformers import TrainingArguments

from quietgrad import PrivacyConfig
from quietgrad.integrations.transformers import PrivateTrainer

arguments = TrainingArguments(
    "hugging_face",
    per_device_train_batch_size=64,
    learning_rate=settings["rate"],
    lr_scheduler_type="constant",
    optim="adamw_torch",
    save_strategy="no",
    report_to=[],
)
trainer = PrivateTrainer(
    model=classifier(),
    args=arguments,
    data_collator=collate,
    train_dataset=read("train.csv"),
    privacy=PrivacyConfig(**settings["privacy"]),
)
trainer.train()
trainer.save_model("hugging_face/model")
write("hugging_face", torch.tensor(trainer.predict(read("public.csv")).predictions))
