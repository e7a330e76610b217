"""The shared list of models on which every fast path is compared with the slow oracle. All from
config, with random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

VOCABULARY = 40


@dataclass(frozen=True)
class Case:
    """A model with a loss and a batch: ``build()`` seeds, builds and returns the three."""

    name: str
    build: Callable[[], tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]]

    def __str__(self) -> str:
        return self.name


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def classification(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {k: v for k, v in batch.items() if k != "y"}
    return F.cross_entropy(model(**inputs).logits, batch["y"], reduction="none")


def language_modelling(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Per-example mean over the tokens that are not padding."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[
        :, :-1
    ]
    targets = batch["input_ids"][:, 1:]
    mask = batch["attention_mask"][:, 1:].to(logits.dtype)
    loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (loss * mask).sum(1) / mask.sum(1)


def text_batch(examples: int = 4, length: int = 7, pad: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (examples, length))
    mask = torch.ones_like(ids)
    for i in range(1, examples):  # padding tokens in all but the first
        ids[i, length - i :], mask[i, length - i :] = pad, 0
    return {"input_ids": ids, "attention_mask": mask, "y": torch.randint(0, 3, (examples,))}


class SmallCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 12, 3, dilation=2, padding="same", groups=4, bias=False),
            nn.InstanceNorm2d(12, affine=True),
            nn.ReLU(inplace=True),
            nn.Conv2d(12, 6, (1, 3), padding=(0, 1), padding_mode="circular"),
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))


class BareParameters(nn.Module):
    """Scalar and bare parameters, a parameter used twice, a shared layer, an unused and a frozen
    one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled(6)
        self.shared = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.RMSNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.shared(self.first(x)))
        h = self.norm(self.frozen(torch.tanh(self.shared(h))))
        return self.head(h)


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.shift = nn.Parameter(torch.linspace(-1, 1, width))
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale + self.shift).sin()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(10, 2, batch_first=True)
        self.head = nn.Linear(15, 3)

    def forward(self, ids: Tensor) -> Tensor:
        states, (last, _) = self.lstm(self.embedding(ids))
        attended, _ = self.attention(states, states, states)
        return self.head(torch.cat([attended.mean(1), last[-1]], dim=1))


class Packed(nn.Module):
    """Time first: packed sequences, given states, attention to something else, a bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6, padding_idx=0)
        self.bag = nn.EmbeddingBag(VOCABULARY, 10, padding_idx=0)
        self.gru = nn.GRU(6, 5, num_layers=2, bidirectional=True)
        self.rnn = nn.RNN(10, 5, bias=False, nonlinearity="relu")
        self.attention = nn.MultiheadAttention(10, 2, add_bias_kv=True, kdim=5, vdim=5)
        self.head = nn.Linear(10, 3)

    def forward(self, ids: Tensor) -> Tensor:
        words, length = self.embedding(ids).transpose(0, 1), ids.shape[1]
        packed = pack_padded_sequence(words, (ids != 0).sum(1), enforce_sorted=False)
        states, last = self.gru(packed)
        states, _ = pad_packed_sequence(states, total_length=length)
        again, _ = self.rnn(states, last[:1] + last[-1:])
        attended, _ = self.attention(
            states, again, again, key_padding_mask=ids == 0, need_weights=False
        )
        return self.head(attended.mean(0) + self.bag(ids))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2)
        self.three = nn.Conv3d(1, 3, 2)
        self.bilinear = nn.Bilinear(6, 3, 5)
        self.up = nn.ConvTranspose1d(5, 4, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.one(x).relu().mean(2)
        b = self.three(x.reshape(x.shape[0], 1, 4, 4, -1)).mean(dim=(2, 3, 4))
        return self.head(self.up(self.bilinear(a, b).unsqueeze(2)).mean(2))


def _plain(model: Callable[[], nn.Module], x: Callable[[], Tensor]) -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(0)
        return model(), cross_entropy, {"x": x(), "y": torch.randint(0, 3, (4,))}

    return build


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7),
        nn.Tanh(),
        nn.LayerNorm(7),
        nn.Linear(7, 7, bias=False),
        nn.Sigmoid(),
        nn.Linear(7, 3),
    )


def _hugging_face(kind: str) -> Callable[[], Any]:
    def build() -> Any:
        import transformers as hf

        torch.manual_seed(0)
        encoder = dict(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=24, num_labels=3,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=20,
        )  # fmt: skip
        decoder = dict(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=24, max_position_embeddings=20, pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        )  # fmt: skip
        if kind == "bert":
            return (
                hf.BertForSequenceClassification(hf.BertConfig(**encoder)),
                classification,
                text_batch(),
            )
        if kind == "minilm":  # the real shape of the packaged encoder, 22.7 M parameters
            config = hf.BertConfig(
                vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
                intermediate_size=1536, num_labels=3,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )  # fmt: skip
            return hf.BertForSequenceClassification(config), classification, text_batch()
        if kind == "roberta":
            config = hf.RobertaConfig(**encoder, pad_token_id=0)
            return hf.RobertaForSequenceClassification(config), classification, text_batch()
        if kind == "gpt2":
            config = hf.GPT2Config(
                vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=20,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                bos_token_id=1, eos_token_id=2,
            )  # fmt: skip
            return hf.GPT2LMHeadModel(config), language_modelling, text_batch()
        if kind == "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder)), language_modelling, text_batch()
        if kind == "llama-tied":
            return (
                hf.LlamaForCausalLM(hf.LlamaConfig(**decoder, tie_word_embeddings=True)),
                language_modelling,
                text_batch(),
            )
        if kind == "vit":
            config = hf.ViTConfig(
                hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
                image_size=8, patch_size=4, num_labels=3,
            )  # fmt: skip
            batch = {"pixel_values": torch.randn(4, 3, 8, 8), "y": torch.randint(0, 3, (4,))}
            return hf.ViTForImageClassification(config), classification, batch
        raise AssertionError(kind)

    return build


CASES = [
    Case("mlp", _plain(_mlp, lambda: torch.randn(4, 5))),
    Case(
        "mlp-positions",
        _plain(lambda: nn.Sequential(_mlp(), Mean(1)), lambda: torch.randn(4, 6, 5)),
    ),
    Case("cnn-groupnorm", _plain(SmallCnn, lambda: torch.randn(4, 3, 9, 8))),
    Case("bare-parameters", _plain(BareParameters, lambda: torch.randn(4, 6))),
    Case("recurrent-attention", _plain(Recurrent, lambda: text_batch()["input_ids"])),
    Case("packed-cross-attention", _plain(Packed, lambda: text_batch()["input_ids"].flip(0))),
    Case("conv1d-conv3d-fallback", _plain(Volumes, lambda: torch.randn(4, 4, 12))),
    *[
        Case(kind, _hugging_face(kind))
        for kind in ("bert", "minilm", "roberta", "gpt2", "llama", "llama-tied", "vit")
    ],
]


class Mean(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dim)
