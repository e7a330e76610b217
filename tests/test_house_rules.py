"""The house rules that a machine can hold: which room imports what, how long files are, which names
are public, what no file may name.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from grids import kept

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "quietgrad"
LONGEST = 350
LONGEST_TEST = 500

# The import table of docs/architecture.md: room -> (rooms, third-party packages) that it may
# import, the standard library aside.
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "checks": (set(), set()),
    "records": ({"checks"}, set()),
    "events": ({"checks"}, set()),
    "randomness": ({"checks"}, {"numpy"}),
    "generators": (set(), {"numpy", "torch"}),
    "tensors": (set(), {"torch"}),
    "sending": (set(), {"torch"}),
    "averaging": ({"tensors"}, {"torch"}),
    "beside": ({"events", "checks", "records"}, {"torch"}),
    "clipping": (
        {"beside", "events", "checks", "generators", "randomness", "records", "sending", "tensors"},
        {"scipy", "torch"},
    ),
    "noise": (
        {"events", "checks", "randomness", "records", "tensors", "clipping"},
        {"numpy", "scipy", "torch", "cryptography"},
    ),
    "curvature": ({"checks", "randomness", "tensors"}, {"numpy", "scipy", "torch"}),
    "denoising": ({"checks", "noise"}, {"numpy", "torch"}),
    "accounting": ({"events", "checks"}, {"numpy", "scipy", "dp_accounting"}),
    "sampling": ({"events", "checks", "randomness", "records"}, {"numpy"}),
    "durable": (set(), set()),
    "schedules": ({"events", "checks", "records"}, set()),
    "ledger": ({"events", "durable", "schedules"}, set()),
    "keyring": ({"randomness", "durable"}, set()),
}
ROOMS["loading"] = ({"checks", "clipping", "generators", "sampling", "tensors"}, {"numpy", "torch"})
ROOMS["distributed"] = (
    {"clipping", "generators", "keyring", "loading", "noise", "randomness", "sampling", "sending"}
    | {"tensors"},
    {"numpy", "torch"},
)
# Looks at what was not released; nothing imports it (tests/test_research.py).
ROOMS["research"] = ({"checks", "clipping", "denoising", "events", "noise"}, {"torch"})
ROOMS["plan"] = (set(ROOMS) - {"research"}, {"numpy", "torch"})
ROOMS["scaling"] = (
    {"checks", "clipping", "distributed", "tensors"},
    {"peft", "torch", "transformers"},
)
ROOMS["auditing"] = (
    {"accounting", "checks", "clipping", "events", "generators", "noise", "plan", "sampling"}
    | {"tensors"},
    {"numpy", "scipy", "torch"},
)
ROOMS["report"] = (
    {"events", "accounting", "checks", "durable", "ledger"},
    {"numpy", "scipy", "matplotlib", "jinja2", "tomli"},
)
ROOMS["training"] = (
    set(ROOMS) - {"research"},
    {
        "numpy",
        "torch",
        "transformers",
        "peft",
        "huggingface_hub",
        "safetensors",
        "datasets",
        "pandas",
        "matplotlib",
        "tensorboard",
        "tomli",
        "torchvision",
        "PIL",
        "onnxruntime",
        "optuna",
        "scipy",
    },
)
ROOMS["comparing"] = (set(ROOMS) - {"research"}, {"numpy", "torch", "optuna"})
ROOMS["integrations"] = (
    set(ROOMS) - {"research", "comparing"},
    {"accelerate", "datasets", "lightning", "numpy", "torch", "transformers", "trl"},
)
ROOMS["cli"] = (set(ROOMS) - {"research"}, {"typer", "rich"})

# Of a whole room, one type: all that noise may know of clipping, and all that denoising may know of
# noise.
ONLY = {
    ("noise", "clipping"): {"quietgrad.clipping.clipped_sum"},
    ("denoising", "noise"): {"quietgrad.noise.noisy_sum"},
}

MODULES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import, also of those inside functions; names imported from the
    package itself count as modules.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            if node.module in ("quietgrad", "quietgrad.cli", "quietgrad.training"):
                found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, str(node.module)))
    return found


def violations(path: Path, room: str) -> list[str]:
    rooms, packages = ROOMS[room]
    wrong = []
    for line, module in imports_of(path):
        top, *rest = module.split(".")
        if top == "quietgrad":
            other = rest[0] if rest else ""
            allowed = other in rooms | {room} or (other.startswith("__") and room == "cli")
            only = ONLY.get((room, other))
            allowed = allowed and (only is None or module in only)
        else:
            allowed = top in packages or top in sys.stdlib_module_names
        if not allowed:
            wrong.append(f"{path.name}:{line}: {room} imports {module}")
    return wrong


def test_every_room_is_in_the_table() -> None:
    assert {room_of(path) for path in MODULES} - {"__init__", "__main__"} <= set(ROOMS)


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_import_what_the_table_allows(room: str) -> None:
    paths = [path for path in MODULES if room_of(path) == room]
    assert paths
    assert [wrong for path in paths for wrong in violations(path, room)] == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("accounting", "import torch"),
        ("accounting", "from quietgrad.tensors import Batch"),
        ("events", "import numpy as np"),
        ("noise", "from quietgrad.plan import PrivacyPlan"),
        ("noise", "from quietgrad.clipping.clipper import Clipper"),
        ("denoising", "from quietgrad.clipping.clipped_sum import ClippedSum"),
        ("denoising", "from quietgrad.noise.mechanism import GaussianNoise"),
        ("clipping", "from quietgrad.noise import GaussianNoise"),
        ("sampling", "def f():\n    import torch"),
        ("ledger", "from quietgrad import plan"),
        ("plan", "from quietgrad.training import runner"),
        ("training", "import quietgrad.cli"),
    ],
)
def test_the_table_forbids(room: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(line + "\n")
    assert len(violations(path, room)) == 1


@pytest.mark.parametrize("room", ["noise", "plan", "sampling"])
def test_modules_of_a_room_import_each_other_one_way(room: str) -> None:
    # Of a whole room: config imports plan, plan imports run, and none of them the other way.
    names = {f"quietgrad.{room}.{path.stem}": path for path in (SOURCE / room).glob("*.py")}
    graph = {name: {m for _, m in imports_of(path)} & set(names) for name, path in names.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize(
    "module",
    [
        "quietgrad",
        "quietgrad.accounting",
        "quietgrad.events",
        "quietgrad.sampling",
        "quietgrad.ledger",
        "quietgrad.schedules",
        "quietgrad.cli.app",
    ],
)
def test_light_rooms_do_not_load_torch(module: str) -> None:
    # What the table says of direct imports, at run time and through all others.
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(paths: Sequence[Path]) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, anywhere in its text.

    An import inside a function, or for type checking only, hides a circle and does not open it.
    """
    graph: dict[str, set[str]] = {module_of(path): set() for path in paths}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                # A name is a module of its own, or something that the package's __init__ holds.
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found = [name if name in graph else str(node.module) for name in names]
            else:
                continue
            graph[module_of(path)] |= {name for name in found if name in graph}
    return graph


def circular(graph: dict[str, set[str]]) -> set[str]:
    """Modules on import circles, and between two of them: what is left without the ends."""
    left = {name: set(imports) for name, imports in graph.items()}
    while True:
        used = set().union(*left.values())
        ends = {name for name, imports in left.items() if not imports or name not in used}
        if not ends:
            return set(left)
        left = {name: imports - ends for name, imports in left.items() if name not in ends}


# Of the clipping room: each folder imports from itself and those before it, none from the room's
# own files.
FOLDERS_OF_CLIPPING = ["norms", "capture", "engines"]


def test_folders_of_the_clipping_room_import_one_way() -> None:
    wrong = []
    for place, folder in enumerate(FOLDERS_OF_CLIPPING):
        allowed = FOLDERS_OF_CLIPPING[: place + 1]
        paths = sorted((SOURCE / "clipping" / folder).rglob("*.py"))
        assert paths
        found = [(path, module) for path in paths for _, module in imports_of(path)]
        inside = [
            (path, m.split(".")[2]) for path, m in found if m.startswith("quietgrad.clipping.")
        ]
        wrong += [
            f"{name_of(path)} imports {other}" for path, other in inside if other not in allowed
        ]
    assert wrong == []


def test_what_is_counted_on_paper_knows_nothing_of_devices() -> None:
    paths = sorted((SOURCE / "scaling" / "paper").rglob("*.py"))
    assert paths and (SOURCE / "scaling" / "ways").is_dir()
    found = [m for path in paths for _, m in imports_of(path) if m.startswith("quietgrad.scaling.")]
    assert found and [m for m in found if not m.startswith("quietgrad.scaling.paper.")] == []


def test_there_are_no_import_circles() -> None:
    assert circular(import_graph(MODULES)) == set()
    assert circular({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}


FOLDERS = sorted({path.parent for path in MODULES})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_no_folder_has_more_than_twelve_files(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= 12


def test_no_source_file_is_too_long() -> None:
    lengths = {
        name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES
    }
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


def test_no_test_file_is_too_long() -> None:
    lengths = {
        name_of(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert len(lengths) > 60
    assert {name: n for name, n in lengths.items() if n > LONGEST_TEST} == {}


def test_every_slow_test_says_why() -> None:
    marks = [
        (path.name, mark)
        for path in (ROOT / "tests").rglob("*.py")
        if path.name != "conftest.py"  # which hands a grid's reason on
        for mark in re.findall(r"pytest\.mark\.slow\b.*", path.read_text(encoding="utf-8"))
    ]
    assert len(marks) > 3
    assert [m for m in marks if not re.match(r'pytest\.mark\.slow\("[^"]{10,}"', m[1])] == []


def test_every_grid_says_how_many_cases_are_kept_and_why() -> None:
    marks = [
        (path.name, mark)
        for path in (ROOT / "tests").rglob("test_*.py")
        for mark in re.findall(r"^@pytest\.mark\.grid\b.*", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(marks) > 20
    wanted = r'@pytest\.mark\.grid\([1-9]\d*, "[^"]{10,}"\)$'
    assert [m for m in marks if not re.match(wanted, m[1])] == []


def test_a_grid_keeps_its_ends_and_cases_between() -> None:
    assert kept(9, 3) == {0, 4, 8} and kept(90, 31) == {round(i * 89 / 30) for i in range(31)}
    assert kept(4, 9) == kept(4, 4) == {0, 1, 2, 3}
    assert kept(5, 1) == {2} and kept(1, 1) == kept(1, 3) == {0}


def test_every_module_says_what_it_is_for() -> None:
    empty = {path for path in MODULES if not path.read_text(encoding="utf-8").strip()}
    assert [
        name_of(p)
        for p in MODULES
        if p not in empty and not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ] == []


PUBLIC = [
    "quietgrad",
    "quietgrad.accounting",
    "quietgrad.auditing",
    "quietgrad.averaging",
    "quietgrad.beside",
    "quietgrad.clipping",
    "quietgrad.curvature",
    "quietgrad.denoising",
    "quietgrad.events",
    "quietgrad.integrations.lightning",
    "quietgrad.integrations.transformers",
    "quietgrad.loading",
    "quietgrad.noise",
    "quietgrad.sampling",
    "quietgrad.schedules",
]


def test_public_names_are_the_golden_ones() -> None:
    found = [
        f"{module}.{name}"
        for module in PUBLIC
        for name in sorted(importlib.import_module(module).__all__)
    ]
    # To change the public interface on purpose, edit public_names.txt in the same change.
    assert found == (Path(__file__).with_name("public_names.txt")).read_text().split()


def test_rooms_are_there_once_the_package_is_imported() -> None:
    code = (
        "import sys, quietgrad; assert 'torch' not in sys.modules; "
        "assert set(quietgrad.ROOMS) <= set(dir(quietgrad)); "
        "quietgrad.accounting.epsilon; assert 'torch' not in sys.modules; "
        "quietgrad.clipping.clipped_gradients; quietgrad.noise.BandedNoise(4); "
        "from quietgrad import Clipping; Clipping('ghost')"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    rooms = [name.partition(".")[2] for name in PUBLIC if name.count(".") == 1]
    assert sorted(importlib.import_module("quietgrad").ROOMS) == rooms


def test_public_names_exist_and_are_documented() -> None:
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            assert name == "__version__" or getattr(module, name).__doc__, f"{module_name}.{name}"
    with pytest.raises(AttributeError):
        _ = importlib.import_module("quietgrad").no_such_name


# Put together here so that this file does not name them itself.
FORBIDDEN = [
    re.compile(r"(?<![\w.~-])/" + "work" + r"/\w"),
    re.compile(r"(?<![\w.~-])/" + "root" + r"\b"),
    *(
        re.compile(re.escape(host))
        for host in (
            "py" + "pi.org",
            "python" + "hosted.org",
            "download.py" + "torch.org",
            "npm" + "js.org",
            "ana" + "conda.org",
            "crates" + ".io",
            "proxy." + "golang.org",
        )
    ),
]


def files_of_the_repository() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for path in (ROOT / line for line in listed.stdout.splitlines()) if path.is_file()]


def test_no_file_names_a_path_of_one_machine_or_a_registry() -> None:
    wrong = []
    for path in files_of_the_repository():
        text = path.read_bytes().decode("utf-8", "ignore")
        wrong += [
            f"{name_of(path)}: {found.group()}"
            for pattern in FORBIDDEN
            if (found := pattern.search(text))
        ]
    assert wrong == []
    assert FORBIDDEN[0].search("see /" + "work/main") and not FORBIDDEN[0].search(
        "frame/" + "work/done"
    )
