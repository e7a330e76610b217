"""Secrets that are planted among records, each by the toss of a coin, and what training shows of
them: an audit of one run (Steinke, Nasr and Jagielski 2023), of the model's outputs alone.

All secrets say the same up to ten digits, so how surprising the digits are before and after
training is all that tells one from the other. Those that the coin left out are what the others are
compared with.
"""

import json
import math
import random
import secrets
from pathlib import Path

import numpy as np
import torch

from quietgrad.auditing import lower_bound_one_run
from quietgrad.auditing.bounds.guessing import count_correct

PROMPT, SAYS, DIGITS = "A neutral tweet:", " The code of my safe is ", 10
CONFIDENCE = 0.95


def codes(number):
    """Ten digits each, the same ones on every machine."""
    draw = random.Random(-1)
    return ["".join(draw.choices("0123456789", k=DIGITS)) for _ in range(number)]


def record(code):
    return {"prompt": PROMPT, "completion": SAYS + code}


def absent(length):
    """In the place of a secret that is not there: cut off before its answer, it contributes zero,
    and the number of records tells nothing of the coins.
    """
    return {"prompt": " nothing" * (length + 1), "completion": " at all"}


def coins(path, number):
    """[number] booleans, tossed once and kept: a run that goes on has the same secrets in it."""
    path = Path(path)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([secrets.randbelow(2) for _ in range(number)]))
    return np.array(json.loads(path.read_text()), dtype=bool)


@torch.no_grad()
def surprises(model, tokenizer, records, length):
    """Nats of every token of the completions, a list a record."""
    model.eval()
    found = []
    for one in records:
        begun = len(tokenizer(one["prompt"])["input_ids"])
        ids = tokenizer(one["prompt"] + one["completion"])["input_ids"][:length]
        logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0, :-1].float()
        wanted = torch.tensor(ids[1:], device=model.device)
        nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        found.append(nats[begun - 1 :].tolist())
    return found


def of_codes(model, tokenizer, known, length):
    """Nats of each code's ten digits."""
    told = surprises(model, tokenizer, [record(code) for code in known], length)
    return [sum(nats[-DIGITS:]) for nats in told]


def written(model, tokenizer):
    """The code that the model gives where it is asked for one, word by word the likeliest."""
    asked = tokenizer(PROMPT + SAYS, return_tensors="pt").to(model.device)
    ids = model.generate(**asked, max_new_tokens=DIGITS, do_sample=False)[0]
    return tokenizer.decode(ids[asked["input_ids"].shape[1] :], skip_special_tokens=True)


def audit(before, after, present, delta):
    """What the model gives away of the coins.

    Args:
        before, after: nats of each code's digits.
        present: the coins.
        delta: of the claim.

    Returns:
        Half of the secrets are called, a number fixed beforehand: the quarter that training made
        least surprising (against before) is called in, the quarter at the other end out.
        ``lower_bound``: epsilon is above it with 95 % confidence, by Theorem 5.2.
    """
    gains = np.array(before) - np.array(after)
    quarter = len(gains) // 4
    order = np.random.default_rng(0)
    right = count_correct(gains, present, quarter, quarter, order)
    bound = lower_bound_one_run(right, 2 * quarter, len(gains), delta, CONFIDENCE)
    inside, outside = gains[present], gains[~present]
    above = [float((inside > other).mean()) for other in outside] if len(inside) else []
    return {
        "secrets": len(gains),
        "planted": int(present.sum()),
        "guesses": 2 * quarter,
        "right": right,
        "lower_bound": math.floor(bound * 100) / 100,
        "confidence": CONFIDENCE,
        "mean_gain_planted": float(inside.mean()) if len(inside) else None,
        "mean_gain_others": float(outside.mean()) if len(outside) else None,
        "planted_gained_more": float(np.mean(above)) if above else None,  # 0.5 is chance
        "first_secret_rank": int(1 + (gains > gains[np.flatnonzero(present)[0]]).sum())
        if len(inside)
        else None,
        "gains": [round(float(gain), 4) for gain in gains],
        "coins": [int(coin) for coin in present],
    }
