"""Commands that name their files by themselves: no picture, spectrum or weights of somebody else's
are written over, and a command that runs again writes its own anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file

from quietgrad.report.png import FIGURE_MARKS, require_figure_place, save_figure


def somebody_elses(path: Path) -> bytes:
    """What matplotlib makes for a notebook."""
    figure = Figure(figsize=(1, 1))
    figure.savefig(path)
    return path.read_bytes()


def test_a_figure_is_written_over_by_its_own_kind_alone(tmp_path: Path) -> None:
    place = tmp_path / "a.png"
    require_figure_place(place, "--figure")
    for _ in range(2):
        save_figure(Figure(figsize=(1, 1)), place, 50)
        require_figure_place(place, "--figure")
    before = somebody_elses(place)
    with pytest.raises(
        ValueError, match=r"--figure='.*a\.png' is there already, and quietgrad did"
    ):
        require_figure_place(place, "--figure")
    assert place.read_bytes() == before and FIGURE_MARKS[0].encode() not in before


@pytest.mark.parametrize("command", ["audit", "plan"])
def test_a_picture_stays(
    quietgrad: Any, settings: dict[str, Any], write_config: Any, tmp_path: Path, command: str
) -> None:
    banded = {"noise.method": "banded", "noise.bands": "auto"}
    config = write_config(settings | {"training.steps": 4} | banded)
    before = somebody_elses(tmp_path / "mine.png")
    code, _, err = quietgrad(command, config, "--figure", tmp_path / "mine.png")
    assert code == 2 and "quietgrad did not write it; name another file" in err
    assert (tmp_path / "mine.png").read_bytes() == before


def test_an_audit_draws_its_own_figure_anew(
    quietgrad: Any, settings: dict[str, Any], write_config: Any, tmp_path: Path
) -> None:
    config = write_config(settings | {"model.tune": "head", "training.steps": 4})
    for _ in range(2):
        code, _, err = quietgrad("audit", config, "--canaries", 16, "--figure", tmp_path / "a.png")
        assert code == 0, err


@pytest.mark.parametrize("name", ["s.png", "s.npz", "w.safetensors"])
def test_a_spectrum_writes_over_nothing(
    quietgrad: Any, settings: dict[str, Any], write_config: Any, tmp_path: Path, name: str
) -> None:
    values = settings | {
        "model.name": "cnn:groupnorm",
        "spectrum.output": str(tmp_path / "s.npz"),
        "spectrum.weights_output": str(tmp_path / "w.safetensors"),
    }
    place = tmp_path / name
    if name == "s.png":
        somebody_elses(place)
    elif name == "s.npz":
        place.write_bytes(b"an archive of measurements")
    else:
        save_file({"weight": torch.ones(2)}, str(place))
    before = place.read_bytes()
    code, _, err = quietgrad("spectrum", write_config(values))
    assert code == 2 and "quietgrad did not write it" in err and str(place) in err
    assert place.read_bytes() == before
