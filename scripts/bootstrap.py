"""Makes the development environment: a virtual environment, the right torch, the locked packages,
quietgrad.

    python3 scripts/bootstrap.py [--venv .venv]

Standard library only. Running it again is cheap (a stamp in the environment says what it was made
from) and safe after an attempt that was cut short. This file has to parse on Python 3.6, so that an
old interpreter gets one clear line and no syntax error.

Environment:
    QUIETGRAD_TORCH: replaces the torch requirement, e.g. "torch==2.13.0". It is installed with its
        dependencies, unless it names a "+cpu" build, whose dependencies are all in
        requirements/lock.txt.
    PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL and pip's other settings reach pip as usual.
"""

import argparse
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time

if sys.version_info < (3, 10):
    sys.stderr.write(
        "quietgrad needs Python 3.10 or newer, and {} is {}.{}; choose another, e.g. make setup "
        "PYTHON=python3.11\n".format(sys.executable, *sys.version_info[:2])
    )
    sys.exit(2)

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
TORCH_PIN = ROOT / "requirements" / "torch.txt"
OWNER_MARK = ".made-by-quietgrad-bootstrap"
STAMP = ".quietgrad-stamp"


class SetupError(Exception):
    """What stops the set-up; its text is for the person who started it."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is here, by its driver's own word."""
    try:
        if any(pathlib.Path("/proc/driver/nvidia/gpus").iterdir()):
            return True
    except OSError:
        pass
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU " in listed.stdout


def torch_requirement() -> "tuple[str, str]":
    """The torch to install on this machine.

    Returns:
        A pip requirement, and the reason for it in a few words.
    """
    override = os.environ.get("QUIETGRAD_TORCH", "").strip()
    if override:
        return override, "from QUIETGRAD_TORCH"
    lines = [
        line.split("#")[0].strip() for line in TORCH_PIN.read_text(encoding="utf-8").splitlines()
    ]
    pin = next(line for line in lines if line)
    system, machine = platform.system(), platform.machine().lower()
    if system not in ("Linux", "Windows") or machine not in ("x86_64", "amd64"):
        return pin, f"the default build for {system} on {machine}"
    if has_gpu():
        # A CPU build of the same version, if one is in reach, would win over the plain one.
        return f"{pin},!={pin.split('==')[1]}+cpu", "the default build, as there is a GPU"
    return f"{pin}+cpu", "the CPU build, as there is no GPU"


def fingerprint(torch: str) -> str:
    """Hash of all that the environment is made from."""
    digest = hashlib.sha256()
    for part in (LOCK, TORCH_PIN, ROOT / "pyproject.toml", pathlib.Path(__file__)):
        digest.update(part.read_bytes() + b"\0")
    for text in (torch, sys.version, str(ROOT)):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def venv_python(venv: pathlib.Path) -> pathlib.Path:
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def activation(venv: pathlib.Path) -> str:
    """What puts the environment's commands on the path."""
    return str(venv / "Scripts" / "activate") if os.name == "nt" else f"source {venv}/bin/activate"


def usable(venv: pathlib.Path) -> bool:
    """Whether the environment has a working pip under the same Python version as this script's."""
    script = "import sys, pip._internal; print('%d.%d' % sys.version_info[:2])"
    try:
        seen = subprocess.run(
            [str(venv_python(venv)), "-c", script], capture_output=True, text=True
        )
    except OSError:
        return False
    return seen.returncode == 0 and seen.stdout.strip() == "{}.{}".format(*sys.version_info[:2])


def ensure_venv(venv: pathlib.Path) -> None:
    """Creates the environment, or makes it anew where an earlier attempt left a broken or different
    one.
    """
    version = platform.python_version()
    mark = venv / OWNER_MARK
    if venv.exists():
        cut_short = mark.exists() and mark.read_text(encoding="utf-8") != "complete"
        if usable(venv) and not cut_short:
            return
        if any(venv.iterdir()) and not mark.exists():
            raise SetupError(
                f"{venv} exists but is no working environment for Python {version}, and this "
                "script\n"
                "did not make it: remove it yourself, or choose another folder with --venv (make: "
                "VENV=...)"
            )
        shutil.rmtree(str(venv))
    say(f"creating {venv} with Python {version}")
    venv.mkdir(parents=True)
    mark.write_text("started", encoding="utf-8")
    made = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
    if made.returncode != 0:
        raise SetupError(
            f"{sys.executable} -m venv failed:\n{(made.stdout + made.stderr).strip()}\n"
            "(on Debian and Ubuntu the module comes in the package python3-venv)"
        )
    mark.write_text("complete", encoding="utf-8")


def drop_half_installed(venv: pathlib.Path) -> None:
    """Removes the records of packages whose installation was cut short, so that pip installs them
    again.

    pip's last step is to write RECORD, with a line for the INSTALLER file that it has just added;
    metadata without that is a half-unpacked package, which pip itself would take for an installed
    one. Folders that start with ~ are old versions which pip had moved away.
    """
    patterns = ("lib/python3*/site-packages", "Lib/site-packages")
    sites = {site.resolve() for pattern in patterns for site in venv.glob(pattern)}
    for site in sites:
        for leftover in site.glob("~*"):
            shutil.rmtree(str(leftover)) if leftover.is_dir() else leftover.unlink()
        for info in site.glob("*.dist-info"):
            record = info / "RECORD"
            if not record.exists() or "/INSTALLER," not in record.read_text(encoding="utf-8"):
                say(f"{info.name[: -len('.dist-info')]} was installed only in part: again")
                shutil.rmtree(str(info))


def pip(venv: pathlib.Path, *args: str) -> "subprocess.CompletedProcess[str]":
    command = [
        str(venv_python(venv)),
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    return subprocess.run([*command, *args], cwd=str(ROOT), capture_output=True, text=True)


def pip_or_stop(venv: pathlib.Path, *args: str) -> None:
    done = pip(venv, *args)
    if done.returncode != 0:
        raise SetupError(f"pip {' '.join(args)} failed:\n{last_lines(done)}")


def last_lines(done: "subprocess.CompletedProcess[str]") -> str:
    lines = (done.stdout + done.stderr).strip().splitlines()
    return "\n".join(line[:500] for line in lines[-20:])


def install_torch(venv: pathlib.Path, torch: str) -> None:
    """Installs torch, and says what can be done where no index in reach has such a build.

    Args:
        venv: The environment.
        torch: A pip requirement. A "+cpu" build goes in without its dependencies, which the lock
            holds; any other with them, held to the versions of the lock.
    """
    cpu = "+cpu" in torch and "!=" not in torch
    if not cpu:
        # A CPU build from before the machine had a GPU satisfies the plain pin, so pip would keep
        # it.
        script = "import importlib.metadata as m; print(m.version('torch'))"
        seen = subprocess.run(
            [str(venv_python(venv)), "-c", script], capture_output=True, text=True
        )
        if seen.stdout.strip().endswith("+cpu"):
            pip_or_stop(venv, "uninstall", "--yes", "torch")
    done = pip(venv, "install", *(["--no-deps"] if cpu else ["--constraint", str(LOCK)]), torch)
    if done.returncode == 0:
        return
    # Beside a constraint (PIP_CONSTRAINT) pip calls a build that is nowhere a conflict.
    constrained = "ResolutionImpossible" in done.stderr
    nowhere = constrained or "No matching distribution found" in done.stderr
    if not nowhere or "Retrying" in done.stderr:  # or no network
        raise SetupError(f"installing {torch} failed:\n{last_lines(done)}")
    system = f"{platform.system()} {platform.machine()}"
    lines = [f"found no {torch} for Python {platform.python_version()} on {system}.", ""]
    if cpu:
        lines += [
            "Without an NVIDIA GPU, set-up asks for the CPU build and does not fall back to the "
            "default one,",
            "which can bring gigabytes of CUDA libraries. The places where pip looks have no such "
            "build for",
            "this interpreter.",
        ]
    else:
        lines += ["The places where pip looks have no such build for this interpreter."]
    if constrained:
        lines += ["Or a constraint that this machine gives pip does not allow it."]
    last = "the default build, forced:  " if cpu else "another torch:               "
    other = torch.split("+")[0] if cpu else "torch==..."
    lines += [
        "",
        "Any one of these helps (the install selector on PyTorch's site says what each index "
        "holds):",
        "  - another interpreter:        make setup PYTHON=python3.11",
        "  - one more index with it:     PIP_EXTRA_INDEX_URL=... make setup",
        "  - a folder with its wheel:    PIP_FIND_LINKS=... make setup",
        f'  - {last}QUIETGRAD_TORCH="{other}" make setup',
    ]
    raise SetupError("\n".join(lines))


def set_up(venv: pathlib.Path) -> None:
    torch, reason = torch_requirement()
    wanted = fingerprint(torch)
    stamp = venv / STAMP
    if (
        stamp.exists()
        and stamp.read_text(encoding="utf-8") == wanted
        and venv_python(venv).exists()
    ):
        return
    begun = time.monotonic()
    stamp.unlink(missing_ok=True)
    ensure_venv(venv)
    drop_half_installed(venv)
    say(f"1/3 {torch} ({reason})")
    install_torch(venv, torch)
    say("2/3 the packages of requirements/lock.txt (a minute or two)")
    pip_or_stop(venv, "install", "--no-deps", "-r", str(LOCK))
    say("3/3 quietgrad itself, editable")
    pip_or_stop(venv, "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    stamp.write_text(wanted, encoding="utf-8")
    say(f"done in {time.monotonic() - begun:.0f} s: {venv}")
    say(f"to use it in this shell: {activation(venv)}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes quietgrad's development environment.")
    parser.add_argument(
        "--venv", default=".venv", help="folder, relative to the repository (default: .venv)"
    )
    venv = ROOT / parser.parse_args().venv
    try:
        set_up(venv)
    except SetupError as error:
        sys.stderr.write(f"setup: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("setup: stopped; running it again goes on from here\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
