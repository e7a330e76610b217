"""A wrong key or value of a configuration is refused before torch is loaded, in the words of the
records that judge it afterwards.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quietgrad.comparing.early import require_comparison
from quietgrad.comparing.table import load_comparison
from quietgrad.records import described, hint_from, hints_of, plain
from quietgrad.training.settings.config import TABLES, load_config
from quietgrad.training.settings.overrides import OF_COMPARISONS, read_toml
from quietgrad.training.settings.reading import OF_TRAINING, Table, outlined
from quietgrad.training.sources.early import look_early

ROOT = Path(__file__).parents[2]
VALUES = ("zzz", "", "1", "auto", -1, 0, 1, 1.5, float("nan"), 10**400, True, [], ["a"], [1.0], {},
          {"a": 1}, {"a": "b"}, [{"a": 1}], None)  # fmt: skip
NO_HUB = ["model.name=packaged:minilm"]
COMPARED = """[comparison]
# more
[variants.baseline]
[data]
public = true
source = "people.csv"
[model]
name = "table:linear"
[training]
expected_batch_size = 20
steps = 5
"""


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("keys", ROOT / "scripts" / "keys.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_what_is_written_down_is_what_the_records_say() -> None:
    keys = script()
    for path, tables in keys.FILES.items():
        assert path.read_text(encoding="utf-8") == keys.text_of(tables), "run scripts/keys.py"
        require_outlined(outlined(path), tables)
    assert keys.FILES[OF_TRAINING] is TABLES


def require_outlined(known: Mapping[str, Table], tables: Mapping[str, Table]) -> None:
    assert list(known) == list(tables)
    for name, table in tables.items():
        assert known[name].key == table.key and list(known[name].kinds) == list(table.kinds)
        for word, kind in table.kinds.items():
            told, said = hints_of(known[name].kinds[word]), hints_of(kind)
            assert list(told) == list(said)
            for key, hint in said.items():
                assert plain(told[key]) == plain(hint) == plain(hint_from(plain(hint)))
                assert described(told[key]) == described(hint)


def judged(table: Table, name: str, values: dict[str, Any]) -> Any:
    """The values, or the text of the error."""
    try:
        return table.judged(name, values)[1]
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", TABLES)
def test_outlines_judge_as_the_records_do(name: str) -> None:
    known, table, refused = outlined()[name], TABLES[name], 0
    keys = [*table.keys(), "zzz"]
    for word in table.kinds:
        for key in keys:
            for value in VALUES:
                picked = {table.key: word} if table.key else {}
                given = picked | {key: value}
                found = judged(table, name, given)
                assert repr(judged(known, name, given)) == repr(found)
                refused += isinstance(found, str)
    assert refused > len(VALUES)


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("[trainning]\nsteps = 3\n", []),
        ("[training]\nstepps = 3\n", []),
        ("steps = 3\n", []),
        ("training = 3\n", []),
        ("[training]\nsteps = '3'\n", []),
        ("[training]\nsteps = 3\nepochs = 3\n", []),
        ("[clipping]\nestimator = 'gost'\n", []),
        ("[noise]\nmethod = 'bandit'\n", []),
        ("[noise]\nmethod = 'independent'\nbands = 4\n", []),
        ("[schedules]\nphases = [{steps = 'a'}]\n", ["training.steps=[3]"]),
        ("", ["trainning.steps=3"]),
        ("", ["stepps=3"]),
        ("", ["source=some-org/some-data:en"]),  # of which table?
        ("", ["steps"]),
        ("", ["steps=3", "steps=4"]),
        ("", ["steps=3", "epochs=4"]),
        ("", ["training.seed=true"]),
        ("training = 3\n", ["training.steps=3"]),
    ],
)
def test_the_error_is_the_one_that_reading_gives(
    text: str, overrides: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    errors = []
    for read in (load_config, look_early):
        with pytest.raises(ValueError) as error:
            read(path, overrides)  # type: ignore[operator]
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("comparison", "rest"),
    [
        ("", "[variants.odd]\nmodel.lora_rank = 4\n"),
        ("", "[variants.odd]\nprivacy.target_epsilon = 4.0\n"),
        ("", "[variants.odd]\nmethod = 'none'\n"),
        ("", "[variants.odd]\ndenoising.metod = 'none'\n"),
        ("", "[variants.odd]\ndenoising.method = 'nome'\n"),
        ("", "[variants.odd]\ntraining.steps = 'a'\n"),
        ("", "[trainning]\nsteps = 3\n"),
        ("", "[clipping]\nestimator = 'gost'\n"),
        ("speed = 3\n", ""),
        ("seeds = 'a'\n", ""),
        ("learning_rates = [0.0]\n", ""),
        ("reference = 'plan'\n", ""),
        ("", "[accounted]\nmeen = 3.0\n"),
        ("", "[accounted]\nmean = 0.0\n"),
        ("", "[search]\ntrial = 3\n"),
        ("", "[search]\ntrials = 3\n[search.ranges.'optimizer.learning_rate']\nlow = 'a'\n"),
        ("", "[search]\ntrials = 3\n[search.ranges.'optimizer.learning_rate']\nlo = 1\n"),
    ],
)
def test_the_error_of_a_comparison_is_the_one_that_reading_gives(
    comparison: str, rest: str, tmp_path: Path
) -> None:
    path = tmp_path / "compared.toml"
    path.write_text(COMPARED.replace("# more\n", comparison) + rest, encoding="utf-8")
    errors = []
    for read in (load_comparison, require_comparison):
        with pytest.raises(ValueError) as error:
            read(path)  # type: ignore[operator]
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    "text",
    [
        "[training]\nsteps = 3\n",
        COMPARED.replace("true", "false"),
        "comparison = 3\nvariants = 3\n",
        "variants = 3\n[comparison]\n",
        "comparison = 3\n[variants]\n",
        COMPARED.replace("[variants.baseline]", "[variants]\nbaseline = 3"),
        COMPARED.replace("# more\n", "figure = 'x.gif'\n"),
        "accounted = 3\n" + COMPARED,
    ],
)
def test_what_is_no_comparison_is_refused_in_one_line(
    text: str, tmp_path: Path, quietgrad: Any
) -> None:
    path = tmp_path / "compared.toml"
    path.write_text(text, encoding="utf-8")
    code, _, err = quietgrad("compare", path)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1


def test_recipes_and_the_default_pass() -> None:
    look_early(None, data=False)
    files = sorted((ROOT / "recipes").rglob("*.toml"))
    taken = [path for path in files if "accounted" not in read_toml(path)]
    for path in taken:
        tree = read_toml(path)
        look_early(path, NO_HUB, data=False, keys="variants" not in tree)
        if "variants" in tree:
            require_comparison(path)
        if "comparison" not in tree:
            look_early(path, NO_HUB, data=False, ignored=OF_COMPARISONS)
    assert len(taken) > 3


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("train", ["--set", "trainning.steps=3"], "unknown table [trainning]; did you mean"),
        ("plan", ["--set", "clipping.estimator=gost"], "clipping.estimator='gost' is unknown"),
        ("plan", ["typo.toml", "--devices", "2"], "unknown key training.stepps; did you mean"),
        ("check", ["typo.toml"], "unknown key training.stepps; did you mean 'steps'"),
        ("audit", ["typo.toml"], "unknown key training.stepps; did you mean 'steps'"),
        ("spectrum", ["typo.toml"], "unknown key training.stepps; did you mean 'steps'"),
        ("compare", ["compared.toml"], "unknown key denoising.metod; did you mean 'method'"),
        ("compare", ["compared.toml", "--accounted"], "unknown key denoising.metod; did you"),
    ],
)
def test_it_is_refused_before_torch_is_loaded(
    command: str, arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "typo.toml").write_text("[training]\nstepps = 3\n", encoding="utf-8")
    compared = COMPARED + "[variants.odd]\ndenoising.metod = 'none'\n"
    (tmp_path / "compared.toml").write_text(compared, encoding="utf-8")
    code = (
        "import sys\n"
        f"sys.argv = ['quietgrad', {command!r}, *{arguments!r}]\n"
        "from quietgrad.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"error: {message}")


def test_a_key_of_another_table_is_told_its_own(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("[training]\nmax_physical_batch_size = 2\n")
    said = "did you mean 'expected_batch_size', or 'performance.max_physical_batch_size'"
    with pytest.raises(ValueError, match=said):
        load_config(file)
    with pytest.raises(ValueError, match=said):
        load_config(None, ["training.max_physical_batch_size=2"])
