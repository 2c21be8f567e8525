"""LightningModules come over as they are, train to the bit, and are refused where that is wrong."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from ray import cloudpickle
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import paceline as pl
from paceline.data.sampling import Stream
from paceline.integrations import lightning_evaluation, lightning_learner
from paceline.learners.optimize import TorchServer, make_optimizer, trained
from paceline.learners.optimizer_recipe import RemadeSchedules
from paceline.training.evaluate import Evaluate
from tests.conftest import flat, module_of

if not os.environ.get("CI"):  # there it must be
    pytest.importorskip("lightning")
    pytest.importorskip("pytorch_lightning")
import lightning
import pytorch_lightning

STEPS, BATCH, SAMPLES = 20, 16, 120  # 8 batches an epoch, the last of them smaller
Configure = Callable[[nn.Module], Any]


def make_data(**more: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    labels = (inputs.sum(dim=1) > 0).long()
    return DataLoader(TensorDataset(inputs, labels), **{"batch_size": BATCH, **more})


class Classifier(lightning.LightningModule):
    def __init__(self, configure: Configure | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.configure = configure
        self.rates: list[list[float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        self.log("loss", loss)
        self.log_dict({"again": loss})
        if self._trainer is not None:  # under Lightning's own trainer
            optimizer = self.optimizers()
            assert not isinstance(optimizer, list)
            self.rates.append([group["lr"] for group in optimizer.param_groups])
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return self.configure(self) if self.configure else optim.Adam(self.parameters(), lr=0.01)


class Old(pytorch_lightning.LightningModule):
    """One of the older package, whose training_step takes no index and returns a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Classifier().layers

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return [optim.Adam(self.parameters(), lr=0.01)]


class Data(lightning.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def train_dataloader(self) -> DataLoader[Any]:
        self.calls.append("train_dataloader")
        return make_data(shuffle=True)


def trainer(module: Any, data: Any = None, **options: Any) -> pl.Trainer:
    engine = pl.Simulator(workers=1, delays=pl.delays.Fixed(1.0))
    data = make_data() if data is None else data
    return pl.Trainer.from_lightning(module, data, pl.sync(), engine, progress=False, **options)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Have torch use one thread, as learners do: bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", [Classifier, Old])
def test_losses_are_those_of_a_plain_loop_to_the_bit(kind: type[Any]) -> None:
    given = kind()
    run = trainer(given, Data()).fit(steps=STEPS)

    model, [inputs, labels] = Classifier().layers.train(), make_data().dataset.tensors  # type: ignore[attr-defined]
    optimizer, stream = optim.Adam(model.parameters(), lr=0.01), Stream(SAMPLES, seed=0)
    losses = []
    for step in range(STEPS):
        chosen = torch.from_numpy(stream.indices(step * BATCH, BATCH))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert run.metrics["loss"].tolist() == losses
    assert losses[-1] < 0.8 * losses[0]
    assert isinstance(run.model, kind) and "log" not in vars(run.model)
    parameters = zip(run.model.layers.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in parameters)
    assert torch.equal(flat(given.layers), flat(Classifier().layers))  # as it was


def test_the_data_module_is_asked_as_lightning_asks_it(caplog: pytest.LogCaptureFixture) -> None:
    data = Data()
    with caplog.at_level(logging.INFO, "paceline"):
        learner = lightning_learner(Classifier(), data)
    assert data.calls == ["prepare_data", "setup fit", "train_dataloader"]
    assert learner.batch_size == BATCH and learner.examples == SAMPLES
    assert "a global batch of 16, shared among all workers" in caplog.text
    assert lightning_learner(Classifier(), Data(), batch_size=40).batch_size == 40


def test_options_of_the_learner_and_of_the_trainer_come_through() -> None:
    rate = partial(optim.SGD, lr=0.5)
    learner = lightning_learner(Classifier(), make_data(), micro_batch=4, optimizer=rate)
    assert learner.micro_batch == 4 and learner.rate(0) == 0.5
    assert trainer(Classifier(), seed=5).seed == 5


def test_workers_fetch_samples_as_the_data_loader_does() -> None:
    more: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 5, "pin_memory": True}
    learner = lightning_learner(Classifier(), make_data(**more))
    assert (learner.num_workers, learner.prefetch_factor, learner.pin_memory) == (2, 5, True)
    learner = lightning_learner(Classifier(), make_data())
    assert (learner.num_workers, learner.prefetch_factor, learner.pin_memory) == (0, 2, False)
    assert lightning_learner(Classifier(), make_data(**more), num_workers=0).num_workers == 0


class Prepared(Classifier):
    """Makes its layers when asked to, as large models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential()

    def configure_model(self) -> None:
        self.layers = Classifier().layers


def test_layers_may_be_made_late() -> None:
    given = Prepared()
    assert trainer(given).fit(steps=2).model.layers[0].weight.shape == (8, 5)
    assert not len(given.layers)


# --- optimizers and schedules: the learning rates of Lightning itself ----------------------------


def decay_groups(module: nn.Module) -> optim.Optimizer:
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    groups = [
        {"params": vectors, "weight_decay": 0.0, "lr": 0.02},
        {"params": matrices, "weight_decay": 0.1},
    ]
    return optim.AdamW(groups, lr=0.01)


def warm(step: int) -> float:
    return min(1.0, (step + 1) / 6)


def sequence(optimizer: optim.Optimizer) -> Any:
    up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    down = lr_scheduler.CosineAnnealingLR(optimizer, T_max=15)
    return lr_scheduler.SequentialLR(optimizer, [up, down], milestones=[5])


def each_step(make: Callable[[optim.Optimizer], Any], **more: Any) -> Configure:
    def configure(module: nn.Module) -> Any:
        optimizer = decay_groups(module)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": make(optimizer), "interval": "step", **more},
        }

    return configure


def lists(module: nn.Module) -> Any:
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return [optimizer], [lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def two(module: nn.Module) -> Any:
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    step = lr_scheduler.ExponentialLR(optimizer, 0.9)
    epoch = lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.5)
    return [optimizer], [{"scheduler": step, "interval": "step", "frequency": 3}, epoch]


SCHEDULES: dict[str, Configure] = {
    "none": decay_groups,
    "lambda": each_step(lambda o: lr_scheduler.LambdaLR(o, [warm, lambda s: 1 / (s + 1)])),
    "cosine": each_step(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20)),
    "one cycle": each_step(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=30)),
    "cyclic": each_step(
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=4, cycle_momentum=False)
    ),
    "sequence": each_step(sequence),
    "every third": each_step(lambda o: lr_scheduler.StepLR(o, 1), frequency=3),
    "epochs": lists,
    "two": two,
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore")  # Lightning's, about data loading and more
def test_learning_rates_are_lightnings(name: str) -> None:
    module = Classifier(SCHEDULES[name])
    lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, make_data())  # fmt: skip
    expected = module.rates
    assert len(expected) == STEPS

    learner = lightning_learner(Classifier(SCHEDULES[name]), make_data())
    shipped = cloudpickle.dumps(learner)
    assert len(shipped) < 20_000  # one model of 100 values, and no second copy of the data
    learner = cloudpickle.loads(shipped)
    server = learner.server()
    result = torch.zeros(len(server.vector)).numpy()
    found = []
    for step in range(STEPS):
        found.append([group["lr"] for group in server._optimizer.param_groups])
        assert learner.rate(step) == found[-1][0]
        server.reduce([1.0], [result], frozenset())
        server.apply({})
    assert found == expected
    assert name == "none" or found[0] != found[-1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_servers_of_slices_have_the_same_groups_and_rates(name: str) -> None:
    server = lightning_learner(Classifier(SCHEDULES[name]), make_data()).server()
    assert isinstance(server, TorchServer)
    total = server.layout.size
    spans = [*pairwise([0, 7, 30, total])]
    shards = [server.recipe(span)() for span in spans]
    for shard, (a, b) in zip(shards, spans, strict=True):
        shard.vector[:] = server.vector[a:b]
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        result = torch.randn(total, generator=generator).numpy()
        for shard, (a, b) in zip([server, *shards], [(0, total), *spans], strict=True):
            shard.reduce([1.0], [result[a:b]], frozenset())
            shard.apply({})
    together = torch.cat([torch.from_numpy(shard.vector) for shard in shards])
    assert torch.allclose(together, torch.from_numpy(server.vector), rtol=1e-5, atol=1e-7)


def test_a_run_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Any) -> None:
    configure = SCHEDULES["sequence"]
    whole = trainer(Classifier(configure)).fit(steps=12)
    saves = pl.Checkpoints(tmp_path, every=6)
    trainer(Classifier(configure), checkpoints=saves).fit(steps=6)
    rest = trainer(Classifier(configure)).resume(tmp_path).fit(steps=12)
    assert torch.equal(flat(rest.model), flat(whole.model))
    with pytest.raises(pl.errors.CheckpointError, match="scheduler was"):
        trainer(Classifier(SCHEDULES["cosine"])).resume(tmp_path)


@pytest.mark.filterwarnings("ignore")  # Lightning's, about data loading and more
def test_a_trained_module_goes_on_in_lightning() -> None:
    model = trainer(Classifier()).fit(steps=3).model
    before = flat(model)
    lightning.Trainer(
        max_steps=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, make_data())  # fmt: skip
    assert not torch.equal(before, flat(model))
    again = trainer(model).fit(steps=3)  # and back, its trainer left behind
    assert again.metrics["loss"][-1] < 1


def test_frozen_tensors_stay() -> None:
    module = Classifier(lambda m: optim.SGD(m.parameters(), lr=0.1))
    module.layers[0].requires_grad_(False)
    trained = trainer(module).fit(steps=3).model.layers
    assert torch.equal(trained[0].weight, module.layers.get_parameter("0.weight"))
    assert not torch.equal(trained[2].weight, module.layers.get_parameter("2.weight"))


class Validated(Classifier):
    """Logs two metrics over batches of unequal sizes."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        found = self.layers(inputs)
        self.log("accuracy", (found.argmax(1) == labels).float().mean())
        self.log("val_loss", nn.functional.cross_entropy(found, labels))


class Order:
    """The batches of Paceline, for Lightning's own loop."""

    def __init__(self, steps: int) -> None:
        stream = Stream(SAMPLES, seed=0)
        self._batches = [stream.indices(step * BATCH, BATCH).tolist() for step in range(steps)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class Seen(lightning.Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.metrics.append({n: float(v) for n, v in trainer.callback_metrics.items()})


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")  # Lightning's, about data loading and more
def test_training_and_validation_are_lightnings() -> None:
    """30 steps of both, with a validation after every tenth."""
    held_out = make_data(batch_size=50)  # batches of 50, 50 and 20
    theirs, seen = Validated(SCHEDULES["cosine"]), Seen()
    batches = DataLoader(make_data().dataset, batch_sampler=Order(30))
    lightning.Trainer(
        max_steps=30, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[seen],
        val_check_interval=10, num_sanity_val_steps=0,
    ).fit(theirs, batches, held_out)  # fmt: skip

    evaluate = Evaluate(lightning_evaluation(held_out, monitor="val_loss"), every=10)
    per_epoch = trainer(Validated(SCHEDULES["cosine"]), callbacks=[evaluate])
    run = per_epoch.fit(steps=30)
    assert [done.step for done in run.evaluations] == [10, 20, 30]
    assert len(seen.metrics) == 3
    for mine, expected in zip(run.evaluations, seen.metrics, strict=True):
        assert list(mine.metrics) == ["val_loss", "accuracy"]
        for name, value in mine.metrics.items():
            assert value == pytest.approx(expected[name], abs=1e-5)
    assert seen.metrics[2]["val_loss"] < 0.9 * seen.metrics[0]["val_loss"]
    assert torch.allclose(flat(run.model.layers), flat(theirs.layers), rtol=0, atol=1e-5)
    assert "log" not in vars(run.model)


def test_validations_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="Classifier has no validation_step"):
        lightning_evaluation(make_data())(Classifier())
    with pytest.raises(ValueError, match="monitor='f1' was not logged; use one of accuracy"):
        lightning_evaluation(make_data(), monitor="f1")(Validated())
    with pytest.raises(ValueError, match="the data are a list"):
        lightning_evaluation([1])


# --- what cannot be taken over -------------------------------------------------------------------


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Clips(Classifier):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None: ...


class Augments(Classifier):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Skips(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class Asks(Classifier):
    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=1 / self.trainer.estimated_stepping_batches)


class Logs(Classifier):
    def on_train_epoch_end(self) -> None:
        raise AssertionError("is not called")


def plateau(module: nn.Module) -> Any:
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [lr_scheduler.ReduceLROnPlateau(optimizer)]


def several(module: Any) -> Any:
    return [optim.SGD(layer.parameters(), lr=0.1) for layer in module.layers]


def foreign(module: nn.Module) -> Any:
    return optim.SGD([*module.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)


def unbound(module: nn.Module) -> Any:
    optimizer, other = (optim.SGD(module.parameters(), lr=0.1) for _ in range(2))
    return [optimizer], [lr_scheduler.StepLR(other, 1)]


def weekly(module: nn.Module) -> Any:
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "week"}}


class Foreign:
    """A schedule of another library, which has set its first rate."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["initial_lr"], group["lr"] = group["lr"], 0.0


def foreign_schedule(module: nn.Module) -> Any:
    optimizer = decay_groups(module)
    return [optimizer], [Foreign(optimizer)]


class Uncopied(lr_scheduler.StepLR):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")


def uncopied(module: nn.Module) -> Any:
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [Uncopied(optimizer, 1)]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual(), "automatic_optimization=False.*pl.TorchLearner"),
        (Clips(), "defines configure_gradient_clipping.*transform=ClipNorm"),
        (Augments(), "defines on_after_batch_transfer.*collate_fn"),
        (Asks(), "asks for a Lightning trainer.*as an argument"),
        (lightning.LightningModule(), "has no training_step"),
        (nn.Linear(1, 1), "no LightningModule.*TorchLearner"),
        (Classifier(lambda m: None), "these optimizers: none; return exactly one"),
        (Classifier(several), "these optimizers: SGD, SGD, SGD; return exactly one"),
        (Classifier(foreign), "1 trained tensors that are not the module's"),
        (Classifier(plateau), "ReduceLROnPlateau of Classifier watches a metric"),
        (Classifier(foreign_schedule), "Foreign of Classifier is no LRScheduler.*or None"),
        (Classifier(unbound), "bound to another optimizer"),
        (Classifier(weekly), 'use "step" or "epoch"'),
        (Classifier(uncopied), "Uncopied cannot be copied.*no copies.*scheduler="),
    ],
)
def test_modules_that_would_train_otherwise_are_refused(module: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(module)


def test_with_an_outer_optimizer_the_modules_schedule_is_that_of_the_local_steps() -> None:
    outer = partial(optim.SGD, lr=1.0)
    with pytest.raises(ValueError, match=r"scheduler= together with outer=.*inner_scheduler="):
        lightning_learner(Classifier(lists), make_data(), outer=outer, scheduler=constant)
    learner = lightning_learner(Classifier(lists), make_data(), outer=outer)
    assert isinstance(learner.inner_scheduler, RemadeSchedules)
    assert learner.rate(0) == learner.rate(50) == 1.0
    dropped = lightning_learner(Classifier(lists), make_data(), outer=outer, inner_scheduler=None)
    assert dropped.inner_scheduler is None
    engine = pl.Simulator(workers=2, delays=pl.delays.Fixed(1.0))
    run = pl.Trainer(learner, pl.local_sgd(4), engine, progress=False).fit(steps=5)
    assert run.metrics["loss"][-1] < run.metrics["loss"][0]


def cold(module: nn.Module) -> Any:
    optimizer = decay_groups(module)
    warmup = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def constant(optimizer: optim.Optimizer) -> Any:
    return lr_scheduler.ConstantLR(optimizer, 1.0)


DROPPED: dict[str, Configure] = {
    "cold": cold,
    "sequence": SCHEDULES["sequence"],
    "plateau": each_step(lr_scheduler.ReduceLROnPlateau, reduce_on_plateau=True),
    "foreign": foreign_schedule,
}


@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.parametrize("scheduler", [None, constant])
def test_without_its_schedule_a_module_has_its_own_rates(name: str, scheduler: Any) -> None:
    learner = lightning_learner(Classifier(DROPPED[name]), make_data(), scheduler=scheduler)
    assert learner.rate(0) == learner.rate(50) == 0.02
    groups = learner.server()._optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.02, 0.01]
    assert scheduler is not None or not any("initial_lr" in group for group in groups)


def test_with_an_outer_optimizer_a_module_has_its_own_rates() -> None:
    outer = partial(optim.SGD, lr=1.0)
    learner = lightning_learner(Classifier(cold), make_data(), outer=outer, scheduler=None)
    made = make_optimizer(learner.optimizer, trained(module_of(learner)))
    assert [group["lr"] for group in made.param_groups] == [0.02, 0.01]
    assert learner.rate(0) == 1.0  # of the outer one


@pytest.mark.parametrize("name", ["one cycle", "cyclic", "cycle in a sequence"])
def test_rates_that_a_schedule_has_replaced_are_asked_for(name: str) -> None:
    def nested(optimizer: optim.Optimizer) -> Any:
        up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30)
        return lr_scheduler.ChainedScheduler([up, cycle])

    module = Classifier(SCHEDULES.get(name, each_step(nested)))
    with pytest.raises(ValueError, match=r"Cycl\w*LR of Classifier has replaced.*give optimizer="):
        lightning_learner(module, make_data(), scheduler=None)
    own = partial(optim.SGD, lr=0.3)
    learner = lightning_learner(module, make_data(), optimizer=own, scheduler=None)
    assert learner.rate(0) == 0.3


def test_a_batch_cannot_be_skipped() -> None:
    with pytest.raises(ValueError, match="training_step of Skips returned NoneType"):
        trainer(Skips()).fit(steps=1)


def test_hooks_that_are_not_called_are_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer(Logs()).fit(epochs=2)
    assert "Logs defines on_train_epoch_end, which Paceline does not call" in caplog.text


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from make_data().dataset  # type: ignore[misc]


def loaders() -> list[tuple[Any, str]]:
    dataset: Dataset[Any] = make_data().dataset
    weighted = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    batches: Any = [[0, 1], [2, 3]]
    again = RandomSampler(dataset, replacement=True)  # type: ignore[arg-type]
    return [
        (DataLoader(Endless(), batch_size=4), "Endless is an IterableDataset"),
        (DataLoader(dataset, sampler=weighted), "draws with WeightedRandomSampler"),
        (DataLoader(dataset, sampler=again), "draws with RandomSampler"),
        (DataLoader(dataset, batch_sampler=batches), "draws with list"),
        (DataLoader(dataset, batch_size=None), "has no batch_size"),
        ([make_data()], "the data are a list"),
        (dataset, "the data are a TensorDataset"),
    ]


@pytest.mark.parametrize("place", range(7))
def test_data_that_cannot_be_drawn_by_index_is_refused(place: int) -> None:
    data, message = loaders()[place]
    with pytest.raises(ValueError, match=message):
        trainer(Classifier(), data)
