"""Every block of code on every page is run by a test, or says by its kind that it is not code."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_blocks import ROOT, blocks_of, commands

PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
# Shown, not run: output, forms of commands (below), and commands that install packages.
SHOWN = {"text", "console"}
RUN = {"python", "sh", "toml"}
# Page -> tests that run its blocks, one after the other.
RUN_BY = {
    "README.md": "test_readme.py training/test_pages_of_commands.py",
    "docs/adaptive_clipping.md": "test_side_pages.py",
    "docs/auditing.md": "training/test_pages_of_commands.py test_pages_of_code.py",
    "docs/command_line.md": "training/test_command_line_page.py training/test_pages_of_commands.py",
    "docs/defaults.md": "training/test_pages_of_commands.py",
    "docs/demo.md": "training/test_pages_of_commands.py",
    "docs/denoising.md": "test_pages_of_code.py",
    "docs/errata.md": "test_pages_of_code.py",
    "docs/follow_one_step.md": "test_pages_of_code.py",
    "docs/from_opacus.md": "integrations/test_opacus_examples.py",
    "docs/fully_sharded.md": "distributed/test_pages_of_processes.py",
    "docs/gallery.md": "integrations/test_gallery.py",
    "docs/howto/choose.md": "training/test_guide_pages.py",
    "docs/howto/images.md": "training/test_guide_pages.py",
    "docs/howto/layer_rule.md": "training/test_guide_pages.py",
    "docs/howto/long_documents.md": "training/test_guide_pages.py",
    "docs/howto/noise_mechanism.md": "training/test_guide_pages.py",
    "docs/howto/quantized.md": "integrations/test_quantized_models.py",
    "docs/howto/step_rule.md": "training/test_guide_pages.py",
    "docs/lightning.md": "integrations/test_lightning_page.py",
    "docs/loops.md": "loading/test_loops.py",
    "docs/many_devices.md": "scaling/test_plan_for_devices.py",
    "docs/many_processes.md": "distributed/test_pages_of_processes.py",
    "docs/noisecurve.md": "training/test_pages_of_commands.py test_pages_of_code.py",
    "docs/review.md": "test_docs_site.py",
    "docs/schedules.md": "schedules/test_page.py training/test_pages_of_commands.py",
    "docs/sharded_checkpoints.md": "distributed/test_pages_of_processes.py",
    "docs/tensor_parallel.md": "distributed/test_pages_of_processes.py",
    "docs/trainer.md": "integrations/test_transformers_page.py",
    "docs/training_loss.md": "test_side_pages.py",
    "docs/tuning.md": "training/test_tuning_page.py",
    "docs/tutorial/first.md": "test_docs_site.py",
    "docs/tutorial/language_model.md": "training/test_guide_pages.py",
    "docs/tutorial/table.md": "training/test_guide_pages.py",
    "docs/users.md": "test_users_page.py",
}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    kinds = {block.kind for block in blocks_of(page)}
    assert kinds <= RUN | SHOWN, (
        f"{page} has blocks of {sorted(kinds - RUN - SHOWN)}: python, sh and toml are run; "
        "text is what is printed; console installs"
    )
    for block in blocks_of(page, "console"):
        assert all("install" in line for line in commands(block.text)), (page, block.text)


def test_every_page_with_code_has_a_test_that_runs_it() -> None:
    with_code = [page for page in PAGES if any(b.kind in RUN for b in blocks_of(page))]
    assert with_code == sorted(RUN_BY)


@pytest.mark.parametrize("page", RUN_BY)
def test_the_tests_of_a_page_name_it(page: str) -> None:
    """And take its blocks of each kind: a page of which one kind is run is not run."""
    texts = [(ROOT / "tests" / name).read_text(encoding="utf-8") for name in RUN_BY[page].split()]
    name, folder = Path(page).name, Path(page).parent.name
    for text in texts:
        assert name in text or (folder == "howto" and '"howto"' in text), page
    for kind in {block.kind for block in blocks_of(page)} & RUN:
        assert any(kind in text for text in texts), (page, kind)


def test_indented_text_hides_no_command() -> None:
    """A block by indentation alone would be run by nobody."""
    for page in PAGES:
        outside, inside = [], False
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
            inside ^= line.lstrip().startswith("```")
            if not inside:
                outside.append(line)
        starts = ("    quietgrad ", "    python ", "    torchrun ", "    pip ", "    import ")
        assert [line for line in outside if line.startswith(starts)] == [], page
