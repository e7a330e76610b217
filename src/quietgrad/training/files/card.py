"""The README.md beside saved weights: what the model is, how it loads without this library, and
what its privacy guarantee says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from quietgrad.accounting.rounding import round_down, round_up, round_up_to
from quietgrad.events import RELATIONS, unit_of
from quietgrad.report.run.statement import AT_RANDOM
from quietgrad.report.words import what_stands_for_a_user
from quietgrad.training.files.provenance import Record

CARD = "README.md"
TITLE = "# Trained with differential privacy"
# Around what this library says in a card of another one, so that it can be said anew.
BEGIN, END = "<!-- privacy, by quietgrad -->", "<!-- end of privacy, by quietgrad -->"
BLANK = "# Model Card for Model ID"  # how peft's template begins, which says nothing below it
HOW = {
    "lora": "LoRA adapters and the head were trained, all else is the base model's",
    "full": "the model's weights were fine-tuned",
    "head": "the head alone was trained",
}
SHOWN_LABELS = 20
# Of a model that no other library has a class for.
BY_TORCH_ALONE = (
    "Without Quietgrad: what `quietgrad export RUN_DIR -o model.pt2` writes is called by torch "
    "alone, or `-o model.onnx` by an ONNX runtime; label names are inside."
)


def write_card(
    folder: Path,
    record: Record,
    base: str,
    tune: str,
    labels: Sequence[str],
    loading: str,
    library: str = "transformers",
    weights: str = "",
) -> None:
    """Writes ``README.md``, over one that another library put there.

    Args:
        folder: of the weights.
        record: what they were trained on (``provenance``).
        base: what training started from: a hub name, one of this library's models, or a folder, of
            which only the last name is told.
        tune: "lora", "full" or "head".
        labels: names; none for a language model.
        loading: how the folder is loaded, in Markdown.
        library: that loads it.
        weights: a file that one of this library's models began with; without one, some of them
            begin at random, and no base model has seen anything.
    """
    local = Path(base).exists()
    shown = Path(base).name if local else base
    head = ["---", f"library_name: {library}", "tags:", "- differential-privacy", "- quietgrad"]
    if not local and ":" not in base:
        head.append(f"base_model: {base}")
    title = TITLE if record["private"] else "# Trained without privacy"
    at_random = base.startswith(AT_RANDOM) and not weights
    trained = HOW.get(tune, tune)
    if tune == "lora" and not labels:
        trained = "LoRA adapters were trained, all else is the base model's"
    few = ", ".join(f"`{name}`" for name in labels[:SHOWN_LABELS])
    more = f" and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
    lines = [
        *head,
        "---",
        title,
        "",
        f"Model: `{shown}`, which begins at random; {trained}."
        if at_random
        else f"Base model: `{shown}`; {trained}.",
        *([f"Labels: {few}{more}."] if labels else []),
        "",
        "## Loading",
        "",
        loading.strip(),
        "",
        "## Privacy",
        "",
        *privacy_lines(record, pretrained=not at_random),
        "",
    ]
    (folder / CARD).write_text("\n".join(lines), encoding="utf-8")


def add_privacy(card: Path, record: Record) -> None:
    """Puts the guarantee at the end of a card that another library wrote, in place of what an
    earlier call put there. peft's template, which says nothing, gives way to it.

    Args:
        card: a README.md that is there.
        record: what the weights were trained on (``provenance``).
    """
    before, _, rest = card.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2].strip()
    if BLANK in before:
        before = before.partition(BLANK)[0] + TITLE
    parts = [before.rstrip(), "\n".join([BEGIN, "## Privacy", "", *privacy_lines(record), END])]
    card.write_text("\n\n".join(filter(None, [*parts, after])) + "\n", encoding="utf-8")


def is_blank(card: Path) -> bool:
    """Whether a file is a card that another library left without a word on what it describes, or
    one that this library has added to.
    """
    if not card.is_file():
        return False
    text = card.read_text(encoding="utf-8")
    return BLANK in text or BEGIN in text


def privacy_lines(record: Record, pretrained: bool = True) -> list[str]:
    """The guarantee in words, of public facts alone.

    Args:
        record: what the weights were trained on (``provenance``).
        pretrained: whether they began with those of a base model.
    """
    lines = [f"- Trained on: {json.dumps(record['data'], ensure_ascii=False)}."]
    if record["private"]:
        unit = unit_of(record["neighbouring"])
        lines += [
            f"- (epsilon, delta) = ({round_up(record['epsilon'], 4)}, "
            f"{round_up_to(record['delta'], 3)}), an upper bound over all {record['steps']} steps.",
            f"- Unit of privacy: one {unit} of the training data{what_stands_for_a_user(record)}. "
            f"Neighbouring data sets: {RELATIONS[record['neighbouring']]}.",
        ]
        if "noise_multiplier" in record:
            changes = "settings_change" in record
            least, most = ("at least ", "at most ") if changes else ("", "")
            noise = (round_down if changes else round_up)(record["noise_multiplier"], 4)
            lines.append(
                f"- Mechanism: gradients clipped per {unit}, Gaussian noise of multiplier {least}"
                f"{noise}, Poisson sampling at rate {most}"
                f"{round_up_to(record['sample_rate'], 6)}, {record['bands']} band"
                f"{'s of correlated noise' if record['bands'] > 1 else ' (independent noise)'}."
            )
        lines += [
            f"- Released beside the gradients, and accounted for with them: {side['name']}, noise "
            f"multiplier {round_up(side['noise_multiplier'], 4)}, every {side['every']} steps."
            for side in record.get("beside", ())
        ]
        if "settings_change" in record:
            lines.append(
                "- Noise, sampling rate or clipping norm change by a public schedule; the epsilon "
                "counts every step with its own."
            )
        other = "choices made by looking at several runs"
        if chosen := record.get("selection"):
            lines.append(
                f"- The best of a random number of runs ({chosen['distribution']}, "
                f"{chosen['mean_runs']:g} on average), each with one of {chosen['candidates']} "
                "settings drawn at random; the choice is part of the epsilon."
            )
            other = "further choices made by looking at other runs"
        lines.append(
            f"- Not covered: validation and test records, which were declared public; {other} on "
            "the same records, whose epsilons add"
            + (f"; a {unit} that the base model had already seen." if pretrained else ".")
        )
    else:
        lines.append("- No guarantee: this run had no privacy, so the weights hold its records.")
    if record["data_declared_public"]:
        lines.append("- The training records were declared public.")
    for earlier in record.get("started_from", ()):
        spent = (
            f"epsilon {round_up(earlier['epsilon'], 4)}, which adds for records of both"
            if earlier["private"]
            else "no privacy: no epsilon covers its records"
        )
        lines.append(f"- Started from a run on {json.dumps(earlier['data'])} with {spent}.")
    return [*lines, f"- Made by quietgrad {record['quietgrad']}."]
