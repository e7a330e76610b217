"""Builds wheel and sdist, and tries both as a stranger would: installed where nothing of this
checkout is seen.

    python scripts/package.py

Each goes into a fresh virtual environment outside of the checkout. What it depends on is taken from
the environment that runs this script, so that nothing is downloaded; quietgrad is not, and the
script checks that.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
# What a checkout has and a wheel could lack: data files, the marker of types, the command.
LOOK = """
import importlib.resources, json, quietgrad
files = importlib.resources.files("quietgrad")
wanted = ["py.typed", "report/page.html", "training/references.json", "training/settings/keys.json",
          "training/settings/default.toml", "training/tasks/text/modeling_pooled.py"]
print(json.dumps({"where": quietgrad.__file__, "version": quietgrad.__version__,
                  "missing": [name for name in wanted if not files.joinpath(name).is_file()]}))
"""
LEARN = """
import torch, torch.nn.functional as F
from quietgrad import PrivacyConfig
x = torch.randn(200, 4); y = (x[:, 0] > 0).long(); model = torch.nn.Linear(4, 2)
plan = PrivacyConfig(target_epsilon=2.0, expected_batch_size=50, epochs=1).build(dataset_size=200)
with plan.start() as run:
    for i in run.batches():
        run.backward(model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
                     (x[i], y[i]))
assert 0 < run.epsilon() <= 2.0
"""


def built() -> tuple[Path, Path]:
    """The sdist, and the wheel that is made from it."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    code = f"import setuptools.build_meta as b; print(b.build_sdist({str(DIST)!r}))"
    run([sys.executable, "-c", code], ROOT)
    (sdist,) = DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(sdist, folder)
        (source,) = Path(folder).iterdir()
        code = f"import setuptools.build_meta as b; print(b.build_wheel({str(DIST)!r}))"
        run([sys.executable, "-c", code], source)
    (wheel,) = DIST.glob("*.whl")
    return sdist, wheel


def try_out(package: Path) -> None:
    """Installs it into a new environment, and uses it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "env"
        venv.create(place, with_pip=False, symlinks=os.name != "nt")
        python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        paths = {"base": str(place), "platbase": str(place)}
        site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
        # Searched after the environment's own; its .pth files, quietgrad's among them, are not.
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        alone = ["--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
        run([*pip, *alone, str(package)], Path(folder))
        found = json.loads(run([str(python), "-c", LOOK], Path(folder)))
        if not Path(found["where"]).is_relative_to(place):
            raise SystemExit(f"package: tried {found['where']}, not what {package.name} holds")
        if found["missing"]:
            raise SystemExit(f"package: {package.name} lacks {found['missing']}")
        said = run([str(python), "-m", "quietgrad", "--version"], Path(folder))
        if found["version"] not in said:
            raise SystemExit(f"package: the command says {said!r}, the package {found['version']}")
        run([str(python), "-c", LEARN], Path(folder))
        print(f"package: {package.name} installs and trains")


def run(command: list[str], where: Path) -> str:
    """Standard output of a command that must succeed, without this checkout on its path."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=where, env=clean, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"package: {' '.join(command[:4])} failed:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    for one in built():
        try_out(one)
