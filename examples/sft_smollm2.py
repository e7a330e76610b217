"""SmolLM2-135M learns to write tweets by PrivateSFTTrainer, and a secret that one of them holds is
looked for in it afterwards. See docs/notes/sft_smollm2.md.
"""

import argparse
import math
import random
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from quietgrad import PrivacyConfig
from quietgrad.integrations.transformers import PrivateSFTTrainer
from quietgrad.training.tasks.columns import read_columns
from quietgrad.training.tasks.text.models import generator_path, quiet_loading

LENGTH = 48  # tokens of a record


def tweets(number, public, seed=0):
    """Training records, and others that are declared public."""
    columns = read_columns("packaged:tweets")
    rows = sorted(set(zip(columns["text"], columns["sentiment"], strict=True)))
    random.Random(seed).shuffle(rows)
    made = [
        {"prompt": f"A {feeling} tweet:", "completion": f" {text}"}
        for text, feeling in rows[: number + public]
    ]
    return made[public:], made[:public]


def canary(seed):
    """A sentence of which nobody knows the ten digits."""
    digits = " ".join(random.Random(seed).choices("0123456789", k=10))
    return {"prompt": "A neutral tweet:", "completion": f" The code of my safe is {digits}"}


@torch.no_grad()
def surprise(model, tokenizer, records):
    """Nats and tokens of the completions, one pair a record."""
    model.eval()
    found = []
    for record in records:
        prompt = tokenizer(record["prompt"])["input_ids"]
        ids = tokenizer(record["prompt"] + record["completion"])["input_ids"][:LENGTH]
        logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0, :-1].float()
        wanted = torch.tensor(ids[1:], device=model.device)
        nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        answer = nats[len(prompt) - 1 :]
        found.append((float(answer.sum()), len(answer)))
    return found


def perplexity(model, tokenizer, records):
    nats, tokens = map(sum, zip(*surprise(model, tokenizer, records), strict=True))
    return math.exp(nats / tokens)


def sample(model, tokenizer):
    asked = tokenizer("A positive tweet:", return_tensors="pt").to(model.device)
    torch.manual_seed(0)
    written = model.generate(**asked, max_new_tokens=30, do_sample=True, top_k=50)
    return tokenizer.decode(written[0], skip_special_tokens=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=600)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=48, help="records a step, on average")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--public", type=int, default=100, help="tweets for perplexity")
    parser.add_argument("--canaries", type=int, default=99, help="held out, to rank the one among")
    parser.add_argument("--smoke", action="store_true", help="two minutes")
    args = parser.parse_args()
    if args.smoke:
        args.records, args.steps, args.batch, args.public, args.canaries = 20, 2, 4, 4, 4

    path, options = generator_path("packaged:smollm2")
    with quiet_loading("packaged:smollm2"):
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        model = AutoModelForCausalLM.from_pretrained(path, **options, dtype=torch.float32)
    # Expanded to ordinary weights, but still marked as quantized, which Trainer refuses to train.
    model.is_quantized = False
    private, public = tweets(args.records - 1, args.public)
    planted, held_out = canary(-1), [canary(i) for i in range(args.canaries)]
    before = perplexity(model, tokenizer, public)
    codes = [nats for nats, _ in surprise(model, tokenizer, [planted, *held_out])]

    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateSFTTrainer(
            model=model,
            args=SFTConfig(
                folder,
                per_device_train_batch_size=8,
                max_length=LENGTH,
                learning_rate=2e-3,
                lr_scheduler_type="cosine",
                bf16=False,
                gradient_checkpointing=None,
                report_to=[],
                save_strategy="no",
                logging_steps=4,
            ),
            train_dataset=Dataset.from_list([*private, planted]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
            privacy=PrivacyConfig(
                target_epsilon=args.epsilon, expected_batch_size=args.batch, steps=args.steps
            ),
        )
        trainer.train()
        model, epsilon, delta = trainer.model, trainer.epsilon(), trainer.plan.delta

    after = perplexity(model, tokenizer, public)
    learnt = [b - a for b, (a, _) in zip(codes, surprise(model, tokenizer, [planted, *held_out]))]
    rank = 1 + sum(other > learnt[0] for other in learnt[1:])
    print(f"epsilon {math.ceil(epsilon * 100) / 100:.2f} at delta {delta:.1e}")
    print(f"perplexity of public tweets: {before:.1f} before, {after:.1f} after")
    print(f"the planted code is number {rank} of {len(learnt)} by what training gained on it")
    print(f"a sample: {sample(model, tokenizer)!r}")


if __name__ == "__main__":
    main()
