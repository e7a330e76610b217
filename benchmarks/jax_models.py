"""The models of ``clipping_peers.py`` in plain JAX: the same weights, names and results.

Parameters are a flat dictionary under torch's names. A model takes them and a batch and gives the
loss of every example, so it can be held against the torch model number by number (``check`` in
``clipping_peers_jax.py``). Layouts are JAX's own: linear weights [in, out], images [batch, height,
width, channels], filters [height, width, in, out].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = dict[str, Any]
Model = Callable[[Arrays, Arrays], jax.Array]

TABLES = ("embed_tokens.weight", "_embeddings.weight")  # rows by token: as in torch
QUERIES = 512  # whose attention weights are in memory at once
LORA_SCALE = 2.0  # lora_alpha / r


def own_layout(name: str, value: np.ndarray, back: bool = False) -> np.ndarray:
    """torch's layout to JAX's, or ``back``."""
    if value.ndim == 4:
        return value.transpose((3, 2, 0, 1) if back else (2, 3, 1, 0))
    return value.T if value.ndim == 2 and not name.endswith(TABLES) else value


def short_name(name: str) -> str:
    """Without what peft puts around a parameter's name."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".default", "")


def linear(p: Arrays, name: str, x: jax.Array) -> jax.Array:
    y = x @ p[f"{name}.weight"]
    if f"{name}.lora_A.weight" in p:
        y += LORA_SCALE * (x @ p[f"{name}.lora_A.weight"] @ p[f"{name}.lora_B.weight"])
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def layer_norm(p: Arrays, name: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-12)
    return centred * scale * p[f"{name}.weight"] + p[f"{name}.bias"]


def heads_of(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, -1)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - picked


def bert(p: Arrays, batch: Arrays) -> jax.Array:
    where = "bert.embeddings."
    x = p[where + "word_embeddings.weight"][batch["input_ids"]]
    x += p[where + "position_embeddings.weight"][batch["position_ids"]]
    x += p[where + "token_type_embeddings.weight"][batch["token_type_ids"]]
    x = layer_norm(p, where + "LayerNorm", x)
    for i in range(6):
        where = f"bert.encoder.layer.{i}."
        query, key, value = (
            heads_of(linear(p, f"{where}attention.self.{name}", x), 12)
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(query, key, value).reshape(x.shape)
        mixed = linear(p, where + "attention.output.dense", mixed)
        x = layer_norm(p, where + "attention.output.LayerNorm", x + mixed)
        inner = jax.nn.gelu(linear(p, where + "intermediate.dense", x), approximate=False)
        x = layer_norm(p, where + "output.LayerNorm", x + linear(p, where + "output.dense", inner))
    pooled = jnp.tanh(linear(p, "bert.pooler.dense", x[:, 0]))
    return cross_entropy(linear(p, "classifier", pooled), batch["y"])


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Of long texts for some queries at a time, computed again on the way back: on processors XLA
    has no kernel that does without the whole matrix of weights, 15 GiB of them at 4096 tokens.
    (``jax.checkpoint`` without the loop is undone by the compiler there.)
    """
    length = query.shape[1]
    if length <= QUERIES:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    @jax.checkpoint
    def of_some(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        some, start = part
        seen = jnp.arange(length) <= start + jnp.arange(QUERIES)[:, None]
        return jax.nn.dot_product_attention(some, key, value, mask=seen[None, None])

    batch, _, heads, width = query.shape
    parts = query.reshape(batch, -1, QUERIES, heads, width).swapaxes(0, 1)
    mixed = jax.lax.map(of_some, (parts, jnp.arange(0, length, QUERIES)))
    return mixed.swapaxes(0, 1).reshape(query.shape)


def llama(p: Arrays, batch: Arrays) -> jax.Array:
    def norm(name: str, x: jax.Array) -> jax.Array:
        scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        return p[f"{name}.weight"] * (x * scale)

    x = p["model.embed_tokens.weight"][batch["input_ids"]]
    angles = jnp.arange(x.shape[1])[:, None] / 10000.0 ** (jnp.arange(0, 64, 2) / 64)
    cosine, sine = (jnp.tile(f(angles), 2)[:, None] for f in (jnp.cos, jnp.sin))

    def turned(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, -1)
        return x * cosine + jnp.concatenate([-second, first], -1) * sine

    for i in range(4):
        where = f"model.layers.{i}."
        y = norm(where + "input_layernorm", x)
        query, key, value = (
            heads_of(linear(p, f"{where}self_attn.{name}_proj", y), 8) for name in "qkv"
        )
        mixed = causal_attention(turned(query), turned(key), value).reshape(x.shape)
        x += linear(p, where + "self_attn.o_proj", mixed)
        y = norm(where + "post_attention_layernorm", x)
        gate = jax.nn.silu(linear(p, where + "mlp.gate_proj", y))
        x += linear(p, where + "mlp.down_proj", gate * linear(p, where + "mlp.up_proj", y))
    logits = linear(p, "lm_head", norm("model.norm", x))
    return cross_entropy(logits[:, :-1], batch["y"][:, 1:]).mean(1)


def convolution(p: Arrays, name: str, x: jax.Array, stride: int) -> jax.Array:
    filters = p[f"{name}.weight"]
    edge = filters.shape[0] // 2
    return jax.lax.conv_general_dilated(
        x, filters, (stride, stride), [(edge, edge)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def group_norm(p: Arrays, name: str, x: jax.Array) -> jax.Array:
    grouped = heads_of(x, 32)
    centred = grouped - grouped.mean((1, 2, 4), keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(centred).mean((1, 2, 4), keepdims=True) + 1e-5)
    return (centred * scale).reshape(x.shape) * p[f"{name}.weight"] + p[f"{name}.bias"]


def resnet(p: Arrays, batch: Arrays) -> jax.Array:
    x = jax.nn.relu(group_norm(p, "1", convolution(p, "0", batch["x"], 1)))
    for i in range(3, 11):
        stride = 2 if i in (5, 7, 9) else 1
        y = jax.nn.relu(group_norm(p, f"{i}.body.1", convolution(p, f"{i}.body.0", x, stride)))
        y = group_norm(p, f"{i}.body.4", convolution(p, f"{i}.body.3", y, 1))
        if f"{i}.skip.0.weight" in p:
            x = group_norm(p, f"{i}.skip.1", convolution(p, f"{i}.skip.0", x, stride))
        x = jax.nn.relu(x + y)
    return cross_entropy(linear(p, "13", x.mean((1, 2))), batch["y"])


MODELS: dict[str, Model] = {
    "bert": bert,
    "llama": llama,
    "llama-lora": llama,
    "resnet": resnet,
}
