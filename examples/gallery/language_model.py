"""A small Llama with LoRA adapters learns to spell names; a record is a name."""

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from quietgrad import PrivacyConfig

sys.path.append(str(Path(__file__).parents[1]))
import made


def per_example_loss(model, batch):
    """The mean over a name's own letters."""
    ids = batch[0]
    mask = (ids[:, 1:] > 0).float()
    logits = model(input_ids=ids, attention_mask=(ids > 0).long()).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * mask).sum(1) / mask.sum(1).clamp(min=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    size, steps = (200, 3) if parser.parse_args().smoke else (4000, 200)
    torch.manual_seed(0)
    train, public = made.names(size, 0), made.padded(made.names(200, 1))
    config = LlamaConfig(
        vocab_size=27, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=0,
    )  # fmt: skip
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(LlamaForCausalLM(config), lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    plan = PrivacyConfig(target_epsilon=8.0, expected_batch_size=size // 10, steps=steps).build(
        len(train)
    )
    with plan.start() as run:
        for batch in run.loader(train, collate_fn=made.padded, steps=plan.steps):
            run.backward(model, per_example_loss, batch)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        print(f"public perplexity {math.exp(per_example_loss(model, public).mean()):.2f}, of 27")
    print(f"epsilon {run.epsilon():.3f} at delta {plan.delta:.1e}")


if __name__ == "__main__":
    main()
