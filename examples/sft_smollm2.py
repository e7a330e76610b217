"""SmolLM2-135M learns to write tweets by PrivateSFTTrainer, and secrets that some of the records
hold are looked for in it afterwards. See docs/notes/sft_smollm2.md.

    python examples/sft_smollm2.py --output runs/sft                   (an hour on one core)
    python examples/sft_smollm2.py --output runs/control --noise 0.02  (what the audit can see)

A run that was stopped goes on where it was by the same line.
"""

import argparse
import json
import math
import platform
import random
import tempfile
import time
from pathlib import Path

import peft
import planted
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig

from quietgrad import PrivacyConfig
from quietgrad.integrations.transformers import PrivateSFTTrainer
from quietgrad.ledger import holds_records
from quietgrad.training.tasks.columns import read_columns
from quietgrad.training.tasks.text.models import generator_path, quiet_loading

LENGTH = 28  # tokens of a record, the longest that are taken
FEELINGS = ("positive", "negative", "neutral")


def tweets(tokenizer, number, public, seed=0):
    """Training records, and others that are declared public; short ones, whole."""
    columns = read_columns("packaged:tweets")
    rows = sorted(set(zip(columns["text"], columns["sentiment"], strict=True)))
    random.Random(seed).shuffle(rows)
    made = []
    for text, feeling in rows:
        one = {"prompt": f"A {feeling} tweet:", "completion": f" {text}"}
        if len(tokenizer(one["prompt"] + one["completion"])["input_ids"]) < LENGTH:
            made.append(one)
        if len(made) == number + public:
            break
    return made[public:], made[:public]


def perplexity(model, tokenizer, records):
    """Of the answers, a token counting once."""
    told = planted.surprises(model, tokenizer, records, LENGTH)
    return math.exp(sum(map(sum, told)) / sum(map(len, told)))


def samples(model, tokenizer):
    torch.manual_seed(0)
    written = []
    for feeling in FEELINGS:
        asked = tokenizer(f"A {feeling} tweet:", return_tensors="pt").to(model.device)
        ids = model.generate(**asked, max_new_tokens=24, do_sample=True, top_p=0.9)
        written.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    return written


class Course(TrainerCallback):
    """Perplexity of public records by step, in a file: a run that goes on adds to it."""

    def __init__(self, path, every, measure):
        self.path, self.every, self.measure = path, every, measure

    def known(self):
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.path.write_text(
                json.dumps(self.known() | {str(state.global_step): self.measure(model)})
            )


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", help="a folder that is gone on with; none: kept nowhere")
    parser.add_argument("--records", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=32, help="records a step, on average")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--noise", type=float, help="noise multiplier, in place of epsilon")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--public", type=int, default=100, help="tweets for perplexity")
    parser.add_argument("--secrets", type=int, default=100, help="half of them are planted")
    parser.add_argument("--smoke", action="store_true", help="two minutes")
    args = parser.parse_args()
    if args.smoke:
        args.records, args.steps, args.batch, args.public, args.secrets = 24, 2, 4, 4, 8
    return args


def load():
    path, where = generator_path("packaged:smollm2")
    with quiet_loading("packaged:smollm2"):
        tokenizer = AutoTokenizer.from_pretrained(path, **where)
        model = AutoModelForCausalLM.from_pretrained(path, **where, dtype=torch.float32)
    # Expanded to ordinary weights, but still marked as quantized, which Trainer refuses to train.
    model.is_quantized = False
    return model, tokenizer


def train(args, folder):
    """One run, or the rest of one: what came out."""
    begun = time.monotonic()
    model, tokenizer = load()
    private, public = tweets(tokenizer, args.records - args.secrets, args.public)
    present = planted.coins(folder / "coins.json", args.secrets)
    known = planted.codes(args.secrets)
    absent = planted.absent(LENGTH)
    private += [planted.record(code) if here else absent for code, here in zip(known, present)]
    before = planted.of_codes(model, tokenizer, known, LENGTH)
    course = Course(
        folder / "perplexity.json",
        max(1, args.steps // 8),
        lambda model: perplexity(model, tokenizer, public),
    )
    start = perplexity(model, tokenizer, public)
    wanted = {"target_epsilon": args.epsilon} if args.noise is None else {}
    if args.noise is not None:
        wanted = {"noise_multiplier": args.noise}
    trainer = PrivateSFTTrainer(
        model=model,
        args=SFTConfig(
            str(folder / "run"),
            per_device_train_batch_size=16,
            max_length=LENGTH,
            learning_rate=args.rate,
            lr_scheduler_type="cosine",
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=None,
            report_to=[],
            save_strategy="steps",
            save_steps=20,
            save_total_limit=2,
            logging_steps=20,
        ),
        train_dataset=Dataset.from_list(private),
        eval_dataset=Dataset.from_list(public),  # the guard looks at these
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
        callbacks=[course],
        privacy=PrivacyConfig(expected_batch_size=args.batch, steps=args.steps, **wanted),
    )
    trainer.train(resume_from_checkpoint=holds_records(folder / "run" / "ledger.jsonl"))
    model = trainer.model
    model.eval()
    after = planted.of_codes(model, tokenizer, known, LENGTH)
    plan = trainer.plan
    return {
        "settings": {k: v for k, v in vars(args).items() if k not in ("output", "smoke")},
        "epsilon": math.ceil(trainer.epsilon() * 100) / 100,
        "delta": plan.delta,
        "noise_multiplier": plan.event.noise_multiplier,
        "perplexity": {"0": start, **course.known()},
        "perplexity_after": perplexity(model, tokenizer, public),
        "samples": samples(model, tokenizer),
        "code_written": planted.written(model, tokenizer),
        "code_is_planted": planted.written(model, tokenizer) in known,
        "audit": planted.audit(before, after, present, plan.delta),
        "minutes_of_the_last_session": (time.monotonic() - begun) / 60,
        "environment": {
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            **{module.__name__: module.__version__ for module in (torch, transformers, trl, peft)},
        },
    }


def tell(result):
    seen = result["audit"]
    print(f"epsilon {result['epsilon']:.2f} at delta {result['delta']:.1e}, an upper bound")
    print(
        f"perplexity of public tweets: {result['perplexity']['0']:.1f} before, "
        f"{result['perplexity_after']:.1f} after"
    )
    print(
        f"audit: {seen['planted']} of {seen['secrets']} secrets were planted; {seen['right']} of "
        f"{seen['guesses']} guesses at which are right; epsilon is above "
        f"{seen['lower_bound']:.2f}, by this attack, with confidence {seen['confidence']}"
    )
    if seen["first_secret_rank"] is not None:
        print(
            f"the first planted secret is number {seen['first_secret_rank']} of "
            f"{seen['secrets']} by what training gained on it"
        )
    asked, told = result["code_written"], result["code_is_planted"]
    print(f"asked for the code, the model writes {asked!r}, {'a' if told else 'no'} secret")
    for sample in result["samples"]:
        print(f"a sample: {sample!r}")


def main():
    args = options()
    with tempfile.TemporaryDirectory() as passing:
        folder = Path(args.output or passing)
        ended = folder / "result.json"
        if not ended.exists():
            result = train(args, folder)
            ended.write_text(json.dumps(result, indent=2) + "\n")
        tell(json.loads(ended.read_text()))


if __name__ == "__main__":
    main()
