"""Small colour images with a network that had BatchNorm, batches in parts, a learning-rate
schedule, a checkpoint. The images are made here: coloured squares, bars and crosses on noise.

An Opacus script; with ``opacus`` in place of ``quietgrad.integrations.opacus`` it runs there.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.utils.batch_memory_manager import BatchMemoryManager
from quietgrad.integrations.opacus.validators import ModuleValidator


def made_images(count, seed):
    """[count, 3, 16, 16] images and their classes: shape times colour, 10 of them."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=draw)
    images = 0.3 * torch.randn(count, 3, 16, 16, generator=draw)
    for image, label in zip(images, labels.tolist()):
        x, y = torch.randint(0, 8, (2,), generator=draw).tolist()
        colour, shape = label % 3, label // 3
        if shape in (0, 3):
            image[colour, y : y + 8, x : x + 8] += 1.0
        if shape in (1, 3):
            image[colour, y + 3 : y + 5, :] += 1.0
        if shape in (2, 3):
            image[colour, :, x + 3 : x + 5] += 1.0
    return TensorDataset(images, labels)


def convnet(num_classes):
    def block(inputs, outputs):
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]

    layers = [*block(3, 16), *block(16, 32), *block(32, 32)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 2 * 2, num_classes))


def accuracy(predictions, labels):
    return (predictions == labels).float().mean().item()


def train(args, model, loader, optimizer, privacy_engine, epoch):
    model.train()
    criterion = nn.CrossEntropyLoss()
    with BatchMemoryManager(
        data_loader=loader,
        max_physical_batch_size=args.max_physical_batch_size,
        optimizer=optimizer,
    ) as parts:
        for images, target in parts:
            output = model(images)
            loss = criterion(output, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: epsilon {privacy_engine.get_epsilon(args.delta)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--max-physical-batch-size", type=int, default=64)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    size = 4000
    if args.smoke:
        args.epochs, size = 1, 400
    torch.manual_seed(0)
    train_loader = DataLoader(made_images(size, 0), batch_size=args.batch_size)
    test_loader = DataLoader(made_images(500, 1), batch_size=100)

    model = ModuleValidator.fix(convnet(10))
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    privacy_engine = PrivacyEngine(accountant="rdp")
    model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        epochs=args.epochs,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        max_grad_norm=1.0,
    )
    print(f"sigma {optimizer.noise_multiplier:.3f}")
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, privacy_engine, epoch)
        scheduler.step()
        model.eval()
        with torch.no_grad():
            found = [accuracy(model(x).argmax(dim=1), y) for x, y in test_loader]
        print(f"test accuracy {sum(found) / len(found):.3f}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        privacy_engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
        privacy_engine_again = PrivacyEngine(accountant="rdp")
        privacy_engine_again.load_checkpoint(path=path, module=model, optimizer=optimizer)
        print(f"loaded: epsilon {privacy_engine_again.get_epsilon(args.delta)}")


if __name__ == "__main__":
    main()
