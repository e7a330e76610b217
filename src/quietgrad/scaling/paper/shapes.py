"""Models by their shape: published configurations by name, or a folder's config.json.

The numbers are those of the ``config.json`` that each model is published with (the repository is
named); a test holds the parameters that they make against the published counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quietgrad.checks import require_at_least, require_int


@dataclass(frozen=True)
class Shape:
    """What a causal language model is made of.

    Attributes:
        name: what it is called.
        source: where the numbers are from.
        values: keys of transformers' configuration, with ``model_type``, as sorted pairs.
    """

    name: str
    source: str
    values: tuple[tuple[str, Any], ...]

    @property
    def layers(self) -> int:
        """Blocks of the model."""
        return int(dict(self.values)["num_hidden_layers"])

    @property
    def by_block(self) -> dict[str, list[Any]]:
        """Keys that say something of every block (``layer_types``)."""
        lists = {k: _thawed(v) for k, v in self.values if "layer" in k}
        return {k: v for k, v in lists.items() if isinstance(v, list) and len(v) == self.layers}

    def with_layers(self, layers: int) -> Shape:
        """The same with another number of blocks: the first ones, and over again."""
        cut = {k: _frozen([v[i % len(v)] for i in range(layers)]) for k, v in self.by_block.items()}
        other = dict(self.values) | cut | {"num_hidden_layers": layers}
        return Shape(self.name, self.source, tuple(sorted(other.items())))

    def config(self) -> Any:
        """transformers' configuration.

        Raises:
            ValueError: for a type of model that transformers does not know.
        """
        import transformers as hf

        values = {key: _thawed(value) for key, value in self.values}
        kind = values.pop("model_type")
        if (
            not isinstance(kind, str)
            or kind not in hf.models.auto.configuration_auto.CONFIG_MAPPING
        ):
            raise ValueError(
                f"model_type={kind!r} is unknown to transformers {hf.__version__}; give a folder "
                "whose config.json names a causal language model that it knows"
            )
        try:
            return hf.AutoConfig.for_model(kind, **values, use_cache=False)
        except Exception as error:  # transformers has kinds of its own, by model
            raise ValueError(
                f"model={self.source!r} is refused by transformers {hf.__version__} as a "
                f"{kind}: {' '.join(str(error).split())}; give the config.json as it saved it"
            ) from error


def _shape(name: str, source: str, **values: Any) -> Shape:
    return Shape(name, source, tuple(sorted(values.items())))


def _llama(
    name: str,
    source: str,
    sizes: tuple[int, int, int, int, int, int],
    tied: bool = False,
    kind: str = "llama",
    **more: Any,
) -> Shape:
    vocabulary, width, layers, heads, key_heads, inner = sizes
    return _shape(
        name,
        source,
        model_type=kind,
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
        **more,
    )


# Vocabulary, width, blocks, heads, heads of keys and values, width inside the feed-forward layers.
_ALL = (
    _llama("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", (49152, 576, 30, 9, 3, 1536), True),
    _llama("smollm2-360m", "HuggingFaceTB/SmolLM2-360M", (49152, 960, 32, 15, 5, 2560), True),
    _llama("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B", (49152, 2048, 24, 32, 32, 8192), True),
    _llama("llama-1b", "meta-llama/Llama-3.2-1B", (128256, 2048, 16, 32, 8, 8192), True),
    _llama("llama-3b", "meta-llama/Llama-3.2-3B", (128256, 3072, 28, 24, 8, 8192), True),
    _llama("llama-8b", "meta-llama/Llama-3.1-8B", (128256, 4096, 32, 32, 8, 14336)),
    _llama("llama-70b", "meta-llama/Llama-3.1-70B", (128256, 8192, 80, 64, 8, 28672)),
    _llama("mistral-7b", "mistralai/Mistral-7B-v0.1", (32000, 4096, 32, 32, 8, 14336)),
    _llama("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", (151936, 896, 24, 14, 2, 4864), True, kind="qwen2"),
    _llama("qwen2.5-7b", "Qwen/Qwen2.5-7B", (152064, 3584, 28, 28, 4, 18944), kind="qwen2"),
)
NAMED = MappingProxyType({shape.name: shape for shape in _ALL})


def shape_of(model: str) -> Shape:
    """A shape by name, or from a folder with a config.json (or that file).

    Raises:
        ValueError: where it is neither, or the file lacks what is needed.
    """
    if model.lower() in NAMED:
        return NAMED[model.lower()]
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"model={model!r} is no folder with a config.json, and none of the shapes that are "
            f"known by name: {', '.join(NAMED)}"
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model={str(file)!r} holds no JSON: {error}") from error
    values = _usual(values)
    needed = ("model_type", "num_hidden_layers")
    missing = [k for k in needed if not isinstance(values, dict) or k not in values]
    if missing:
        raise ValueError(
            f"model={str(file)!r} has no {missing[0]!r}; give the config.json of a causal "
            "language model, as transformers saves it"
        )
    return of_config(values, path.name if path.is_dir() else path.parent.name, str(file))


def _usual(values: Any) -> Any:
    """With transformers' common names in place of a model's own (GPT-2's ``n_layer``)."""
    import transformers as hf

    kind = values.get("model_type") if isinstance(values, dict) else None
    known = hf.models.auto.configuration_auto.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in known:
        return values
    common = {own: name for name, own in known[kind].attribute_map.items()}
    return {common.get(k, k): v for k, v in values.items()}


def of_config(values: dict[str, Any], name: str, source: str) -> Shape:
    """From the entries of a transformers configuration."""
    require_int("num_hidden_layers", values["num_hidden_layers"])
    require_at_least("num_hidden_layers", values["num_hidden_layers"], 1, "give a model of blocks")
    about_files = {"dtype", "torch_dtype", "transformers_version", "architectures", "use_cache"}
    frozen = {
        k: _frozen(v) for k, v in values.items() if k not in about_files and not k.startswith("_")
    }
    return Shape(name, source, tuple(sorted(frozen.items())))


def _frozen(value: Any) -> Any:
    """Hashable, so that what was found out about a shape can be remembered."""
    if isinstance(value, dict):
        return ("{}", tuple(sorted((k, _frozen(v)) for k, v in value.items())))
    return ("[]", tuple(map(_frozen, value))) if isinstance(value, list) else value


def _thawed(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and value[0] in ("{}", "[]"):
        kind, items = value
        if kind == "{}":
            return {k: _thawed(v) for k, v in items}
        return [_thawed(v) for v in items]
    return value
