"""A hook of mkdocs: makes the reference from the code, and turns links that lead out of docs/, to
files of the repository, into the names of those files.

Pages made here: one a public module with every public name, every key of a configuration, every
command with its options. None of them is written to disk.
"""

from __future__ import annotations

import importlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

REFERENCE = "reference"
# Pages of wide tables get the place of their own table of contents.
WIDE = ("symbols", "attacks/", f"{REFERENCE}/settings.md", f"{REFERENCE}/commands.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)(#[^)]*)?\)")
MODULES = (
    "quietgrad",
    "quietgrad.plan",
    "quietgrad.loading",
    "quietgrad.clipping",
    "quietgrad.noise",
    "quietgrad.events",
    "quietgrad.accounting",
    "quietgrad.sampling",
    "quietgrad.schedules",
    "quietgrad.beside",
    "quietgrad.averaging",
    "quietgrad.denoising",
    "quietgrad.curvature",
    "quietgrad.auditing",
    "quietgrad.integrations.transformers",
    "quietgrad.integrations.lightning",
)


def pages() -> dict[str, str]:
    """Place below docs/ -> text, of every page that is made from the code."""
    made = {f"{REFERENCE}/{name}.md": module_page(name) for name in MODULES}
    made[f"{REFERENCE}/settings.md"] = settings_page()
    made[f"{REFERENCE}/commands.md"] = commands_page()
    return made


def public_names(module: str) -> list[str]:
    """Where a module's public names are defined, under their public names."""
    return [name for name in importlib.import_module(module).__all__ if name != "__version__"]


def module_page(module: str) -> str:
    """Every public name of a module, documented by its docstring."""
    found = importlib.import_module(module)
    lines = [f"# {module}", "", (found.__doc__ or "").strip(), ""]
    for name in public_names(module):
        value = getattr(found, name)
        home = getattr(value, "__module__", None)
        if module == "quietgrad" and home:  # lazily loaded: documented where it is defined
            lines += [f"## {module}.{name}", "", f"::: {home}.{value.__qualname__}", ""]
            lines[-2] += "\n    options:\n      heading_level: 3"
        else:
            lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)


def settings_page() -> str:
    """Every key of a configuration file."""
    from quietgrad.cli.settings import chosen
    from quietgrad.training.settings.config import TABLES

    lines = ["# Configuration keys", "", "What `quietgrad settings` says, in one page.", ""]
    table = ""
    for setting in chosen(None):
        if setting.table != table:
            table = setting.table
            lines += ["", f"## [{table}]", "", "| key | what it may be | default | meaning |"]
            lines.append("| --- | --- | --- | --- |")
        only = ""
        if setting.words:
            only = f"with {TABLES[table].key} {', '.join(setting.words)}: "
        default = "" if setting.default is None else f"`{setting.default!r}`"
        meaning = cell(only + setting.meaning)
        lines.append(f"| `{setting.key}` | {cell(setting.kind)} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Every command of the command line with its options."""
    import typer

    from quietgrad.cli.app import app

    root: Any = typer.main.get_command(app)
    lines = ["# Command line", "", described(str(root.help)), ""]
    for name in sorted(root.commands):
        command = root.commands[name]
        lines += [f"## quietgrad {name}", "", described(str(command.help)), ""]
        lines.append("| option | meaning |")
        lines.append("| --- | --- |")
        for parameter in command.params:
            shown = [*parameter.opts, *parameter.secondary_opts]
            if parameter.param_type_name == "argument":
                shown = [parameter.metavar or parameter.name]
            if "--help" not in shown:
                words = ", ".join(f"`{one}`" for one in shown)
                lines.append(f"| {words} | {cell(getattr(parameter, 'help', '') or '')} |")
        lines.append("")
    return "\n".join(lines)


def described(text: str) -> str:
    """A command's help as Markdown, its example as a block."""
    text = text.replace("\\[", "[")
    return re.sub(r"^Example: (.*)$", r"```sh\n\1\n```", text, flags=re.MULTILINE)


def cell(text: str) -> str:
    """Plain text in a table of Markdown."""
    text = " ".join(text.replace("\\[", "[").split()).replace("|", "\\|")
    return text.replace("``", "`").replace("<", "&lt;")


def outside(markdown: str, place: str) -> str:
    """Links that lead out of docs/ as the names of what they lead to."""

    def named(found: re.Match[str]) -> str:
        folder = posixpath.dirname(place)
        target = posixpath.normpath(posixpath.join("docs", folder, found[3]))
        if target.startswith("docs/") or found[1]:
            return found[0]
        return found[2] if target in found[2] else f"{found[2]} (`{target}`)"

    return LINK.sub(named, markdown)


def entries() -> Iterator[dict[str, str]]:
    """Of the navigation."""
    yield {"Configuration keys": f"{REFERENCE}/settings.md"}
    yield {"Command line": f"{REFERENCE}/commands.md"}
    for module in MODULES:
        yield {module: f"{REFERENCE}/{module}.md"}


def on_config(config: Any) -> Any:
    """Puts the made pages into the navigation, behind those that are written."""
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] += list(entries())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the made pages."""
    from mkdocs.structure.files import File

    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """See ``outside`` and ``WIDE``."""
    if page.file.src_uri.startswith(WIDE):
        page.meta["hide"] = ["toc"]
    return outside(markdown, page.file.src_uri)
