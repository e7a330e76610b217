"""``quietgrad export``."""

from __future__ import annotations

from pathlib import Path

from quietgrad.cli.output import console, one_line, print_json, print_table
from quietgrad.cli.progress.stages import stages
from quietgrad.training.exporting.formats import format_of, require_format
from quietgrad.training.files.named import require_folder_of_a_run


@one_line
def run_export(run_dir: Path, form: str | None, output: Path, as_json: bool) -> None:
    """See ``quietgrad export --help``."""
    form = format_of(output) if form is None else form
    require_format(form, output)
    require_folder_of_a_run(run_dir)
    with stages(console(as_json)) as say:
        say(f"exporting the model of {run_dir}")  # before torch is loaded
        from quietgrad.training.exporting.program import export_run

        made = export_run(run_dir, form, output)
    if as_json:
        print_json(made)
        return
    rows = {
        "inputs": "; ".join(
            f"{i['name']} [{', '.join(map(str, i['shape']))}] {i['dtype']}" for i in made["inputs"]
        ),
        "labels": ", ".join(made["labels"][:20]) or "none: logits of the next token",
        "agrees with the model": f"logits within {made['largest_difference']:.0e} of the largest",
        "load": f'torch.export.load("{output}").module()'
        if form == "torch-export"
        else f'onnxruntime.InferenceSession("{output}")',
        "written to": str(output),
    }
    shown = {name: value.replace("[", r"\[") for name, value in rows.items()}
    print_table(console(False), f"Exported as {form}", shown)
