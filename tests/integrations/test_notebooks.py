"""Notebooks are the gallery's scripts in cells: nothing is lost on the way, and they run."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "gallery").glob("*.py"))


def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def rules_are_put_back() -> Iterator[None]:
    """Of layers that a notebook brings."""
    from quietgrad.clipping.norms.rules import registry

    before = dict(registry._RULES)
    yield
    registry._RULES.clear()
    registry._RULES.update(before)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_cells_are_the_script_and_nothing_else(path: Path, tmp_path: Path) -> None:
    told, (stand, *cells) = maker().cells_of(path, tmp_path, smoke=True)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    main: Any = tree.body[-2]
    written = [*tree.body[1:-2], *main.body]
    shown = [ast.parse(cell).body for cell in cells]  # each is whole by itself
    assert [ast.dump(s) for body in shown for s in body] == [ast.dump(s) for s in written]
    assert told == ast.get_docstring(tree) and '"--smoke"' in stand
    comments = r"(?m)(?:^|\s{2})# .*$"
    assert re.findall(comments, "\n".join(cells)) == [
        found.strip("\n") if found.startswith("  ") else found.strip()
        for found in re.findall(comments, path.read_text(encoding="utf-8"))
    ]


def test_a_script_of_another_form_is_refused(tmp_path: Path) -> None:
    flat = tmp_path / "flat.py"
    flat.write_text('"""Told."""\n\nx = 1\nprint(x)\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"flat\.py: use a docstring"):
        maker().cells_of(flat, tmp_path, smoke=False)


def test_a_notebook_is_one_by_the_formats_schema(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    module = maker()
    made = [module.write_notebook(path, tmp_path) for path in SCRIPTS]
    for path, target in zip(SCRIPTS, made, strict=True):
        found = nbformat.read(target, as_version=4)
        assert target.stem == path.stem and found.cells[0].cell_type == "markdown"
        assert "--smoke" not in found.cells[1].source  # of its full size
    written = made[0].read_bytes()  # where it stands is in it: once more into the same folder
    assert module.write_notebook(SCRIPTS[0], tmp_path).read_bytes() == written


@pytest.mark.slow("the gallery once more, a few seconds each")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_where_it_stands(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cell by cell in one namespace, as a kernel does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kernel"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    kernel = ModuleType("kernel")
    monkeypatch.setitem(sys.modules, "kernel", kernel)
    for number, cell in enumerate(maker().cells_of(path, tmp_path, smoke=True)[1]):
        exec(compile(cell, f"{path.stem}, cell {number}", "exec"), kernel.__dict__)
    spent = [float(number) for number in re.findall(r"epsilon (\d+\.\d+)", capsys.readouterr().out)]
    assert spent and 0 < max(spent) <= 8.0
