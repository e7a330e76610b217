"""``noise.source = "secure"`` from the command line: what is printed, what the ledger says, and
what happens without the package.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from quietgrad.ledger import read_ledger

pytest.importorskip("cryptography")


@pytest.mark.parametrize("method", ["independent", "banded"])
def test_a_run_with_secure_noise_says_so_and_what_it_costs(
    quietgrad, settings, write_config, method: str
) -> None:
    values = settings | {
        "noise.source": "secure",
        "noise.method": method,
        **({"noise.bands": 2} if method == "banded" else {}),
        "data.test_fraction": 0.3,
    }
    code, out, err = quietgrad("train", write_config(values), "--json")
    assert code == 0, err
    assert json.loads(out)["epsilon"] <= 4.0
    assert "noise source" in err and "AES-256" in err
    header = read_ledger(Path(settings["training.run_dir"])).header
    assert header["noise_source"] == "secure"


def test_without_the_package_nothing_starts(quietgrad, settings, write_config, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "cryptography" else find(name, *a),
    )
    code, _, err = quietgrad("train", write_config(settings | {"noise.source": "secure"}))
    assert code != 0 and "quietgrad[secure]" in err
    assert not Path(settings["training.run_dir"]).exists()


def test_an_unknown_source_names_the_key(quietgrad, settings, write_config) -> None:
    code, _, err = quietgrad("plan", write_config(settings | {"noise.source": "hardware"}))
    assert code != 0 and "noise.source" in err
