"""A transformer that is fine-tuned in part: its last layer, all of it by ghost clipping, or LoRA.
The sentences are made here, of words that are mostly of one of two subjects.

An Opacus script; ``from opacus import PrivacyEngine`` is the one line that differs. (Opacus 1.6.0
runs the last layer; its ghost clipping stops at a view of transformers 5.)
"""

import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from quietgrad.integrations.opacus import PrivacyEngine

WORDS, LENGTH = 200, 24


def sentences(count, seed):
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        label = int(torch.randint(0, 2, (), generator=draw))
        ids = torch.randint(100, WORDS, (LENGTH,), generator=draw)
        own = torch.rand(LENGTH, generator=draw) < 0.3
        ids[own] = torch.randint(50 * label, 50 * label + 50, (int(own.sum()),), generator=draw)
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label})
    return made


def classifier(mode):
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    model = BertForSequenceClassification(config)
    if mode == "last-layer":
        for parameter in model.bert.embeddings.parameters():
            parameter.requires_grad = False
        for parameter in model.bert.encoder.layer[0].parameters():
            parameter.requires_grad = False
    if mode == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4))
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["last-layer", "ghost", "lora"], default="ghost")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    size = 2000
    if args.smoke:
        args.epochs, size = 1, 300
    torch.manual_seed(0)
    train_loader = DataLoader(sentences(size, 0), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(sentences(500, 1), batch_size=100)
    model = classifier(args.mode)
    model.train()
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    privacy_engine = PrivacyEngine()
    options = {"grad_sample_mode": "hooks" if args.mode == "last-layer" else "ghost"}
    private = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        criterion=criterion,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=0.5,
        **options,
    )
    if args.mode == "last-layer":
        model, optimizer, train_loader = private
    else:
        model, optimizer, criterion, train_loader = private
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in train_loader:
            labels = batch.pop("labels")
            optimizer.zero_grad()
            loss = criterion(model(**batch).logits, labels)
            loss.backward()
            optimizer.step()
        model.eval()
        right = 0
        with torch.no_grad():
            for batch in test_loader:
                labels = batch.pop("labels")
                right += (model(**batch).logits.argmax(dim=1) == labels).sum().item()
        epsilon = privacy_engine.get_epsilon(args.delta)
        print(f"epoch {epoch}: test accuracy {right / 500:.3f}, epsilon {epsilon}")


if __name__ == "__main__":
    main()
