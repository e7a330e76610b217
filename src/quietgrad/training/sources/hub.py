"""Whether Hugging Face's hub can be reached, asked once before its clients are: by themselves they
try again for half a minute for each file. And whether torchvision's weights can be had.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

ENDPOINT = "https://huggingface.co"
HUGGING_FACE = "image:"  # before the folder or hub name of a model of images
TORCHVISION = "torchvision:"  # before the name of one of torchvision's, or of a data set of it
PATIENCE = 1.5  # seconds for name and connection
DESCRIPTIONS = ("config.json", "adapter_config.json")
OFFLINE = "HF_HUB_OFFLINE"
TRUE = ("1", "ON", "YES", "TRUE")  # what the clients take for it
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
ADDRESS = re.compile(r"url=\"(https://[\w.-]+)")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def require_model(option: str, name: str, weights: str = "") -> None:
    """Checks that a model's name on the hub, or one of torchvision, can lead somewhere; other names
    pass.

    Where the hub cannot be reached, its clients are told so for the rest of the process (by their
    own switch, HF_HUB_OFFLINE): they use what they have kept, or fail at once.

    Args:
        option: such as "model.name".
        name: folder, packaged name, or name on the hub; of images too.
        weights: a file that a model of torchvision begins with, which then needs no other.

    Raises:
        ValueError: for a path that leads nowhere, or to no model; if the hub cannot be reached and
            nothing of the model is kept here; without torchvision where it is asked for.
    """
    if name.startswith(TORCHVISION):
        _require_torchvision(option, name, weights)
        return
    place = name.removeprefix(HUGGING_FACE)
    _require_folder(option, name, place)
    if is_hub_name(place) and _out_of_reach() and not _keeps_model(place):
        raise ValueError(
            f"{option}={name!r} is no folder here, and Hugging Face's hub cannot be reached; name "
            "a folder that holds the model, or one of the packaged models"
        )


def _require_torchvision(option: str, name: str, weights: str) -> None:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        raise ValueError(
            f"{option}={name!r} needs torchvision, in the build that goes with torch: pip install "
            "'quietgrad[torchvision]'"
        )
    place = vision_weights()
    # Its files are called as the model is, but for points, and noughts at the end.
    begin = _letters(name.removeprefix(TORCHVISION)).rstrip("0")
    kept = any(_letters(file.name).startswith(begin) for file in place.glob("*.pth"))
    store = _store_of(Path(found.origin).parent)
    if not weights and not kept and not reachable(store):
        raise ValueError(
            f"{option}={name!r}: its weights are not in {str(place)!r}, and "
            f"{urlsplit(store).hostname} cannot be reached; put torchvision's file there, or name "
            "a safetensors file of the model's state dict in model.weights"
        )


def _store_of(package: Path) -> str:
    """Where torchvision's weights are, read from its source: importing it takes seconds."""
    found = ADDRESS.search((package / "models" / "resnet.py").read_text(encoding="utf-8"))
    return found.group(1) if found else ENDPOINT


def vision_weights() -> Path:
    """Folder where torch keeps the weights that torchvision has fetched."""
    loaded = sys.modules.get("torch.hub")
    if loaded is not None:
        return Path(loaded.get_dir()) / "checkpoints"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("TORCH_HOME") or f"{base}/torch"
    return Path(os.path.expandvars(home)).expanduser() / "hub" / "checkpoints"


def require_data(option: str, source: str) -> None:
    """The same for a data set's name on the hub.

    Args:
        option: such as "data.source".
        source: NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:SPLIT.

    Raises:
        ValueError: if the hub cannot be reached and nothing of the data set is kept here.
    """
    name = source.partition(":")[0]
    if is_hub_name(name) and _out_of_reach() and not _keeps_data(name):
        raise ValueError(
            f"{option}={source!r} is no file and no folder here, and Hugging Face's hub cannot be "
            "reached; name a .csv, .tsv, .jsonl, .json or .parquet file, or a folder of images"
        )


def _keeps_model(name: str) -> bool:
    """Whether a model's description is kept; the client is loaded where there is a folder."""
    if not (_cache("HF_HUB_CACHE", "hub") / f"models--{name.replace('/', '--')}").is_dir():
        return False
    import huggingface_hub

    kept = (huggingface_hub.try_to_load_from_cache(name, file) for file in DESCRIPTIONS)
    return any(isinstance(path, str) for path in kept)


def _keeps_data(name: str) -> bool:
    """Whether a folder of the cache could be the data set's, whose client spells names its way."""
    folder = _cache("HF_DATASETS_CACHE", "datasets")
    known = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return any(_letters(name) == _letters(other) for other in known)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _cache(variable: str, folder: str) -> Path:
    """Where the hub's clients keep things, as they find it themselves."""
    loaded = sys.modules.get("huggingface_hub.constants")
    if loaded is not None and variable == "HF_HUB_CACHE":
        return Path(loaded.HF_HUB_CACHE)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    return Path(os.path.expandvars(os.environ.get(variable) or f"{home}/{folder}")).expanduser()


def _out_of_reach() -> bool:
    """Whether the clients are offline, told so by the environment or now."""
    said = os.environ.get(OFFLINE, "").upper() in TRUE
    return said or go_offline_unless_reachable()


def _require_folder(option: str, name: str, place: str) -> None:
    path = Path(place).expanduser()
    if path.is_dir():
        held = any((path / file).is_file() for file in DESCRIPTIONS) or any(path.glob("*.gguf"))
        if not held:
            raise ValueError(
                f"{option}={name!r} cannot be loaded: the folder holds no model (no "
                f"{DESCRIPTIONS[0]})"
            )
    elif place.startswith(("/", "./", "../", "~")) or place.count("/") > 1:
        raise ValueError(f"{option}={name!r} cannot be loaded: no such folder")


def is_hub_name(name: str) -> bool:
    """Whether a name is none of this library's own, and of no file or folder."""
    return bool(NAME.fullmatch(name)) and not os.path.exists(name)


def go_offline_unless_reachable() -> bool:
    """Whether the clients were told now that the hub cannot be reached; not asked again, nor where
    the environment has said it already.
    """
    if os.environ.get(OFFLINE) or reachable(os.environ.get("HF_ENDPOINT") or ENDPOINT):
        return False
    os.environ[OFFLINE] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:  # it has read the environment before
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return True


def reachable(endpoint: str) -> bool:
    """Whether something answers at an address, or at the proxy that leads there."""
    proxy = next((os.environ[name] for name in PROXIES if os.environ.get(name)), "")
    where = urlsplit(proxy if "://" in proxy else f"//{proxy}") if proxy else urlsplit(endpoint)
    port = where.port or (80 if where.scheme == "http" else 443)
    found = threading.Event()

    def connect() -> None:
        try:
            with socket.create_connection((where.hostname or "", port), timeout=PATIENCE):
                found.set()
        except OSError:
            pass
        finally:
            ended.set()

    ended = threading.Event()
    # Looking up a name cannot be given a time by itself.
    threading.Thread(target=connect, daemon=True).start()
    ended.wait(PATIENCE)
    return found.is_set()
