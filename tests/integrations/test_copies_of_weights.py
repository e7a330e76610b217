"""Copies of weights that a private run of this process trained are other parameters with the same
values: the epsilons add for them, too.
"""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import private_trainers
import pytest
import torch
import torch.nn.functional as F
from lightning_modules import ADVICE, Small
from lightning_modules import records as tensors
from lightning_modules import trainer as lightning_trainer
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from quietgrad import PrivacyConfig
from quietgrad.accounting import epsilon
from quietgrad.averaging import ExponentialAverage
from quietgrad.checks import SettingsWarning
from quietgrad.events import PoissonGaussian
from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.plan.session import copies
from quietgrad.plan.session import trained as of_runs
from quietgrad.plan.session.trained import Starts

OWN = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=20, steps=4)
SAID = "trained by another private run of this process.*the epsilons and deltas add"
ADDS = "whose epsilon adds to this one's"
pytestmark = [*ADVICE, pytest.mark.usefixtures("examined_once")]


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trained(
    model: nn.Module,
    ledger: Path | None = None,
    steps: int | None = None,
    rate: float = 0.1,
    copied_at: int = 0,
    **changes: Any,
) -> nn.Module:
    """Trains in a loop of releases; the model, or a copy of it after ``copied_at`` of them."""
    x, y = tensors().tensors
    optimizer, copied = torch.optim.SGD(model.parameters(), lr=rate), model
    with replace(OWN, **changes).build(len(x)).start(ledger) as run:
        for indices in run.batches(steps):
            run.backward(model, loss, (x[indices], y[indices]))
            optimizer.step()
            if run.released == copied_at:
                copied = copy.deepcopy(model)
    return copied


def loaded(state: dict[str, Tensor]) -> nn.Module:
    model = Small().net
    model.load_state_dict(state)
    return model


def by_file() -> nn.Module:
    file = io.BytesIO()
    torch.save(trained(Small().net), file)
    file.seek(0)
    read: nn.Module = torch.load(file, weights_only=False)
    return read


def of_a_part() -> nn.Module:
    """The first layer alone, under a new one."""
    first = next(m for m in trained(Small().net).modules() if isinstance(m, nn.Linear))
    return nn.Sequential(copy.deepcopy(first), nn.Tanh(), nn.Linear(first.out_features, 2))


def averaged(kept: bool = True) -> nn.Module:
    """New weights, of an average's state that was read into theirs."""
    x, y = tensors().tensors
    model = Small().net
    optimizer, average = torch.optim.SGD(model.parameters(), lr=0.1), ExponentialAverage(model)
    with OWN.build(len(x)).start() as run:
        for indices in run.batches():
            run.backward(model, loss, (x[indices], y[indices]))
            optimizer.step()
            average.update()
    state = copy.deepcopy(average.state_dict())
    if not kept:
        del model, average, optimizer
        gc.collect()
    other = Small().net
    copied = ExponentialAverage(other)
    copied.load_state_dict(state)
    copied.write()
    return other


COPIES: dict[str, Callable[[], nn.Module]] = {
    "deep": lambda: copy.deepcopy(trained(Small().net)),
    "by its state": lambda: loaded(trained(Small().net).state_dict()),
    "in another precision": lambda: copy.deepcopy(trained(Small().net)).double().float(),
    "by a file": by_file,
    "within the run": lambda: trained(Small().net, copied_at=2),
    "a part": of_a_part,
    "an average": averaged,
    "an average of what is gone": lambda: averaged(kept=False),
    "of a copy that a run without a release met": lambda: copy.deepcopy(unreleased()),
}


def unreleased() -> nn.Module:
    """A copy that another run has clipped for, and released nothing."""
    (x, y), model = tensors().tensors, copy.deepcopy(trained(Small().net))
    with OWN.build(len(x)).start() as run, warnings.catch_warnings():
        warnings.simplefilter("ignore", SettingsWarning)
        indices = next(run.batches())
        run.clip(model, loss, (x[indices], y[indices]))
    return model


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_what_a_run_trained_is_no_public_start(kind: str) -> None:
    # Before: epsilon of four releases, 1.4, for weights that had seen eight of the same records.
    model = COPIES[kind]()
    with pytest.warns(SettingsWarning, match=SAID):
        trained(model)


def test_without_its_values_a_copy_passes_for_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "digest_of", lambda _: None)
    trained(copy.deepcopy(trained(Small().net)))


def started_again() -> nn.Module:
    model = Small().net
    start = copy.deepcopy(model.state_dict())
    trained(model)
    return loaded(start)


def unmoved() -> nn.Module:
    """Of a run whose optimiser moved nothing: what it holds is what it began with."""
    return copy.deepcopy(trained(Small().net, rate=0.0))


def of_public_data() -> nn.Module:
    """A private run goes on with what public data made, and a copy is of before that."""
    model = trained(Small().net, seed=1, data_are_public=True)
    copied = copy.deepcopy(model)
    trained(model)
    return copied


@pytest.mark.parametrize("made", [started_again, unmoved, of_public_data])
def test_what_no_private_run_changed_says_nothing(made: Callable[[], nn.Module]) -> None:
    model = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model)


def test_models_of_one_start_say_nothing() -> None:
    first = Small().net
    others = [copy.deepcopy(first) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (first, *others):
            trained(model)


def test_a_run_that_goes_on_with_a_copy_is_one_run(tmp_path: Path) -> None:
    ledger, model = tmp_path / "ledger.jsonl", Small().net
    trained(model, ledger, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(loaded(model.state_dict()), ledger)


def test_a_run_that_leaves_a_tensor_as_it_was_does_not_take_it_for_its_own() -> None:
    """A copy is of the run that made its values, whoever trained its original since."""
    model = trained(Small().net)
    copied = copy.deepcopy(model)
    with pytest.warns(SettingsWarning, match=SAID):
        trained(model, rate=0.0)
    with pytest.warns(SettingsWarning, match=SAID) as said:
        trained(copied)
    assert len([one for one in said if "another private run" in str(one.message)]) == 1


def test_a_trainer_refuses_a_copy_and_tells_of_it_once(tmp_path: Path) -> None:
    # Before: accepted, and its model card told the second epsilon alone.
    model = private_trainers.classifier()
    private_trainers.trainer(tmp_path / "one", model=model, privacy=OWN).train()
    copied = copy.deepcopy(model)
    with pytest.raises(ValueError, match=ADDS):
        private_trainers.trainer(tmp_path / "two", model=copied, privacy=OWN)
    adding = {"privacy": OWN, "accept_start": "epsilons-add"}
    second = private_trainers.trainer(tmp_path / "two", model=copied, **adding)
    second.train()
    assert [one["steps"] for one in second._session.started_from] == [4]


def test_a_public_file_hides_no_copy(tmp_path: Path) -> None:
    # Before: accepted, and the first private run in no record: a model that was made of a folder
    # with a record was not looked at.
    public = private_trainers.trainer(tmp_path / "public")
    public.train()
    public.save_model(str(tmp_path / "saved"))
    trained: Any = private_trainers.classifier()
    private_trainers.trainer(tmp_path / "one", model=trained, privacy=OWN).train()
    model = type(trained).from_pretrained(tmp_path / "saved")
    private_trainers.trainer(tmp_path / "two", model=model, privacy=OWN)  # a public start
    model.load_state_dict(trained.state_dict())
    with pytest.raises(ValueError, match=ADDS):
        private_trainers.trainer(tmp_path / "three", model=model, privacy=OWN)


def test_a_resumed_trainer_is_given_a_copy(tmp_path: Path) -> None:
    model = private_trainers.classifier()
    stopped = private_trainers.trainer(
        tmp_path, model=model, privacy=OWN, callbacks=[private_trainers.StopAt(2)]
    )
    stopped.train()
    again = private_trainers.trainer(tmp_path, model=copy.deepcopy(model), privacy=OWN)
    again.train(resume_from_checkpoint=True)
    assert not again._session.started_from


def test_adapters_that_were_saved_or_merged_and_copied_are_known(tmp_path: Path) -> None:
    adapters = LoraConfig(r=2, target_modules=["query", "value"])
    model: Any = get_peft_model(private_trainers.classifier(), adapters)
    private_trainers.trainer(tmp_path / "one", model=model, privacy=OWN).train()
    model.save_pretrained(tmp_path / "adapters")
    again = PeftModel.from_pretrained(
        private_trainers.classifier(), str(tmp_path / "adapters"), is_trainable=True
    )
    merged = model.merge_and_unload()
    copied = private_trainers.classifier()
    copied.load_state_dict(merged.state_dict())
    for start in (again, copied):
        with pytest.raises(ValueError, match=ADDS):
            private_trainers.trainer(tmp_path / "two", model=start, privacy=OWN)


@pytest.mark.parametrize("task", [None, "SEQ_CLS"])
def test_saved_adapters_say_what_they_are_in_another_process(
    task: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Before: accepted: PEFT keeps no path of where adapters were read, which a model's name tells.
    adapters = LoraConfig(r=2, target_modules=["query", "value"], task_type=task)
    model: Any = get_peft_model(private_trainers.classifier(), adapters)
    trained = private_trainers.trainer(tmp_path / "one", model=model, privacy=OWN)
    trained.train()
    trained.save_model(str(tmp_path / "saved"))
    monkeypatch.setattr(copies, "digest_of", lambda _: None)  # as in another process

    def read(folder: str) -> Any:
        base = private_trainers.classifier()
        return PeftModel.from_pretrained(base, str(tmp_path / folder), is_trainable=True)

    read("saved").save_pretrained(tmp_path / "again")  # by PEFT alone, which keeps it with a task
    for folder in ("saved", "again") if task else ("saved",):
        with pytest.raises(ValueError, match=f"model has adapters.*{ADDS}"):
            private_trainers.trainer(tmp_path / "two", model=read(folder), privacy=OWN)
    adding = {"privacy": OWN, "accept_start": "epsilons-add"}
    second = private_trainers.trainer(tmp_path / "two", model=read("saved"), **adding)
    assert [one["steps"] for one in second._session.started_from] == [4]


def test_saved_adapters_with_a_name_say_it_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Before: accepted: they are saved in a folder of their own, which was not marked.
    adapters = LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    model: Any = get_peft_model(private_trainers.classifier(), adapters, adapter_name="mine")
    trained = private_trainers.trainer(tmp_path / "one", model=model, privacy=OWN)
    trained.train()
    other = tmp_path / "saved" / "other" / "adapter_config.json"  # of somebody else
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    trained.save_model(str(tmp_path / "saved"))
    assert other.read_text() == "{}"
    monkeypatch.setattr(copies, "digest_of", lambda _: None)  # as in another process
    base, place = private_trainers.classifier(), str(tmp_path / "saved" / "mine")
    again = PeftModel.from_pretrained(base, place, is_trainable=True)
    with pytest.raises(ValueError, match=f"model has adapters.*{ADDS}"):
        private_trainers.trainer(tmp_path / "two", model=again, privacy=OWN)


def test_a_copied_network_of_a_lightning_module_is_no_silent_start(tmp_path: Path) -> None:
    first, second = Small(privacy=OWN), Small(privacy=OWN)
    lightning_trainer(tmp_path / "one").fit(first, tensors())
    second.net.load_state_dict(first.net.state_dict())
    with pytest.raises(ValueError, match=ADDS):
        lightning_trainer(tmp_path / "two").fit(second, tensors())


def scripted(model: nn.Module, engine: PrivacyEngine | None = None) -> PrivacyEngine:
    """As an Opacus script trains: five steps."""
    engine = PrivacyEngine() if engine is None else engine
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(tensors(), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
    return engine


def test_an_engine_counts_what_another_released_on_the_original() -> None:
    # Before: the epsilon of five releases, of weights that had seen ten.
    model = Small().net
    scripted(model)
    with pytest.warns(SettingsWarning, match="another PrivacyEngine.*counted here too"):
        second = scripted(copy.deepcopy(model))
    ten = epsilon(PoissonGaussian(1.0, 0.2, 10), 1e-3)
    assert second.get_epsilon(1e-3) == pytest.approx(ten)


def test_an_engine_that_loaded_a_checkpoint_counts_it_once_and_says_nothing(tmp_path: Path) -> None:
    model = Small().net
    scripted(model).save_checkpoint(path=tmp_path / "saved.pt", module=model)
    second, new = PrivacyEngine(), Small().net
    second.load_checkpoint(path=tmp_path / "saved.pt", module=new)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scripted(new, second)
    ten = epsilon(PoissonGaussian(1.0, 0.2, 10), 1e-3)
    assert second.get_epsilon(1e-3) == pytest.approx(ten)


def test_digests_are_of_values_that_others_do_not_have_by_chance() -> None:
    assert copies.digest_of(torch.zeros(100)) is None
    assert copies.digest_of(torch.tensor([0.1, 0.2, 0.3])) is None
    assert copies.digest_of(torch.full((9,), torch.nan)) is None
    assert copies.digest_of(torch.empty(9, device="meta")) is None
    one = torch.arange(9.0)
    assert copies.digest_of(one) == copies.digest_of(one.clone().view(3, 3))
    assert copies.digest_of(one) != copies.digest_of(one + 1)


def test_what_lies_otherwise_is_not_copied_for_a_look() -> None:
    values = torch.randn(33, 71)
    assert copies.digest_of(values.T.contiguous().T) == copies.digest_of(values)
    huge = torch.randn(1, 64).expand(2**40, 64)  # flattened it would take 256 TiB
    assert copies.some_of(huge) == (repr(float(huge[0, 0])),) * copies.LOOKED_AT


def test_models_in_turn_are_looked_at_once_and_all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = tensors().tensors
    models = [Small().net, Small().net]
    looked: list[nn.Module] = []
    look = of_runs.earlier_runs

    def counted(model: nn.Module, own: Any) -> Any:
        looked.append(model)
        return look(model, own)

    monkeypatch.setattr(of_runs, "earlier_runs", counted)
    with OWN.build(len(x)).start() as run:
        for number, indices in enumerate(run.batches()):
            model = models[number % 2]
            run.backward(model, loss, (x[indices], y[indices]))
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert [m is models[i] for i, m in enumerate(looked)] == [True, True]
    # Not the largest tensor, which is noted at every release; and what was copied is no more.
    layers = [[m for m in model if isinstance(m, nn.Linear)] for model in models]
    parts = [copy.deepcopy(min(some, key=lambda m: m.weight.numel())) for some in layers]
    for p in (p for model in models for p in model.parameters()):
        p.data.zero_()
    for part in parts:
        assert of_runs.runs_of(part)


def test_a_layer_without_weights_yet_is_refused_with_the_remedy() -> None:
    # Before: torch's error of a parameter that has no size.
    with pytest.raises(ValueError, match="call the model once on a made-up record"):
        trained(nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.Linear(3, 2)))


def test_runs_that_begin_in_other_threads_disturb_no_look() -> None:
    """Before: "dictionary changed size during iteration". Here one begins in the middle of it."""
    model, begins = trained(Small().net), [Small().net]
    another = of_runs.Trained("another", lambda _: {})

    class Meanwhile(nn.Parameter):
        def _fix_weakref(self) -> None:  # called where it is looked at
            while begins:
                of_runs.note_trained(begins.pop(), another)

    beside = nn.Linear(2, 2)
    beside.weight = Meanwhile(torch.ones(2, 2))
    of_runs.note_trained(beside, another)
    assert len(of_runs.runs_of(copy.deepcopy(model))) == 1
    assert not begins


def test_a_start_does_not_hold_its_model() -> None:
    model = Small().net
    starts = Starts("a run", OWN.build(100))
    starts.met(model)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None
    starts.released(1)
    starts.over()


@pytest.mark.filterwarnings("ignore:the model was trained by another private run")
def test_weights_that_are_loaded_into_a_trained_model_need_a_new_one(tmp_path: Path) -> None:
    """What they were made of is not known, and an optimiser may hold the run's releases: they count
    as the run's, and the message says what to do instead.
    """
    new_model = "begin with new weights in a new model .*in a new process"
    public = {name: torch.randn_like(value) for name, value in Small().net.state_dict().items()}
    model = trained(Small().net)
    model.load_state_dict(public)
    with pytest.warns(SettingsWarning, match=new_model):
        trained(model)
    module = Small(privacy=OWN)
    module.net = model
    with pytest.raises(ValueError, match=new_model):
        lightning_trainer(tmp_path / "one").fit(module, tensors())
    classifier = private_trainers.classifier()
    start = copy.deepcopy(classifier.state_dict())
    private_trainers.trainer(tmp_path / "two", model=classifier, privacy=OWN).train()
    classifier.load_state_dict(start)
    with pytest.raises(ValueError, match=new_model):
        private_trainers.trainer(tmp_path / "three", model=classifier, privacy=OWN)
    # The remedy: the same start in a new model; other weights, where none holds them.
    fresh = private_trainers.classifier()
    private_trainers.trainer(tmp_path / "three", model=fresh, privacy=OWN)
