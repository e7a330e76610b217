"""What all loops share: reviews from a CSV, the model, and predictions to a CSV."""

import csv
import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

settings = json.loads(Path("settings.json").read_text())
labels = settings["labels"]
tokenizer = AutoTokenizer.from_pretrained(settings["model"])
collate = DataCollatorWithPadding(tokenizer)


def read(file):
    with open(file, newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    tokens = tokenizer([row["text"] for row in rows], truncation=True, max_length=32)
    classes = [labels.index(row["label"]) for row in rows]
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": one}
        for ids, mask, one in zip(tokens["input_ids"], tokens["attention_mask"], classes)
    ]


def classifier():
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        settings["model"],
        num_labels=len(labels),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return get_peft_model(
        model,
        LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules=["query", "value"]),
    )


def write(folder, logits):
    with open(f"{folder}/predictions.csv", "w", newline="", encoding="utf-8") as lines:
        lines.write("predicted\n")
        lines.writelines(f"{labels[i]}\n" for i in logits.argmax(1))
