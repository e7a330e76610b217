"""A transformer that is fine-tuned in part: its last layer, all of it, or LoRA adapters."""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from quietgrad import PrivacyConfig
from torch import optim
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

sys.path.append(str(Path(__file__).parents[1]))
import made


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["last-layer", "full", "lora"], default="lora")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.epochs, size = (1, 300) if args.smoke else (args.epochs, 2000)
    torch.manual_seed(0)
    train_set, test_set = made.sentences(size, 0), made.sentences(500, 1)
    config = BertConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=24,
    )
    model = BertForSequenceClassification(config)
    if args.mode == "last-layer":
        model.bert.embeddings.requires_grad_(False)
        model.bert.encoder.layer[0].requires_grad_(False)
    if args.mode == "lora":
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4))
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)

    def per_example_loss(model, batch):
        return F.cross_entropy(model(batch[0]).logits, batch[1], reduction="none")

    dp = PrivacyConfig(target_epsilon=8.0, expected_batch_size=args.batch_size, epochs=args.epochs)
    run = dp.build(len(train_set)).start()
    train_loader = run.loader(train_set)
    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            run.backward(model, per_example_loss, batch)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = [(model(x).logits.argmax(1) == y).sum() for x, y in DataLoader(test_set, 100)]
        print(f"epoch {epoch}: test accuracy {sum(found) / len(test_set):.3f}")
        print(f"epoch {epoch}: epsilon {run.epsilon()}")


if __name__ == "__main__":
    main()
