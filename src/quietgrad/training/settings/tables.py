"""The tables of a training configuration: what each key means, and its default."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from quietgrad.checks import require_at_most_one
from quietgrad.curvature.pretraining import Labels
from quietgrad.records import Above0, Amount, Count, Several, Whole, judge
from quietgrad.training.files.provenance import Start
from quietgrad.training.tasks.answers.generation import Decoded
from quietgrad.training.tasks.loaded import HeadKind, Tune, Tuning
from quietgrad.training.tasks.text.models import PACKAGED_MINILM

# Keys of a model that say, left at other than their defaults, that more trains than the head.
BELOW_THE_HEAD = (
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "lora_layers",
    "public_head_steps",
    "random_head",
)


@dataclass(frozen=True)
class ModelTable:
    """Which model, and what of it trains.

    Attributes:
        name: ``packaged:minilm``, a folder, or a Hugging Face model name; to generate,
            ``packaged:smollm2`` or a causal language model; for images ``cnn:groupnorm``,
            ``vgg:groupnorm``, ``features:random``, ``image:`` and a folder or Hugging Face name, or
            ``torchvision:`` and the name of one of its classifiers, with tune = "head" or "full";
            for tables ``table:linear`` or ``table:mlp``, with tune = "full".
        tune: "lora", "full" or "head"; left out: what the model is made for (docs/defaults.md).
        head: "mean" (linear, on the mean of token vectors), "layers" (linear, on the means of the
            upper half of the layers and the maximum of the last) or "auto" (the architecture's own
            sequence classifier).
        lora_rank: rank of the adapters, with tune = "lora".
        lora_alpha: scale of the adapters (0: twice the rank).
        lora_targets: names of the modules that get adapters (empty: a default).
        lora_layers: top layers that get adapters (0: all).
        train_layers: with tune = "full", top layers that train; embeddings and the layers below are
            frozen (0: everything trains).
        public_head_steps: fit the head to half of the validation records, which are public, in so
            many steps before private training, and freeze it; the other half validates (0: the head
            trains privately).
        random_head: draw the head at random and freeze it; the layers below learn to meet it, and
            have the whole clipping norm.
        weights: for an image model, file of public initial weights, such as ``quietgrad spectrum``
            writes, or of a model of torchvision its state dict ("": random, or pretrained).
        accept_start: a run's output is no public start, and is refused as model.name or
            model.weights unless its kind is named here: "trained-without-privacy" or
            "epsilons-add".
        max_length: tokens kept of a text; as many as the model has positions for, where those are
            fewer and this is left at its default.
        dropout: probability of every dropout layer; the noise regularises enough, so the default is
            0.
    """

    name: str = PACKAGED_MINILM
    tune: Tune | None = None
    head: HeadKind = "mean"
    lora_rank: Count = 16
    lora_alpha: Whole = 0
    lora_targets: list[str] = field(default_factory=list)
    lora_layers: Whole = 0
    train_layers: Whole = 0
    public_head_steps: Whole = 0
    random_head: bool = False
    weights: str = ""
    accept_start: Literal[""] | Start = ""
    max_length: Count = 64
    dropout: Amount = 0.0

    def __post_init__(self) -> None:
        judge(self)
        if self.dropout >= 1:
            raise ValueError(
                f"dropout={self.dropout!r} leaves nothing of a layer; use a number below 1"
            )
        for name in ("public_head_steps", "random_head"):
            if self.tune == "head" and (value := getattr(self, name)):
                raise ValueError(
                    f"{name}={value!r} freezes the head, and with tune='head' nothing else trains; "
                    "set one of the two"
                )
        if self.public_head_steps and self.random_head:
            raise ValueError(
                f"public_head_steps={self.public_head_steps} fits the head and random_head=True "
                "draws it at random; set one of the two"
            )
        if self.train_layers and self.tune not in ("full", None):
            raise ValueError(
                f"train_layers={self.train_layers} is for tune='full', not {self.tune!r}; use "
                "lora_layers with adapters"
            )

    @property
    def says_adapters(self) -> bool:
        """Whether another key makes sense with tune = "lora" alone, or with "full"."""
        same = replace(ModelTable(), **{key: getattr(self, key) for key in BELOW_THE_HEAD})
        return same != ModelTable()

    @property
    def tuning(self) -> Tuning:
        """What of the model trains.

        Raises:
            ValueError: where that was left out, before ``prepare`` has said it.
        """
        if self.tune is None:
            raise ValueError("tune is left out; set model.tune to 'head', 'lora' or 'full'")
        return Tuning(
            self.tune,
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
        prompt, answer: what a record reads and what it is to write, templates with column names in
            braces; for "generate".
        max_answer_length: tokens kept of an answer; the prompt has the rest of model.max_length.
        decoded: at the end, also let the model write answers (greedily) and compare them: "rouge1",
            "rougeL", "exact_match", or "none".
        decoded_records: how many test records are answered so.
    """

    kind: Literal["classify", "generate"] = "classify"
    prompt: str = "{text}"
    answer: str = " {label}"
    max_answer_length: Count = 32
    decoded: Decoded = "none"
    decoded_records: Count = 200

    def __post_init__(self) -> None:
        judge(self)


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
        text: column of the text; of an image folder's tables, the column of file names.
        label: column of the label.
        labels: the labels to expect (empty: those of the validation and test records, which are
            public; of images those of the test records). A training record with another label stays
            a record and contributes nothing.
        label_separator: between the labels of an image that has several, such as "|"; the loss is
            then the mean of binary cross entropies, the score the mean area under the ROC curve.
        no_label: what stands for none, where an image has several labels.
        validation_fraction: share of the records that validate, by a hash of the text.
        test_fraction: share of the records that test, by a hash of the text; images come with test
            records.
        image_size: pixels a side that images are brought to (0: as they are).
        public_fraction: share of the training images set aside as public and unlabelled, for
            ``quietgrad spectrum``.
        user: column that says whose a record is ("": records are protected, each for itself). Users
            are then protected, each with all records (table ``users``), and a user is wholly in
            the training, the validation or the test part; for texts, answers and tables.
        skip_bad: leave out rows that cannot be read (another number of cells than columns, bytes
            that are not UTF-8, broken JSON), or that lack a text, answer or label, by what each row
            itself says; N is the number of rows that are left. For texts and tables. Without it
            such rows are refused; ``quietgrad check`` lists them.
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
    image_size: Whole = 0
    public_fraction: float = 0.0
    user: str = ""
    skip_bad: bool = False
    public: bool = False

    def __post_init__(self) -> None:
        judge(self)
        twice = next((name for name in self.labels if self.labels.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"labels={self.labels!r} has {twice!r} twice; name each label once")
        if self.test_source and self.test_source == self.source:
            raise ValueError(
                f"test_source={self.test_source!r} is the source itself, whose records are "
                "private; leave it out, and a share of them tests (test_fraction)"
            )


@dataclass(frozen=True)
class PrivacyTable:
    """The guarantee. ``enabled = false`` trains without clipping and noise, for reference: the run
    is marked as not private.

    Attributes:
        enabled: whether to train privately.
        target_epsilon: the epsilon to calibrate for; give this or ``noise_multiplier``.
        target_delta: default 1 / N^1.1, at most 0.01; 1/N and more is refused.
        noise_multiplier: sigma, the noise's standard deviation over C, instead of a target.
        max_grad_norm: C, what a record's (a user's) gradient is clipped to.
    """

    enabled: bool = True
    target_epsilon: Above0 | None = None
    target_delta: float | None = None
    noise_multiplier: Above0 | None = None
    max_grad_norm: Above0 = 1.0

    def __post_init__(self) -> None:
        judge(self)
        both = {"target_epsilon": self.target_epsilon, "noise_multiplier": self.noise_multiplier}
        require_at_most_one(both)


@dataclass(frozen=True)
class SpectrumTable:
    """What ``quietgrad spectrum`` computes from public images; training does not read this table.

    Attributes:
        public: "held-out" (the images set aside by data.public_fraction), or a data source as in
            data.source.
        public_images: how many of them are used, chosen by a hash of their pixels (0: all).
        output: file for the spectrum, which noise.spectrum then names.
        weights_output: file for the initial weights, which model.weights then names.
        simclr_epochs: passes over the public images in pretraining.
        head_epochs: passes in which the head learns the made-up labels.
        made_up_labels: how labels are made up: "clusters" of the embedding, or "random" (the
            paper).
        top: eigenvalues computed one by one.
        hessian_records: images that the Hessian is taken over.
        probes, lanczos_steps: of the quadrature that measures the positive part's mass.
        tail_value: where the tail ends.
        public_seed: of all that is drawn here; it is no secret.
    """

    public: str = "held-out"
    public_images: Whole = 0
    output: str = "spectrum.npz"
    weights_output: str = "public.safetensors"
    simclr_epochs: Whole = 40
    head_epochs: Whole = 20
    made_up_labels: Labels = "clusters"
    top: Several = 200
    hessian_records: Count = 1000
    probes: Several = 4
    lanczos_steps: Several = 60
    tail_value: Above0 = 1e-6
    public_seed: int = 0

    def __post_init__(self) -> None:
        judge(self)


@dataclass(frozen=True)
class TrainingTable:
    """How long, how often, where.

    Attributes:
        expected_batch_size: B, records (users) in a step on average; each is drawn by itself. Left
            out: as large as it helps (docs/defaults.md).
        steps: how many releases; give this or ``epochs``, or neither (docs/defaults.md).
        epochs: expected passes over the records, instead of ``steps``.
        hours: that training may take on this machine: what is left out fits into them, and ``plan``
            warns of what does not.
        eval_every: steps between evaluations on validation records (0: only at the end).
        eval_records: validation records used on the schedule (0: all); the final evaluation uses
            all.
        checkpoint_every: steps between checkpoints.
        run_dir: where everything is written ("": runs/<date-time>).
        device: "auto", "cpu", "cuda" ...
        precision: "float32", or "bfloat16" (autocast; norms and sums stay in float32), which may be
            faster, and whose rounding no bound covers.
        averaging: decay of an exponential average of the weights, such as 0.97 (0: none); free in
            privacy. The average is what is saved, where validation records prefer it.
        cache_frozen_layers: run frozen lower layers once per record instead of once per step, where
            the architecture allows, and ``sharded`` is off.
        sharded: of several processes (torchrun, --nproc) each holds a shard of every parameter, and
            not the whole model (docs/fully_sharded.md); on one process it has no effect but that
            frozen layers are not cached.
        tensorboard: where TensorBoard is installed, write what ``metrics.jsonl`` holds as a file
            that it reads, too.
        seed: reproducible sampling, noise and initialisation; the guarantee then holds only if it
            stays secret and starts one run. Unless data.public: a string of at least 32 hexadecimal
            digits drawn at random, or a whole number of at least 2^127.
    """

    expected_batch_size: Count | None = None
    steps: Count | None = None
    epochs: Above0 | None = None
    hours: Above0 = 2.0
    eval_every: Whole = 10
    eval_records: Whole = 1000
    checkpoint_every: Count = 10
    run_dir: str = ""
    device: str = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    averaging: Amount = 0.0
    cache_frozen_layers: bool = True
    sharded: bool = False
    tensorboard: bool = True
    seed: int | str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        judge(self)
        require_at_most_one({"steps": self.steps, "epochs": self.epochs})
        if self.averaging >= 1:
            raise ValueError(
                f"averaging={self.averaging!r} never takes in a step; use a number below 1, such "
                "as 0.97, or 0 for no average"
            )

    @property
    def caches(self) -> bool:
        """Whether frozen lower layers run once per record: what is cached goes on in a part of the
        model, which is not sharded by itself.
        """
        return self.cache_frozen_layers and not self.sharded
