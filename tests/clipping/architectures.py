"""The architectures that people fine-tune or train from scratch, tiny and with random weights, as
cases for the slow oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import VOCABULARY, Case, classification, cross_entropy, language_modelling, text_batch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients, oracle_norms

# ------------------------------------------------------------------------------------------------
# transformers

ENCODER = dict(
    vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=24, num_labels=3,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=20,
)  # fmt: skip
DECODER = dict(
    vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=24,
    max_position_embeddings=20, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    attention_dropout=0.0,
)  # fmt: skip


def translation(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Per-example mean over the target tokens that are not padding."""
    labels = batch["labels"]
    shifted = F.pad(labels[:, :-1], (1, 0))  # the decoder starts from the padding token, 0
    inputs = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "decoder_input_ids": shifted,
    }
    logits = model(**inputs).logits
    loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    mask = (labels != 0).to(loss.dtype)
    return (loss * mask).sum(1) / mask.sum(1)


def translation_batch() -> dict[str, Tensor]:
    labels = text_batch(length=5)["input_ids"]
    batch = text_batch()
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "labels": labels,
    }


def _built(
    model: Callable[[], nn.Module], loss: Callable[..., Tensor], batch: Callable[[], Any]
) -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(0)
        return model(), loss, batch()

    return build


def _decoder(kind: str, attention: str = "sdpa", **settings: Any) -> Case:
    def model() -> nn.Module:
        import transformers as hf

        config = getattr(hf, f"{kind}Config")(**DECODER, **settings)
        return hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)

    name = {"Llama": f"llama-{attention}"}.get(kind, kind.lower())
    return Case(name, _built(model, language_modelling, text_batch))


def _distilbert() -> nn.Module:
    import transformers as hf

    config = hf.DistilBertConfig(
        vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=24, num_labels=3,
        max_position_embeddings=20,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    return hf.DistilBertForSequenceClassification(config)


def _t5(frozen_bias: bool) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        import transformers as hf

        config = hf.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16, dropout_rate=0.0, pad_token_id=0, eos_token_id=2,
            decoder_start_token_id=0,
        )  # fmt: skip
        t5 = hf.T5ForConditionalGeneration(config)
        if frozen_bias:
            for name, parameter in t5.named_parameters():
                parameter.requires_grad_("relative_attention_bias" not in name)
        return t5

    return model


def checkpointed_bert(reentrant: bool) -> nn.Module:
    """Gradient checkpointing is active in training mode only; all dropout is 0, so that mode
    changes nothing else.
    """
    model = plain_bert()
    # transformers is renaming the method: the old name warns in newer releases, older ones have no
    # other.
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": reentrant})
    return model


def plain_bert() -> nn.Module:
    import transformers as hf

    return hf.BertForSequenceClassification(hf.BertConfig(**ENCODER)).train()


# ------------------------------------------------------------------------------------------------
# images


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a skip connection; the skip is a 1x1 convolution where the shape
    changes.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, width)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            self.skip = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.GroupNorm(2, width)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        h += self.skip(x)  # in place, as torchvision does
        return self.relu(h)


def resnet18() -> nn.Sequential:
    """Two blocks in each of four stages, GroupNorm for BatchNorm, a sixteenth of the widths."""
    stages: list[nn.Module] = [
        nn.Conv2d(3, 4, 7, 2, padding=3, bias=False),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
    ]
    stages.append(nn.MaxPool2d(3, 2, padding=1))
    for before, width in [(4, 4), (4, 8), (8, 16), (16, 32)]:
        stride = 1 if before == width else 2
        stages += [ResidualBlock(before, width, stride), ResidualBlock(width, width, 1)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))


def noisecurve_cnn(pooling: bool) -> nn.Sequential:
    """NoiseCurve, table 4: (a) with GroupNorm, (b) with max-pooling. The table leaves groups and
    dense size open.
    """
    layers: list[nn.Module] = []
    for channels, width, stride in [(3, 16, 1), (16, 32, 2), (32, 64, 2)]:
        layers.append(nn.Conv2d(channels, width, 3, stride, padding=1))
        if not pooling:
            layers.append(nn.GroupNorm(4, width))
        layers.append(nn.ReLU())
        if pooling and width < 64:
            layers.append(nn.MaxPool2d(2))
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 24), nn.ReLU(), nn.Linear(24, 3)]
    return nn.Sequential(*layers, *head)


def tanh_cnn() -> nn.Sequential:
    """28x28: large kernels, overlapping max-pooling, tanh, as usual for MNIST under differential
    privacy.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2),
        nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 3),
    )  # fmt: skip


def vgg() -> nn.Sequential:
    """Three stages of two convolutions, each closed by max-pooling, and two dense layers; a quarter
    of the usual widths.
    """
    layers: list[nn.Module] = []
    channels = 3
    for width in (8, 16, 32):
        for _ in range(2):
            layers += [
                nn.Conv2d(channels, width, 3, padding=1),
                nn.GroupNorm(4, width),
                nn.ReLU(inplace=True),
            ]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(inplace=True), nn.Linear(32, 3)
    )


def _images(name: str, model: Callable[[], nn.Module], *shape: int) -> Case:
    return Case(
        name,
        _built(
            model,
            cross_entropy,
            lambda: {"x": torch.randn(4, *shape), "y": torch.randint(0, 3, (4,))},
        ),
    )


# ------------------------------------------------------------------------------------------------
# the list

ARCHITECTURES = [
    Case("distilbert", _built(_distilbert, classification, text_batch)),
    _decoder("Llama", "sdpa"),
    _decoder("Llama", "eager"),
    _decoder("Qwen3", head_dim=8, tie_word_embeddings=False),
    _decoder("Mistral", sliding_window=3),  # shorter than the text, so that it masks something
    _decoder("Gemma", head_dim=8, tie_word_embeddings=True),
    Case("t5", _built(_t5(False), translation, translation_batch)),
    Case("t5-frozen-bias", _built(_t5(True), translation, translation_batch)),
    Case("bert-checkpointed", _built(lambda: checkpointed_bert(False), classification, text_batch)),
    Case(
        "bert-checkpointed-reentrant",
        _built(lambda: checkpointed_bert(True), classification, text_batch),
    ),
    _images("resnet18-groupnorm", resnet18, 3, 32, 32),
    _images("noisecurve-cnn-groupnorm", lambda: noisecurve_cnn(False), 3, 32, 32),
    _images("noisecurve-cnn-maxpool", lambda: noisecurve_cnn(True), 3, 32, 32),
    _images("tanh-cnn", tanh_cnn, 1, 28, 28),
    _images("vgg-groupnorm", vgg, 3, 32, 32),
]

# What torch.autograd.grad, and with it the oracle, cannot differentiate -> the same model without
# that feature.
TWINS = {
    "bert-checkpointed-reentrant": Case("bert", _built(plain_bert, classification, text_batch))
}

# Images: numbers are places in the nn.Sequential; among the targets are strided, 1x1 and 4x4
# convolutions and dense layers.
LORA_TARGETS: dict[str, str | list[str]] = {
    "distilbert": ["q_lin", "v_lin", "lin1"],
    "llama-sdpa": ["q_proj", "v_proj", "down_proj"],
    "llama-eager": ["q_proj", "v_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj", "v_proj"],
    "mistral": "all-linear",
    "gemma": ["q_proj", "v_proj", "gate_proj"],
    "t5": ["q", "v", "wi"],
    "t5-frozen-bias": ["q", "v", "wi"],
    "bert-checkpointed": ["query", "value"],
    "bert-checkpointed-reentrant": ["query", "value"],
    "resnet18-groupnorm": r".*\.conv[12]|.*\.skip\.0|14",
    "noisecurve-cnn-groupnorm": ["3", "6", "11"],
    "noisecurve-cnn-maxpool": ["3", "6", "10"],
    "tanh-cnn": ["3", "7"],
    "vgg-groupnorm": ["3", "7", "22"],
}


def with_lora(model: nn.Module, targets: str | list[str]) -> nn.Module:
    """Adapters of rank 3 with both factors random, so that both get a gradient."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=3, target_modules=targets, lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(model, config)


# ------------------------------------------------------------------------------------------------
# comparison in two steps


@dataclass(frozen=True)
class Expected:
    """What the oracle says: at clipping norm ``clip``, some examples are
    clipped and some are not.
    """

    norms: Tensor
    clip: float
    gradients: dict[str, Tensor]


def ask_oracle(model: nn.Module, loss: Callable[..., Tensor], batch: Any) -> Expected:
    """The per-example gradients are gone on return, which is what lets a large model fit."""
    gradients = oracle_gradients(model, loss, batch)
    norms = oracle_norms(gradients)
    clip = float(norms.mean())
    return Expected(norms, clip, oracle_clipped_sum(gradients, clip))


def assert_equal_to(
    expected: Expected,
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Any,
    physical_batch_size: int | None = None,
    tolerance: float = 1e-5,
) -> None:
    """The checks of ``assert_equal_to_oracle``, for an oracle that was asked before, or about
    another model.
    """
    bound = Clipper(expected.clip, "exact", physical_batch_size=physical_batch_size).bind(
        model, loss
    )  # one look of the guard for both
    norms = bound.norms(batch, step=0)
    torch.testing.assert_close(norms.double(), expected.norms.double(), rtol=tolerance, atol=0)
    actual = bound.clip(batch, step=0).gradients
    assert actual.keys() == expected.gradients.keys()
    size = max(float(g.norm()) for g in expected.gradients.values())
    for name, g in expected.gradients.items():
        error = float((actual[name] - g).norm()) / max(float(g.norm()), 1e-2 * size)
        assert error < tolerance, (name, error)
