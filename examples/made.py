"""Data that the examples make for themselves: small colour images, reviews, names, sentences."""

import random

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

GOOD = [
    "splendid",
    "moving",
    "bright",
    "clever",
    "tender",
    "funny",
    "superb",
    "honest",
    "warm",
    "gripping",
]
BAD = [
    "dull",
    "clumsy",
    "endless",
    "hollow",
    "noisy",
    "tired",
    "bland",
    "careless",
    "weak",
    "shallow",
]
OTHER = [
    "the",
    "film",
    "plot",
    "actor",
    "scene",
    "music",
    "camera",
    "story",
    "end",
    "hour",
    "this",
    "that",
    "was",
    "and",
]
WORDS = {word: i for i, word in enumerate(["<pad>", *GOOD, *BAD, *OTHER])}
SYLLABLES = {
    "east": ["ko", "shi", "ta", "na", "ka", "mu", "ra"],
    "north": ["bjorn", "sen", "gard", "sig", "run", "ulf", "hild"],
    "south": ["gio", "van", "ni", "lu", "ca", "elli", "rosa"],
    "west": ["mac", "lean", "o", "brien", "fitz", "ger", "ald"],
}


def images(count, seed):
    """[count, 3, 16, 16] coloured squares and bars on noise, and their classes: shape times colour,
    9 of them.
    """
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 9, (count,), generator=draw)
    made = 0.3 * torch.randn(count, 3, 16, 16, generator=draw)
    for image, label in zip(made, labels.tolist()):
        x, y = torch.randint(0, 8, (2,), generator=draw).tolist()
        colour, shape = label % 3, label // 3
        height, width = [(8, 8), (2, 16), (16, 2)][shape]
        image[colour, y : y + height, x : x + width] += 1.0
    return TensorDataset(made, labels)


def reviews(count, seed):
    """Words, mostly good or mostly bad ones, and which."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        label = draw.randrange(2)
        own, others = (GOOD, BAD) if label else (BAD, GOOD)
        words = draw.choices(OTHER, k=draw.randint(5, 30)) + draw.choices(own, k=4)
        words += draw.choices(others, k=2)
        draw.shuffle(words)
        made.append((torch.tensor([WORDS[word] for word in words]), label))
    return made


def names(count, seed):
    """Letters of a name, and its language."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        label = draw.randrange(len(SYLLABLES))
        name = draw.choices(list(SYLLABLES.values())[label], k=draw.randint(2, 4))
        made.append((torch.tensor([ord(letter) - 96 for letter in "".join(name)]), label))
    return made


def padded(records):
    """A collate function for reviews and names."""
    ids = pad_sequence([ids for ids, _ in records], batch_first=True)
    return ids, torch.tensor([label for _, label in records])


def sentences(count, seed, words=200, length=24):
    """Words, a part of them from one of two subjects, and which."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=draw)
    ids = torch.randint(100, words, (count, length), generator=draw)
    own = torch.randint(0, 50, (count, length), generator=draw) + 50 * labels[:, None]
    marked = torch.rand(count, length, generator=draw) < 0.3
    return TensorDataset(torch.where(marked, own, ids), labels)
