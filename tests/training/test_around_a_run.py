"""What surrounds a run on the screen: the first line, other libraries' noise, a hub out of reach,
interruptions, one epsilon everywhere.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import repeated
from tiny_runs import train

from quietgrad.accounting.rounding import round_up
from quietgrad.checks import SettingsWarning
from quietgrad.cli import app, output
from quietgrad.training.files import figure
from quietgrad.training.sources import hub

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("command", ["train", "plan", "audit", "compare", "spectrum"])
def test_the_first_line_comes_before_torch(command: str) -> None:
    code = (
        "import builtins, sys\n"
        "write = sys.stdout.write\n"
        "def first(text):\n"
        "    write(text); sys.stdout.write = write\n"
        "    sys.stderr.write('torch' if 'torch' in sys.modules else 'no torch yet')\n"
        "sys.stdout.write = first\n"
        f"sys.argv = ['quietgrad', {command!r}, 'none.toml']\n"
        "from quietgrad.cli import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("quietgrad ") and command in done.stdout.splitlines()[0]
    assert done.stderr.startswith("no torch yet") and "none.toml" in done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("predict", "reading x.csv with the model of none"),
        ("export", "exporting the model of none"),
    ],
)
def test_what_uses_a_run_says_so_before_torch(command: str, said: str, tmp_path: Path) -> None:
    """Exporting said nothing until torch was there, three seconds of processor time later."""
    (tmp_path / "x.csv").write_text("text\na lovely film\n")
    where = ["x.csv"] if command == "predict" else ["-o", "x.pt2"]
    code = (
        "import sys\n"
        "sys.modules['torch'] = None  # importing it fails\n"
        f"sys.argv = ['quietgrad', {command!r}, 'none', *{where!r}]\n"
        "from quietgrad.cli import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert said in done.stdout and "torch" in done.stderr, done.stderr


def test_what_begins_is_said_without_a_terminal(quietgrad: Run, settings, write_config) -> None:
    config = write_config(settings | {"training.steps": 2})
    _, out, err = quietgrad("train", config)
    lines = out.splitlines()
    assert err == "" and [line.split()[0] for line in lines[:4]] == [
        "quietgrad", "reading", "calibrating", "loading"
    ]  # fmt: skip
    _, out, err = quietgrad("plan", config, "--json")
    assert json.loads(out) and err == ""  # for programs: the object alone


def test_an_interruption_is_one_line(quietgrad: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "announce", interrupted)
    code, _, err = quietgrad("train")
    assert code == 130 and err.startswith("error: interrupted") and err.count("\n") == 1


def test_warnings_of_other_libraries_stay_off_the_screen(capsys) -> None:
    target = output.console(False)
    with output.quiet_libraries(target):
        warnings.warn("somebody else's", FutureWarning, stacklevel=1)
        warnings.warn("yours", SettingsWarning, stacklevel=1)
    captured = capsys.readouterr()
    assert captured.out.strip() == "warning: yours" and captured.err == ""


def test_other_libraries_are_told_to_be_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in output.QUIET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DATASETS_VERBOSITY", "info")  # somebody wants to hear it
    output.hush_libraries()
    assert os.environ["DATASETS_VERBOSITY"] == "info"
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
    for name in output.QUIET:
        monkeypatch.setenv(name, os.environ[name])  # taken back at the end


# The hub


def test_an_address_that_answers_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert hub.reachable(there)
        monkeypatch.setenv("HTTPS_PROXY", there)
        assert hub.reachable("https://nowhere.invalid")
    assert not hub.reachable(there)


def test_a_look_up_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    monkeypatch.setattr(hub, "PATIENCE", 0.05)

    def hang(*arguments: Any, **more: Any) -> None:
        held.wait(60)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", hang)
    assert not hub.reachable("https://nowhere.invalid")
    held.set()


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("some-org/some-model", True),
        ("bert-base-cased", True),
        ("image:some-org/some-model", True),
        ("packaged:minilm", False),
        ("table:mlp", False),
        ("tests", False),  # a folder
    ],
)
def test_the_hub_is_asked_for_names_of_the_hub_alone(
    name: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.delenv(hub.OFFLINE)
    calls: list[int] = []
    monkeypatch.setattr(hub, "go_offline_unless_reachable", lambda: calls.append(1))
    if name == "tests":
        with pytest.raises(ValueError, match="the folder holds no model"):
            hub.require_model("model.name", name)
    else:
        hub.require_model("model.name", name)
    assert bool(calls) == asked


def test_a_hub_that_nobody_reaches_is_one_line(
    quietgrad: Run, csv_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(hub.OFFLINE)
    monkeypatch.setattr(hub, "reachable", lambda endpoint: False)
    run = tmp_path / "run"
    code, out, err = quietgrad(
        "train", "--set", "model.name=some-org/some-model",
        "--set", f"data.source={csv_file}", "--set", f"training.run_dir={run}",
    )  # fmt: skip
    assert code == 2 and err.count("\n") == 1 and "cannot be reached" in err, err
    assert "Retry" not in out + err and not run.exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [("image:some-org/some-model", "is no folder here"), ("image:./nowhere", "no such folder")],
)
def test_a_model_of_images_is_named_as_it_was_given(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(hub.OFFLINE)
    monkeypatch.setattr(hub, "reachable", lambda endpoint: False)
    with pytest.raises(ValueError, match=f"model.name='{name}'.*{why}"):
        hub.require_model("model.name", name)


def test_what_is_kept_of_the_hub_is_used_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "data"))
    # As somebody sets it: nobody is asked, and what is not kept is refused as it is without it.
    monkeypatch.setenv(hub.OFFLINE, "yes")
    monkeypatch.setattr(hub, "reachable", lambda endpoint: pytest.fail("was asked"))
    with pytest.raises(ValueError, match="cannot be reached; name a folder"):
        hub.require_model("model.name", "org/model")
    (tmp_path / "hub/models--org--model").mkdir(parents=True)
    with pytest.raises(ValueError, match="cannot be reached; name a folder"):
        hub.require_model("model.name", "org/model")  # nothing came before the line was cut
    kept = {"adapter_config.json": "a path"}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda _, file: kept.get(file))
    hub.require_model("model.name", "org/model")
    with pytest.raises(ValueError, match=r"data.source='org/MyData:en' is no file.*a \.csv"):
        hub.require_data("data.source", "org/MyData:en")
    (tmp_path / "data/org___my_data").mkdir(parents=True)
    hub.require_data("data.source", "org/MyData:en")


@pytest.mark.parametrize(
    ("command", "setting", "message"),
    [
        ("train", "model.name=some-org/some-model", " is no folder here"),
        ("plan", "test_source=some-org/some-data:en", " is no file and no folder"),
        ("audit", "data.source=nowhere.csv", ": no such file"),
        ("train", "model.name=./nowhere", " cannot be loaded: no such folder"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_before_torch_is_loaded(
    command: str, setting: str, message: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # closed again: nobody answers there
    clean = {k: v for k, v in os.environ.items() if k not in (*hub.PROXIES, hub.OFFLINE)}
    arguments = [command, "--set", setting]
    code = (
        "import sys\n"
        f"sys.argv = ['quietgrad', *{arguments!r}]\n"
        "from quietgrad.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    key, _, name = setting.partition("=")
    assert f"{key}={name!r}{message}" in done.stderr


@pytest.mark.slow("a process that imports torch and asks a real address; in process before")
def test_a_hub_out_of_reach_is_one_line_and_no_retry(csv_file: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # closed again: nobody answers there
    clean = {k: v for k, v in os.environ.items() if k not in (*hub.PROXIES, hub.OFFLINE)}
    done = subprocess.run(
        [sys.executable, "-m", "quietgrad", "train", "--set", "model.name=some-org/some-model",
         "--set", f"data.source={csv_file}", "--set", f"training.run_dir={tmp_path / 'run'}"],
        env=clean | {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "cannot be reached" in done.stderr and "Retry" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


# One epsilon


def test_console_metrics_figure_and_result_say_one_epsilon(
    quietgrad: Run, settings, write_config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated, "DRAWN", {})  # drawn here, whatever was drawn before
    titles = []
    title = figure._title
    monkeypatch.setattr(figure, "_title", lambda result: titles.append(title(result)) or titles[-1])
    often = {"training.steps": 7, "training.eval_every": 2, "data.public": False}
    _, out, _ = quietgrad("train", write_config(settings | often))
    run_dir = Path(settings["training.run_dir"])
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    said = [line.split("epsilon spent ")[1].split()[0] for line in out.splitlines()
            if line.startswith("step ") and "epsilon spent" in line]  # fmt: skip
    assert said == [round_up(m["epsilon"], 4) for m in metrics] and len(said) == 4
    final = json.loads((run_dir / "result.json").read_text())["epsilon"]
    assert all(float(text) >= m["epsilon"] for text, m in zip(said, metrics, strict=True))
    assert said[-1] == round_up(final, 4)
    assert titles == [f"Private training, epsilon = {round_up(final, 4)}"]
    assert round_up(final, 4) in quietgrad("runs", run_dir)[1]
    assert round_up(final, 4) in (run_dir / "model" / "README.md").read_text()


def test_a_private_run_without_evaluations_has_the_figure_of_one(
    settings, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated, "DRAWN", {})
    _, outcome, run_dir = train(settings | {"training.eval_every": 0, "training.steps": 2})
    assert figure._title(outcome.result).startswith("Private training, epsilon")
    figure.score_figure(run_dir.read_metrics(), outcome.result, None, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
