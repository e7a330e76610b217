"""The tables of a training configuration: what each key means, and its default."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from quietgrad.training.tasks.loaded import Tune, Tuning
from quietgrad.training.tasks.text.models import PACKAGED_MINILM


@dataclass(frozen=True)
class ModelTable:
    """Which model, and what of it trains.

    Attributes:
        name: ``packaged:minilm``, a folder, or a Hugging Face model name; to generate,
            ``packaged:smollm2`` or a causal language model; for images ``cnn:groupnorm``,
            ``vgg:groupnorm``, ``features:random``, or ``image:`` and a folder or Hugging Face name;
            for tables ``table:linear`` or ``table:mlp``, with tune = "full".
        tune: "lora", "full" or "head".
        head: "mean" (mean of token vectors, linear) or "auto" (the architecture's own sequence
            classifier).
        lora_rank, lora_alpha, lora_targets, lora_layers: rank, scale (0: twice the rank), module
        names (empty: a default), top layers with adapters (0: all).
        train_layers: with tune = "full", top layers that train; embeddings and the layers below are
            frozen (0: everything trains).
        public_head_steps: fit the head to half of the validation records, which are public, in so
            many steps before private training, and freeze it; the other half validates (0: the head
            trains privately).
        random_head: draw the head at random and freeze it; the layers below learn to meet it, and
            have the whole clipping norm.
        weights: for an image model, file of public initial weights, such as ``quietgrad spectrum``
            writes ("": random).
        accept_start: a run's output is no public start, and is refused as model.name or
            model.weights unless its kind is named here: "trained-without-privacy" or
            "epsilons-add".
        max_length: tokens kept of a text.
        dropout: probability of every dropout layer; the noise regularises enough, so the default is
            0.
    """

    name: str = PACKAGED_MINILM
    tune: str = "lora"
    head: str = "mean"
    lora_rank: int = 16
    lora_alpha: int = 0
    lora_targets: list[str] = field(default_factory=list)
    lora_layers: int = 0
    train_layers: int = 0
    public_head_steps: int = 0
    random_head: bool = False
    weights: str = ""
    accept_start: str = ""
    max_length: int = 64
    dropout: float = 0.0

    @property
    def tuning(self) -> Tuning:
        """What of the model trains."""
        return Tuning(
            cast(Tune, self.tune),
            self.lora_rank,
            self.lora_alpha,
            tuple(self.lora_targets),
            self.lora_layers,
            self.train_layers,
        )


@dataclass(frozen=True)
class TaskTable:
    """What is learnt from a record.

    Attributes:
        kind: "classify", or "generate": a causal language model learns the answers; the loss is the
            mean cross entropy over a record's answer tokens, the score the share of them predicted
            right.
        prompt, answer: templates with column names in braces, for "generate".
        max_answer_length: tokens kept of an answer; the prompt has the rest of model.max_length.
        decoded: at the end, also let the model write answers (greedily) and compare them: "rouge1",
            "rougeL", "exact_match", or "none".
        decoded_records: how many test records are answered so.
    """

    kind: str = "classify"
    prompt: str = "{text}"
    answer: str = " {label}"
    max_answer_length: int = 32
    decoded: str = "none"
    decoded_records: int = 200


@dataclass(frozen=True)
class DataTable:
    """Which records. Validation and test records are declared public: their accuracy is published
    without noise.

    Attributes:
        source: ``packaged:tweets``, a CSV/TSV/JSONL/JSON/Parquet file, or a Hugging Face data set
            (NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:SPLIT); for images
            ``packaged:fashion-mnist``, a folder with files of MNIST's format, a folder with
            train.csv and test.csv or with class folders in train and test (or val), or
            ``torchvision:NAME:FOLDER``.
        test_source: test records in a file or data set of their own ("": a share of ``source``);
            for texts.
        text_pair: column of the second text, where a record is a pair ("": it is not).
        text, label: column names; of an image folder's tables, "text" is the column of file names.
        labels: the labels to expect (empty: those of the validation and test records, which are
            public; of images those of the test records). A training record with another label stays
            a record and contributes nothing.
        label_separator, no_label: for images with several labels, such as "|", and what stands for
            none; the loss is then the mean of binary cross entropies, the score the mean area under
            the ROC curve.
        validation_fraction, test_fraction: shares of the records, by a hash of the text; images
            come with test records.
        image_size: pixels a side that images are brought to (0: as they are).
        public_fraction: share of the training images set aside as public and unlabelled, for
            ``quietgrad spectrum``.
        public: declares that the training records, too, need no protection: short seeds and
            repeated ones are then allowed, and every epsilon is marked so.
    """

    source: str = "packaged:tweets"
    test_source: str = ""
    text: str = "text"
    text_pair: str = ""
    label: str = "label"
    labels: list[str] = field(default_factory=list)
    label_separator: str = ""
    no_label: str = ""
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    image_size: int = 0
    public_fraction: float = 0.0
    public: bool = False


@dataclass(frozen=True)
class PrivacyTable:
    """The guarantee. ``enabled = false`` trains without clipping and noise, for reference: the run
    is marked as not private.

    Attributes:
        enabled: whether to train privately.
        target_epsilon: the epsilon to calibrate for; give this or ``noise_multiplier``.
        target_delta: default 1 / N^1.1, at most 0.01; 1/N and more is refused.
        noise_multiplier: sigma, instead of a target.
        max_grad_norm: C.
    """

    enabled: bool = True
    target_epsilon: float | None = None
    target_delta: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class ClippingTable:
    """How per-example norms are taken.

    Attributes:
        estimator: "auto", "exact", "materialized", "ghost", "hutch" or "hutch++".
        sketch_dim: k of the sketches.
        max_physical_batch_size: examples per forward pass; no effect on privacy.
    """

    estimator: str = "auto"
    sketch_dim: int = 32
    max_physical_batch_size: int = 64


@dataclass(frozen=True)
class NoiseTable:
    """How the noise of different steps hangs together.

    Attributes:
        method: "independent", "banded" (correlated for prefix sums: DP-BandMF) or "noisecurve" (for
            the curvature of public data).
        bands: b; 0 chooses b from public facts, 1 is independent noise.
        spectrum: file that ``quietgrad spectrum`` wrote, for "noisecurve".
        curvature_factor: what the spectrum's eigenvalues are multiplied by, because clipped
            gradients change less than gradients do; 0 takes the mean of min(1, C / norm) over the
            public images' gradients.
        floor: weight of a white part in the curvature workload, against noise that the quadratic
            model does not see: see ``quietgrad.noise.Curvature``.
        horizon: "final" (the loss after the last step, as in the paper), "all" (after every step)
            or "both" (the mean of the two), see ``quietgrad.noise.Curvature``.
        clamp: largest learning rate times eigenvalue that the workload believes, see
            ``quietgrad.noise.Curvature``: 2 is the paper's, 1 was better here.
        family: "auto", "banded" or "toeplitz", see ``quietgrad.noise.mixing_matrix``.
        memory: "rows" (b - 1 copies of the trainable parameters) or "regenerate" (none, more time).
        source: "keyed", or "secure" for numbers from a cryptographic stream on a grid
            (docs/privacy.md), which needs the extra ``secure``.
    """

    method: str = "independent"
    bands: int = 0
    spectrum: str = ""
    curvature_factor: float = 0.0
    floor: float = 0.0
    horizon: str = "both"
    clamp: float = 1.0
    family: str = "auto"
    memory: str = "rows"
    source: str = "keyed"


@dataclass(frozen=True)
class SpectrumTable:
    """What ``quietgrad spectrum`` computes from public images; training does not read this table.

    Attributes:
        public: "held-out" (the images set aside by data.public_fraction), or a data source as in
            data.source.
        public_images: how many of them are used, chosen by a hash of their pixels (0: all).
        output, weights_output: files for the spectrum and the initial weights.
        simclr_epochs, head_epochs: of pretraining, and of the head on made-up labels.
        made_up_labels: how labels are made up: "clusters" of the embedding, or "random" (the
            paper).
        top: eigenvalues computed one by one.
        hessian_records: images that the Hessian is taken over.
        probes, lanczos_steps: of the quadrature that measures the positive part's mass.
        tail_value: where the tail ends.
        public_seed: of all of it.
    """

    public: str = "held-out"
    public_images: int = 0
    output: str = "spectrum.npz"
    weights_output: str = "public.safetensors"
    simclr_epochs: int = 40
    head_epochs: int = 20
    made_up_labels: str = "clusters"
    top: int = 200
    hessian_records: int = 1000
    probes: int = 4
    lanczos_steps: int = 60
    tail_value: float = 1e-6
    public_seed: int = 0


@dataclass(frozen=True)
class OptimizerTable:
    """The optimiser.

    Attributes:
        name: "adamw" or "sgd".
        learning_rate: of the encoder or adapters.
        head_learning_rate: of the head (None: as ``learning_rate``).
        weight_decay: decoupled for AdamW.
        momentum: for SGD.
        warmup_steps: linear warm-up.
        schedule: "linear" (after the warm-up the rate falls linearly to a twentieth) or "constant".
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    head_learning_rate: float | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    warmup_steps: int = 5
    schedule: str = "linear"


@dataclass(frozen=True)
class TrainingTable:
    """How long, how often, where.

    Attributes:
        expected_batch_size: B.
        steps, epochs: give one.
        eval_every: steps between evaluations on validation records (0: only at the end).
        eval_records: validation records used on the schedule (0: all); the final evaluation uses
            all.
        checkpoint_every: steps between checkpoints.
        run_dir: where everything is written ("": runs/<date-time>).
        device: "auto", "cpu", "cuda" ...
        precision: "float32", "bfloat16" (autocast; norms and sums stay in float32) or "auto"
            (bfloat16 where the processor has it).
        cache_frozen_layers: run frozen lower layers once per record instead of once per step, where
            the architecture allows.
        seed: reproducible sampling, noise and initialisation; the guarantee then holds only if it
            stays secret and starts one run. Unless data.public: a string of at least 32 hexadecimal
            digits drawn at random, or a whole number of at least 2^127.
    """

    expected_batch_size: int | None = None
    steps: int | None = None
    epochs: float | None = None
    eval_every: int = 10
    eval_records: int = 1000
    checkpoint_every: int = 10
    run_dir: str = ""
    device: str = "auto"
    precision: str = "auto"
    cache_frozen_layers: bool = True
    seed: int | str | None = field(default=None, repr=False)
