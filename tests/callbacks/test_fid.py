import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support.memory_logger import MemoryLogger
from support.pixels import FEATURES, PixelProtocol, random_images
from support.rising import Rising, loader, trainer
from torch import nn
from torchvision.transforms.functional import to_pil_image

from lit_diffusion.callbacks.ema import EMA
from lit_diffusion.callbacks.fid import FIDEvaluation, averaging_decay
from lit_diffusion.callbacks.step_seed import StepSeed
from lit_diffusion.data.digits import Digits
from lit_diffusion.metrics.evaluation_record import count_training_images
from lit_diffusion.metrics.extractors import EmbeddedCNN, InceptionV3Compat
from lit_diffusion.metrics.frechet import FrechetDistance
from lit_diffusion.protocols import NonFiniteSamples

NUM = 20


def fid(tmp_path, num_samples=NUM, built=None, protocol=PixelProtocol, **options):
    defaults = {"weights": "raw", "batch_size": 8, "cache_dir": str(tmp_path / "cache")}
    extractor = protocol([] if built is None else built)
    return FIDEvaluation(num_samples, extractor, **(defaults | options))


def fit(tmp_path, callbacks, module=None, ckpt_path=None, **options):
    module = Rising() if module is None else module
    run = trainer(tmp_path, callbacks, **options)
    run.fit(module, loader(8), loader(30, seed=1), ckpt_path=ckpt_path)
    return module, run


def records(tmp_path):
    return [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]


# What is measured


def test_the_value_is_the_frechet_distance_of_the_seeds_images_and_the_split(tmp_path):
    module, run = fit(tmp_path, [fid(tmp_path)])
    with torch.no_grad():
        samples = module.eval().generate(range(NUM))
    metric = FrechetDistance(FEATURES)
    metric.update(samples.flatten(1), real=False)
    metric.update(random_images(30, 1).flatten(1), real=True)
    assert run.callback_metrics[f"val/fid_{NUM}_raw"] == pytest.approx(
        metric.compute().item(), rel=1e-6
    )


def test_every_evaluation_is_written_with_its_protocol(tmp_path):
    fit(tmp_path, [fid(tmp_path)], max_epochs=2)
    first, second = records(tmp_path)
    assert (first["step"], second["step"]) == (8, 16)
    seconds = first.pop("seconds")
    assert set(seconds) == {"generate", "features", "second look", "total", "estimated"}
    value, data = first.pop("value"), first.pop("data")
    assert value > 0
    assert len(data) == 16
    assert first.pop("floor") > 0
    assert first.pop("floor_sd") is None  # 8 images of 8
    look = first.pop("second_look")
    assert look["pixels"] > 0
    assert set(look) == {
        *("pixels", "pixels floor", "random-cnn", "random-cnn floor"),
        *("precision", "recall", "pixel precision", "pixel recall", "memorized"),
    }
    assert first == {
        "metric": f"val/fid_{NUM}_raw",
        "step": 8,
        "images": 8,
        "num_fake": NUM,
        "num_real": 30,
        "reference": "val",
        "protocol": "pixels",
        "extractor_sha256": "0" * 64,
        "resize": "none",
        "weights": "raw",
        "ema_decay": None,
        "seeds": [0, NUM],
        "labels": None,
        "sampling": {},
        "floor_images": "8 train images against val",
        "non_finite": 0,
        "non_finite_seeds": [],
    }


def test_a_second_look_can_be_left_out(tmp_path):
    fit(tmp_path, [fid(tmp_path, auxiliary_metrics=False)])
    assert records(tmp_path)[0]["second_look"] == {}


def test_sampling_and_labels_are_recorded_as_the_module_tells_them(tmp_path):
    class Telling(Rising):
        num_classes = 3

        def sampling_record(self):
            return {"solver": "DDIM", "steps": 20}

    module, _ = fit(tmp_path, [fid(tmp_path)], Telling())
    (record,) = records(tmp_path)
    assert record["sampling"] == {"solver": "DDIM", "steps": 20}
    assert record["labels"] == "seed % 3"
    assert module.labels == [seed % 3 for seed in range(NUM)]


def test_the_name_tells_the_number_and_weights_other_than_ema(tmp_path):
    def name(num, weights):
        return fid(tmp_path, num, weights=weights).metric_name("val")

    assert name(360, "ema") == "val/fid_360"
    assert [name(num, "ema")[8:] for num in (2, 1000, 1500, 50_000)] == ["2", "1k", "1500", "50k"]
    assert name(360, "raw") == "val/fid_360_raw"


def test_fid_and_floor_are_logged_side_by_side(tmp_path):
    memory = MemoryLogger()
    fit(tmp_path, [fid(tmp_path)], logger=memory, max_epochs=2)
    (value,) = {record["floor"] for record in records(tmp_path)}
    floors = memory.of(f"val/fid_{NUM}_raw_floor")
    assert [floor for _, floor in floors] == pytest.approx([value, value], rel=1e-6)
    assert len(memory.of(f"val/fid_{NUM}_raw")) == 2


def test_the_shipped_protocol_works_on_the_embedded_data(tmp_path):
    class Digital(Rising):
        def generate(self, seeds, labels=None):
            return Digits().images("train")[list(seeds)]

    module, data = Digital(), Digits(batch_size=512)
    callback = FIDEvaluation(100, "digits-cnn", weights="raw", cache_dir=str(tmp_path / "cache"))
    trainer(tmp_path, [callback]).fit(module, data)
    (record,) = records(tmp_path)
    assert record["num_real"] == 360
    assert record["data"] == Digits().fingerprint("val")
    assert record["extractor_sha256"] == EmbeddedCNN("digits-cnn").sha256
    assert 0.3 < record["value"] / record["floor"] < 3


def test_a_folder_of_images_may_be_the_reference(tmp_path):
    folder = tmp_path / "real"
    folder.mkdir()
    for number, image in enumerate(random_images(30, 1)):
        to_pil_image(image).save(folder / f"{number:03d}.png")
    fit(tmp_path, [fid(tmp_path)])
    fit(tmp_path / "other", [fid(tmp_path, reference=str(folder))])
    by_split, by_folder = records(tmp_path)[0], records(tmp_path / "other")[0]
    assert by_folder["value"] == by_split["value"]
    assert by_folder["data"] == by_split["data"]
    assert by_folder["reference"] == str(folder)
    assert by_folder["floor_images"].startswith("15 ")


def test_a_resume_in_an_epoch_without_validation_finds_the_validation_data(tmp_path):
    """Lightning makes their loader in the epoch that needs it."""
    options = {"check_val_every_n_epoch": 2}
    _, first = fit(tmp_path, [fid(tmp_path)], max_epochs=2, **options)
    first.save_checkpoint(tmp_path / "c.ckpt")
    fit(tmp_path, [fid(tmp_path)], ckpt_path=tmp_path / "c.ckpt", max_epochs=4, **options)
    assert [record["step"] for record in records(tmp_path)] == [16, 32]
    assert len({(r["data"], r["floor"], r["floor_images"]) for r in records(tmp_path)}) == 1


class Named(Callback):
    """A provider that is no EMA."""

    def __init__(self, *names):
        self.names = lambda: names

    def weights(self, name):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("callbacks", "name", "decay"),
    [
        ([EMA(decays=(0.99, 0.5))], "ema", 0.99),
        ([EMA(decays=(0.99, 0.5))], "ema_0.5", 0.5),
        ([EMA(decays=(0.99, 0.5))], "raw", None),
        ([], "raw", None),
        ([EMA((0.5,), prefix="a"), EMA((0.5,), prefix="b")], "ema", 0.5),
        ([EMA((0.5,), prefix="a"), EMA((0.9,), prefix="b")], "ema", None),
        ([Named("raw", "ema")], "ema", None),
        ([Named("raw", "ema_slow", "ema_2")], "ema_slow", None),
        ([Named("raw", "ema_slow", "ema_2")], "ema_2", None),
        ([Named("raw", "swa")], "swa", None),
    ],
)
def test_the_decay_is_what_the_names_of_a_provider_tell_if_they_tell_one(
    tmp_path, callbacks, name, decay
):
    assert averaging_decay(trainer(tmp_path, callbacks), name) == decay


# The last step again


def values(tmp_path, step=None):
    return {
        tuple(record["seeds"]): record["value"]
        for record in records(tmp_path)
        if step in (None, record["step"])
    }


@pytest.mark.parametrize(("every_n_steps", "evaluations"), [(None, 1), (8, 1), (3, 3)])
def test_the_last_step_is_evaluated_again_with_the_next_seeds(tmp_path, every_n_steps, evaluations):
    callback = fid(tmp_path, repeats_at_end=2, every_n_steps=every_n_steps)
    module, _ = fit(tmp_path, [callback])
    assert list(values(tmp_path, step=8)) == [(0, NUM), (NUM, 2 * NUM), (2 * NUM, 3 * NUM)]
    assert len(set(values(tmp_path, step=8).values())) == 3
    assert module.seeds == [*range(NUM)] * evaluations + [*range(NUM, 3 * NUM)]


def test_a_second_run_evaluates_its_last_step_before_it_repeats(tmp_path):
    callback = fid(tmp_path, repeats_at_end=1)
    fit(tmp_path, [callback])
    fit(tmp_path / "second", [callback], check_val_every_n_epoch=2)
    assert list(values(tmp_path / "second", step=8)) == [(0, NUM), (NUM, 2 * NUM)]


def test_a_repeat_is_what_its_seeds_give_with_the_weights_asked_for(tmp_path):
    ema = EMA(decays=(0.5,), warmup=False)
    module, _ = fit(tmp_path, [ema, fid(tmp_path, weights="ema", repeats_at_end=1)])
    with torch.no_grad():
        module.level.fill_(averaged(8))
        samples = module.eval().generate(range(NUM, 2 * NUM))
    metric = FrechetDistance(FEATURES)
    metric.update(samples.flatten(1), real=False)
    metric.update(random_images(30, 1).flatten(1), real=True)
    assert values(tmp_path)[NUM, 2 * NUM] == pytest.approx(metric.compute().item(), rel=1e-6)


def test_repeats_are_not_logged_and_never_the_best(tmp_path):
    class Unlucky(Rising):
        """The samples of the curve are brighter, and so worse, than those of repeats."""

        def generate(self, seeds, labels=None):
            images = super().generate(seeds, labels)
            return images // 2 if seeds[0] >= NUM else images

    memory = MemoryLogger()
    callback = fid(tmp_path, repeats_at_end=2)
    _, run = fit(tmp_path, [callback], Unlucky(), logger=memory, max_epochs=2)
    first, last = (record["value"] for record in records(tmp_path)[:2])
    assert [value for _, value in memory.of(f"val/fid_{NUM}_raw")] == pytest.approx([first, last])
    assert callback.best_score == min(first, last)
    assert run.callback_metrics[f"val/fid_{NUM}_raw"] == pytest.approx(last)


def test_a_repeat_names_its_own_seeds_that_are_not_finite(tmp_path):
    class Late(Rising):
        def generate(self, seeds, labels=None):
            bad = [seed for seed in seeds if seed == NUM + 3]
            if bad:
                raise NonFiniteSamples(bad, self.global_step, "t = 5")
            return super().generate(seeds, labels)

    with pytest.warns(UserWarning, match=rf"seeds \[{NUM + 3}\]"):
        fit(tmp_path, [fid(tmp_path, repeats_at_end=1)], Late())
    assert records(tmp_path)[-1]["non_finite_seeds"] == [NUM + 3]
    assert values(tmp_path)[NUM, 2 * NUM] is None


# Which weights


def averaged(step, decay=0.5):
    """`level` is k after step k; so is its average, up to the history."""
    level = 0.0
    for k in range(1, step + 1):
        level = decay * level + (1 - decay) * k
    return level


def in_order(first, *callbacks):
    return list(callbacks) if first else list(reversed(callbacks))


@pytest.mark.parametrize("ema_first", [True, False])
@pytest.mark.parametrize("every_n_steps", [None, 3])
@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_weights_are_those_asked_for_wherever_the_callbacks_stand(
    tmp_path, ema_first, every_n_steps, weights
):
    ema = EMA(decays=(0.5,), warmup=False)
    callback = fid(tmp_path, weights=weights, every_n_steps=every_n_steps)
    module, _ = fit(tmp_path, in_order(ema_first, ema, callback), max_epochs=2)
    steps = [record["step"] for record in records(tmp_path)]
    assert steps == ([8, 16] if every_n_steps is None else [3, 6, 9, 12, 15])
    expected = [averaged(step) if weights == "ema" else step for step in steps]
    batches = math.ceil(NUM / 8)
    assert module.levels == pytest.approx([level for level in expected for _ in range(batches)])


@pytest.mark.parametrize("ema_first", [True, False])
def test_training_goes_on_with_the_raw_weights(tmp_path, ema_first):
    ema = EMA(decays=(0.5,), warmup=False)
    callback = fid(tmp_path, weights="ema", every_n_steps=3)
    module, _ = fit(tmp_path, in_order(ema_first, ema, callback), max_epochs=2)
    assert module.level.item() == 16


def test_ema_is_refused_before_the_first_step_where_nothing_averages(tmp_path):
    module = Rising()
    with pytest.raises(ValueError, match="provide raw; add lit_diffusion"):
        fit(tmp_path, [fid(tmp_path, weights="ema")], module)
    assert module.losses == []


def test_an_unknown_name_of_weights_is_answered_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"provide ema, ema_0\.5, raw"):
        fit(tmp_path, [EMA(decays=(0.5,)), fid(tmp_path, weights="ema_0.9")])


def test_weights_of_several_providers_of_one_name_are_all_put_in_place(tmp_path):
    class Two(Rising):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
            self.pairs = []

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) - self.left.weight - self.right.weight

        def configure_optimizers(self):
            for layer in (self.left, self.right):
                nn.init.zeros_(layer.weight)
            return torch.optim.SGD([self.level, self.left.weight, self.right.weight], lr=1.0)

        def generate(self, seeds, labels=None):
            self.pairs.append((self.left.weight.item(), self.right.weight.item()))
            return super().generate(seeds, labels)

    emas = [EMA(decays=(0.5,), warmup=False, prefix=name) for name in ("left", "right")]
    module, _ = fit(tmp_path, [*emas, fid(tmp_path, weights="ema")], Two())
    assert module.pairs[-1] == pytest.approx((averaged(8), averaged(8)))


# When


def test_nothing_is_evaluated_in_the_sanity_check(tmp_path):
    fit(tmp_path, [fid(tmp_path)], num_sanity_val_steps=2)
    assert len(records(tmp_path)) == 1


def test_a_module_that_never_validates_is_evaluated_by_steps(tmp_path):
    callback = fid(tmp_path, every_n_steps=4, reference="train")
    module, run = Rising(), trainer(tmp_path, [callback], max_epochs=2)
    run.fit(module, loader(8))
    assert [(r["step"], r["floor_images"]) for r in records(tmp_path)] == [
        (step, "4 train images against 4 others of them") for step in (4, 8, 12, 16)
    ]


def test_an_evaluation_that_would_never_run_is_refused_before_the_first_step(tmp_path):
    module = Rising()
    with pytest.raises(ValueError, match="pass every_n_steps"):
        trainer(tmp_path, [fid(tmp_path, reference="train")]).fit(module, loader(8))
    assert module.losses == []


@pytest.mark.parametrize("watcher", [EarlyStopping, ModelCheckpoint])
def test_what_watches_the_fid_finds_it_or_is_refused_before_the_first_step(tmp_path, watcher):
    callback, module = fid(tmp_path), Rising()
    metric = callback.metric_name("val")
    fit(tmp_path, [callback, watcher(monitor=metric)], module, enable_checkpointing=True)
    assert len(module.losses) == 8
    callback, module = fid(tmp_path, every_n_steps=4), Rising()
    with pytest.raises(ValueError, match=r"every_n_steps=4.*val_check_interval"):
        fit(tmp_path, [callback, watcher(monitor=metric)], module, enable_checkpointing=True)
    assert module.losses == []


def test_steps_are_those_of_the_optimizer_however_many_batches_make_one(tmp_path):
    callback = fid(tmp_path, every_n_steps=2)
    fit(tmp_path, [callback], accumulate_grad_batches=2, max_epochs=2)
    assert [record["step"] for record in records(tmp_path)] == [2, 4, 6, 8]


def test_two_optimizers_in_manual_optimization_pass_over_no_evaluation(tmp_path):
    class Manual(Rising):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Parameter(torch.zeros(()))

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(-self.level - self.other)
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD([p], lr=1.0) for p in (self.level, self.other)]

    fit(tmp_path, [fid(tmp_path, every_n_steps=5)], Manual())
    assert [record["step"] for record in records(tmp_path)] == [6, 10, 16]


def test_test_scores_the_test_split_under_its_own_name(tmp_path):
    module, run = fit(tmp_path, [fid(tmp_path)])
    run.test(module, loader(40, seed=2))
    record = records(tmp_path)[-1]
    assert record["metric"] == f"test/fid_{NUM}_raw"
    assert (record["reference"], record["num_real"], record["step"]) == ("test", 40, 8)
    assert run.callback_metrics[record["metric"]] == pytest.approx(record["value"], rel=1e-6)


@pytest.mark.parametrize("every_n_steps", [None, 100])
def test_validate_from_a_checkpoint_scores_its_weights_and_names_its_step(tmp_path, every_n_steps):
    _, run = fit(tmp_path, [fid(tmp_path)])
    run.save_checkpoint(tmp_path / "end.ckpt")
    module = Rising()
    again = trainer(tmp_path / "again", [fid(tmp_path, every_n_steps=every_n_steps)])
    again.validate(module, loader(30, seed=1), ckpt_path=tmp_path / "end.ckpt")
    assert set(module.levels) == {8.0}
    (record,) = records(tmp_path / "again")
    assert (record["step"], record["value"]) == (8, records(tmp_path)[0]["value"])


@pytest.mark.parametrize("same_trainer", [True, False])
def test_validate_in_the_run_folder_keeps_the_images_and_the_order_of_its_lines(
    tmp_path, same_trainer
):
    callback = fid(tmp_path)
    module, run = fit(tmp_path, [callback], Rising(best=8), max_epochs=3)
    before = [(r["step"], r["images"], r["value"]) for r in records(tmp_path)]
    assert [line[:2] for line in before] == [(8, 8), (16, 16), (24, 24)]
    again = run if same_trainer else trainer(tmp_path, [fid(tmp_path)])
    best = tmp_path / "checkpoints" / "best-fid.ckpt"
    again.validate(module, loader(30, seed=1), ckpt_path=best)
    assert [(r["step"], r["images"], r["value"]) for r in records(tmp_path)] == before


def test_images_of_a_resume_with_another_batch_size_are_counted_on(tmp_path):
    def run(epochs, batch_size, ckpt_path=None):
        made = trainer(tmp_path, [fid(tmp_path)], max_epochs=epochs)
        data = loader(8, batch_size=batch_size)
        made.fit(Rising(), data, loader(30, seed=1), ckpt_path=ckpt_path)
        made.save_checkpoint(tmp_path / "c.ckpt")
        assert count_training_images(made) == records(tmp_path)[-1]["images"]
        return tmp_path / "c.ckpt"

    first = run(2, batch_size=1)
    second = run(4, batch_size=4, ckpt_path=first)
    run(5, batch_size=8, ckpt_path=second)
    found = [(record["step"], record["images"]) for record in records(tmp_path)]
    assert found == [(8, 8), (16, 16), (18, 24), (20, 32), (21, 40)]


def test_one_callback_serves_several_runs_with_their_own_data(tmp_path):
    callback, module = fid(tmp_path), Rising()
    for seed, run in ((1, "validate"), (1, "fit"), (2, "validate")):
        data = [loader(8)] if run == "fit" else []
        getattr(trainer(tmp_path / str(seed), [callback]), run)(
            module, *data, loader(30, seed=seed)
        )
    (before, after), (other,) = records(tmp_path / "1"), records(tmp_path / "2")
    assert (before["step"], after["step"]) == (0, 8)
    assert before["data"] == after["data"] != other["data"]


def test_fast_dev_run_checks_and_evaluates_nothing(tmp_path):
    module, _ = fit(tmp_path, [fid(tmp_path)], fast_dev_run=True)
    assert len(module.levels) == 1

    class Odd(Rising):
        def generate(self, seeds, labels=None):
            return super().generate(seeds, labels).float()

    for options in ({"fast_dev_run": True}, {"num_sanity_val_steps": 1}):
        module = Odd()
        with pytest.raises(TypeError, match="generate must return 1 images, uint8"):
            fit(tmp_path, [fid(tmp_path)], module, **options)
        assert len(module.losses) == ("fast_dev_run" in options)
    with pytest.raises(ValueError, match="provide raw"):
        fit(tmp_path, [fid(tmp_path, weights="ema")], fast_dev_run=True)
    assert not (tmp_path / "evaluations.jsonl").exists()


# What training sees of it: nothing


@pytest.mark.parametrize("every_n_steps", [None, 3])
def test_losses_are_the_same_with_and_without_it(tmp_path, every_n_steps):
    torch.manual_seed(1)
    without, _ = fit(tmp_path, [], max_epochs=3)
    torch.manual_seed(1)
    callback = fid(tmp_path, every_n_steps=every_n_steps)
    with_it, _ = fit(tmp_path, [callback], max_epochs=3)
    assert with_it.levels != []
    assert with_it.losses == without.losses


def test_every_submodule_gets_its_own_mode_back(tmp_path):
    class Watching(Rising):
        def on_train_batch_start(self, batch, batch_idx):
            modes.add((self.training, self.dropout.training, self.frozen.training))

    modes = set()
    fit(tmp_path, [fid(tmp_path, every_n_steps=1)], Watching(), max_epochs=2)
    assert modes == {(True, True, False)}


def test_samples_are_made_in_the_precision_of_the_trainer_and_scored_in_float32(tmp_path):
    class Watching(Rising):
        def generate(self, seeds, labels=None):
            precisions.add((torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))
            return super().generate(seeds, labels)

    built, values = [], []
    for precision, expected in (
        ("32-true", (False, torch.float32)),
        ("bf16-mixed", (True, torch.float32)),
        ("bf16-true", (False, torch.bfloat16)),
    ):
        precisions = set()
        folder = tmp_path / precision
        fit(folder, [fid(tmp_path, built=built)], Watching(), precision=precision)
        assert precisions == {expected}
        values.append(records(folder)[0]["value"])
    assert values[0] == values[1] == values[2]


def test_the_extractor_is_no_part_of_the_module_or_its_checkpoint(tmp_path):
    module, _ = fit(tmp_path, [EMA(decays=(0.5,)), fid(tmp_path, weights="ema")])
    assert set(module.state_dict()) == set(Rising().state_dict())
    checkpoint = torch.load(tmp_path / "checkpoints" / "best-fid.ckpt", weights_only=True)
    assert set(checkpoint["state_dict"]) == set(Rising().state_dict())


def test_a_cached_second_run_puts_no_real_image_through_the_extractor(tmp_path):
    built = []
    for number in range(2):
        fit(tmp_path / str(number), [fid(tmp_path, built=built)])
    first, second = built
    assert first.seen == 30 + 8 + 30 + NUM  # reference, floor, neighbours, samples
    assert second.seen == NUM
    assert records(tmp_path / "0")[0]["value"] == records(tmp_path / "1")[0]["value"]


# The best step


def test_best_fid_holds_the_weights_of_the_step_that_was_scored_best(tmp_path):
    """Scored at 3, 6, 9, ...: the FID falls, then rises; `level` says which step was saved."""
    callback = fid(tmp_path, every_n_steps=3)
    fit(tmp_path, [callback], Rising(best=9), max_epochs=3)
    scores = {record["step"]: record["value"] for record in records(tmp_path)}
    assert min(scores, key=scores.get) == 9
    checkpoint = torch.load(tmp_path / "checkpoints" / "best-fid.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 9
    assert checkpoint["state_dict"]["level"] == 9
    assert (callback.best_step, callback.best_score) == (9, scores[9])


def test_a_fid_that_is_not_of_every_validation_cannot_be_monitored(tmp_path):
    memory = MemoryLogger()
    _, run = fit(tmp_path, [fid(tmp_path, every_n_steps=3)], logger=memory)
    assert not any("fid" in name for name in run.callback_metrics)
    assert len(memory.of(f"val/fid_{NUM}_raw")) == 2


@pytest.mark.parametrize("every_n_steps", [None, 4])
def test_the_loggers_have_it_in_the_row_of_the_batch_that_made_the_weights(tmp_path, every_n_steps):
    class Telling(Rising):
        def training_step(self, batch, batch_idx):
            self.log("train/steps_after", self.global_step + 1.0)
            return super().training_step(batch, batch_idx)

    memory, callback = MemoryLogger(), fid(tmp_path, every_n_steps=every_n_steps)
    options = {"logger": memory, "log_every_n_steps": 1, "max_epochs": 2}
    fit(tmp_path, [callback], Telling(), val_check_interval=4, **options)
    steps_after = dict(memory.of("train/steps_after"))
    rows = [step for step, _ in memory.of(f"val/fid_{NUM}_raw")]
    assert [steps_after[step] for step in rows] == [4, 8, 12, 16]
    assert [record["step"] for record in records(tmp_path)] == [4, 8, 12, 16]


@pytest.mark.parametrize("ema_first", [True, False])
@pytest.mark.parametrize("every_n_steps", [None, 8])
def test_best_fid_holds_raw_weights_beside_the_averages(tmp_path, ema_first, every_n_steps):
    ema = EMA(decays=(0.5,), warmup=False)
    callback = fid(tmp_path, weights="ema", every_n_steps=every_n_steps)
    fit(tmp_path, in_order(ema_first, ema, callback))
    checkpoint = torch.load(tmp_path / "checkpoints" / "best-fid.ckpt", weights_only=True)
    assert checkpoint["state_dict"]["level"] == 8


def test_best_fid_holds_raw_weights_of_a_provider_that_only_swaps(tmp_path):
    class Swaps(Callback):
        """Validates with -1 in place, and does not care who saves."""

        def names(self):
            return ["raw", "minus one"]

        @contextmanager
        def weights(self, name):
            before = self.level.data.clone()
            self.level.data.fill_(self.raw if name == "raw" else -1)
            yield
            self.level.data.copy_(before)

        def on_validation_start(self, trainer, module):
            self.level, self.raw = module.level, module.level.item()
            self.level.data.fill_(-1)

        def on_validation_end(self, trainer, module):
            self.level.data.fill_(self.raw)

    module, _ = fit(tmp_path, [Swaps(), fid(tmp_path, weights="minus one")])
    assert set(module.levels) == {-1}
    checkpoint = torch.load(tmp_path / "checkpoints" / "best-fid.ckpt", weights_only=True)
    assert checkpoint["state_dict"]["level"] == 8


@pytest.mark.parametrize(
    ("every_n_steps", "validate_every", "step"),
    [(None, 8, 8), (None, 4, 12), (None, 3, 11), (3, 8, 12), (4, 4, 8)],
    ids=["epoch end", "mid-epoch", "uneven", "by steps", "both"],
)
def test_a_run_that_resumes_from_best_fid_is_the_undisturbed_one(
    tmp_path, every_n_steps, validate_every, step
):
    def run(folder, **options):
        callbacks = [StepSeed(7), EMA(decays=(0.5,)), fid(tmp_path, every_n_steps=every_n_steps)]
        options |= {"max_epochs": 4, "val_check_interval": validate_every}
        return fit(folder, callbacks, Rising(best=step), **options)

    whole, _ = run(tmp_path / "whole")
    best = tmp_path / "whole" / "checkpoints" / "best-fid.ckpt"
    assert torch.load(best, weights_only=True)["global_step"] == step
    resumed, trainer_of_resumed = run(tmp_path / "resumed", ckpt_path=best)
    assert trainer_of_resumed.global_step == 32
    assert resumed.losses == whole.losses[step:]
    later = [r for r in records(tmp_path / "whole") if r["step"] > step]
    compared = ("step", "images", "value")
    assert [[r[name] for name in compared] for r in records(tmp_path / "resumed")] == [
        [r[name] for name in compared] for r in later
    ]
    assert not (tmp_path / "resumed" / "checkpoints").exists()  # nothing was better


@pytest.mark.parametrize("every_n_steps", [None, 4])
def test_the_best_is_saved_once_the_loggers_have_it(tmp_path, every_n_steps):
    """Else a run that dies there and resumes from the file would lack the row."""
    memory, rows = MemoryLogger(), []

    class Watch(Callback):
        def on_save_checkpoint(self, *args):
            rows.append(len(memory.of(f"val/fid_{NUM}_raw")))

    callbacks = [fid(tmp_path, every_n_steps=every_n_steps), Watch()]
    fit(tmp_path, callbacks, Rising(best=24), max_epochs=3, val_check_interval=4, logger=memory)
    assert rows == [1, 4, 5, 6]  # the second and third are no better


def test_a_resumed_run_appends_and_doubles_no_evaluation(tmp_path):
    _, run = fit(tmp_path, [fid(tmp_path)], max_epochs=2)
    run.save_checkpoint(tmp_path / "two.ckpt")
    fit(tmp_path, [fid(tmp_path)], max_epochs=3)
    fit(tmp_path, [fid(tmp_path)], max_epochs=4, ckpt_path=tmp_path / "two.ckpt")
    assert [record["step"] for record in records(tmp_path)] == [8, 16, 24, 32]


def test_the_best_of_one_run_is_no_rival_in_the_next(tmp_path):
    callback = fid(tmp_path)
    fit(tmp_path / "good", [callback], Rising(best=8))
    good = callback.best_score
    fit(tmp_path / "bad", [callback], Rising(best=50))
    assert callback.best_score == records(tmp_path / "bad")[0]["value"] > good
    assert (tmp_path / "bad" / "checkpoints" / "best-fid.ckpt").exists()


class OtherPixels(PixelProtocol):
    sha256 = "1" * 64


def resumed(folder, callback, seed):
    """Go on for one epoch, in which every sample is too bright, from where the FID was best."""
    run = trainer(folder, [callback], max_epochs=2)
    best = folder.parent / "checkpoints" / "best-fid.ckpt"
    run.fit(Rising(best=-50), loader(8), loader(30, seed=seed), ckpt_path=best)
    return (folder / "checkpoints" / "best-fid.ckpt").exists()


class Telling(Rising):
    def __init__(self, steps, **options):
        super().__init__(**options)
        self.steps = steps

    def sampling_record(self):
        return {"solver": "DDIM", "steps": self.steps}


def test_a_best_of_other_sampling_or_averaging_decides_nothing_after_a_resume(tmp_path, recwarn):
    def run(folder, steps, decay, best, **options):
        callbacks = [EMA(decays=(decay,)), fid(tmp_path, weights="ema")]
        fit(tmp_path / folder, callbacks, Telling(steps, best=best), **options)
        return (tmp_path / folder / "checkpoints" / "best-fid.ckpt").exists()

    run("first", 20, 0.5, best=8)
    best = tmp_path / "first" / "checkpoints" / "best-fid.ckpt"
    worse = {"best": -50, "ckpt_path": best, "max_epochs": 2}
    assert not run("same", 20, 0.5, **worse)
    assert not any("it is dropped" in str(warning.message) for warning in recwarn)
    with pytest.warns(UserWarning, match="had another sampling: it is dropped"):
        assert run("sampling", 4, 0.5, **worse)
    with pytest.warns(UserWarning, match="had another ema_decay: it is dropped"):
        assert run("decay", 20, 0.25, **worse)
    decays = [records(tmp_path / name)[0]["ema_decay"] for name in ("same", "decay")]
    assert decays == [0.5, 0.25]


def test_a_best_of_an_earlier_version_stays_the_one_to_beat(tmp_path):
    fit(tmp_path, [fid(tmp_path)], Rising(best=8))
    best = tmp_path / "checkpoints" / "best-fid.ckpt"
    checkpoint = torch.load(best, weights_only=True)
    state = checkpoint["callbacks"][fid(tmp_path).state_key]
    del state["best_against"]["sampling"], state["best_against"]["ema_decay"], state["images"]
    torch.save(checkpoint, best)
    assert not resumed(tmp_path / "again", fid(tmp_path), seed=1)
    assert [record["images"] for record in records(tmp_path / "again")] == [16]


def test_a_best_of_other_real_images_or_extractor_decides_nothing_after_a_resume(tmp_path, recwarn):
    fit(tmp_path, [fid(tmp_path)], Rising(best=8))
    assert not resumed(tmp_path / "same", fid(tmp_path), seed=1)
    assert not any("it is dropped" in str(warning.message) for warning in recwarn)
    with pytest.warns(UserWarning, match=r"at step 8, had another data: it is dropped"):
        assert resumed(tmp_path / "data", fid(tmp_path), seed=2)
    with pytest.warns(UserWarning, match=r"had another reference and data: it is dropped"):
        assert resumed(tmp_path / "split", fid(tmp_path, reference="train"), seed=1)
    other = fid(tmp_path, protocol=OtherPixels)
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):
        assert resumed(tmp_path / "extractor", other, seed=1)


def test_two_extractors_have_their_own_state_and_need_their_own_names(tmp_path):
    one, fewer = fid(tmp_path), fid(tmp_path, 10)
    other = fid(tmp_path, protocol=OtherPixels, save_best=False)
    assert len({callback.state_key for callback in (one, other, fewer)}) == 3
    with pytest.raises(ValueError, match=f"would both log val/fid_{NUM}_raw"):
        fit(tmp_path, [one, other])


def test_best_fid_is_not_written_where_it_is_not_wanted(tmp_path):
    fit(tmp_path, [fid(tmp_path, save_best=False)])
    assert not (tmp_path / "checkpoints").exists()


def test_two_callbacks_that_would_write_one_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="save_best=False"):
        fit(tmp_path, [fid(tmp_path), fid(tmp_path, num_samples=10)])
    both = [fid(tmp_path), fid(tmp_path, num_samples=10, save_best=False)]
    fit(tmp_path, both)
    assert [record["num_fake"] for record in records(tmp_path)] == [NUM, 10]


# Samples that are not finite


class Diverged(Rising):
    """Some samples are NaN at step 8, and no longer at step 16."""

    how = "raises"

    def generate(self, seeds, labels=None):
        images = super().generate(seeds, labels)
        if self.global_step != 8:
            return images
        bad = [seed for seed in seeds if seed in (3, 11)]
        if self.how == "raises" and bad:
            raise NonFiniteSamples(bad, self.global_step, "t = 5")
        if self.how == "floats" and bad:
            images = images.float()
            images[[list(seeds).index(seed) for seed in bad]] = torch.nan
        return images


@pytest.mark.parametrize("how", ["raises", "floats"])
def test_samples_that_are_not_finite_give_nan_are_named_and_training_goes_on(tmp_path, how):
    memory, module = MemoryLogger(), Diverged()
    module.how = how
    with pytest.warns(UserWarning, match=r"at step 8 is NaN: 2 of 20 samples.*\[3, 11\]"):
        _, run = fit(tmp_path, [fid(tmp_path)], module, max_epochs=2, logger=memory)
    first, second = records(tmp_path)
    assert (first["value"], first["non_finite"], first["non_finite_seeds"]) == (None, 2, [3, 11])
    assert second["value"] > 0
    assert math.isnan(memory.of(f"val/fid_{NUM}_raw")[0][1])
    best = torch.load(tmp_path / "checkpoints" / "best-fid.ckpt", weights_only=True)
    assert best["global_step"] == run.global_step == 16


def test_features_that_are_not_finite_are_samples_that_are_not_finite(tmp_path):
    class Poisoned(PixelProtocol):
        def build(self):
            extractor = super().build()
            forward = extractor.forward

            def poisoned(images):
                features = forward(images)
                features[images.flatten(1).sum(1) == 0] = torch.inf
                return features

            extractor.forward = poisoned
            return extractor

    class Black(Rising):
        def generate(self, seeds, labels=None):
            images = super().generate(seeds, labels)
            images[[seed == 6 for seed in seeds]] = 0
            return images

    callback = FIDEvaluation(
        NUM, Poisoned([]), weights="raw", batch_size=8, cache_dir=str(tmp_path / "cache")
    )
    with pytest.warns(UserWarning, match=r"1 of 20 samples are not finite \(seeds \[6\]"):
        fit(tmp_path, [callback], Black())


def test_every_sample_may_be_lost(tmp_path):
    class Lost(Rising):
        def generate(self, seeds, labels=None):
            raise NonFiniteSamples(seeds, self.global_step, "t = 999")

    with pytest.warns(UserWarning, match="20 of 20"):
        fit(tmp_path, [fid(tmp_path)], Lost())
    assert records(tmp_path)[0]["value"] is None


# Mistakes are found before the first step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 1}, "num_samples must be >= 2, got 1"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"repeats_at_end": -1}, "repeats_at_end must be >= 0, got -1"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1"),
        ({"reference": "vall"}, "reference must be one of train, val, test or an existing path"),
    ],
)
def test_arguments_out_of_range_are_refused_with_rule_and_value(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        fid(tmp_path, **options)


def test_missing_weights_are_reported_before_the_first_step_by_file_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "empty"))
    module = Rising()
    callback = FIDEvaluation(NUM, InceptionV3Compat(), weights="raw")
    with pytest.raises(FileNotFoundError, match=r"weights-inception-2015-12-05-6726825d\.pth"):
        fit(tmp_path, [callback], module)
    assert module.losses == []


def test_data_that_do_not_fit_the_extractor_are_found_before_the_first_step(tmp_path):
    module = Rising()
    callback = FIDEvaluation(NUM, "digits-cnn", weights="raw", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"\(1, 8, 8\), got \(1, 2, 2\)"):
        fit(tmp_path, [callback], module)
    assert module.losses == []


def test_a_split_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="reference='test'"):
        fit(tmp_path, [fid(tmp_path, reference="test")])


def test_a_module_that_cannot_generate_is_told_what_is_missing(tmp_path):
    with pytest.raises(TypeError, match=r"generate\(seeds, .* BoringModel has none such"):
        fit(tmp_path, [fid(tmp_path)], BoringModel())


def test_fewer_samples_than_features_are_warned_of_once(tmp_path, recwarn):
    fit(tmp_path, [fid(tmp_path, num_samples=FEATURES)], max_epochs=3)
    assert sum("cannot fill a covariance" in str(warning.message) for warning in recwarn) == 1
    recwarn.clear()
    fit(tmp_path / "more", [fid(tmp_path, num_samples=FEATURES + 1)])
    assert not any("cannot fill a covariance" in str(warning.message) for warning in recwarn)


def test_the_estimate_is_within_a_factor_of_two(tmp_path):
    class Slow(Rising):
        def generate(self, seeds, labels=None):
            torch.randn(len(seeds), 60_000).sort(dim=1)
            return super().generate(seeds, labels)

    fit(tmp_path, [fid(tmp_path, num_samples=40)], Slow(), max_epochs=2)
    seconds = records(tmp_path)[1]["seconds"]
    assert 0.5 < seconds["estimated"] / seconds["total"] < 2


def test_a_config_may_name_the_protocol(tmp_path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(FIDEvaluation, "fid")
    given = {"fid": {"num_samples": 360, "extractor": "digits-cnn"}}
    callback = parser.instantiate(parser.parse_object(given)).fid
    assert callback.protocol == EmbeddedCNN("digits-cnn")


# Several processes


def run_on(processes, folder):
    script = Path(__file__).parents[1] / "support" / "fid_on_processes.py"
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(script.parents[1]), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, script, str(processes), str(folder)],
        check=True,
        timeout=180,
        env=environment,
        capture_output=True,
    )
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    return records(folder), ranks


@pytest.mark.system
def test_one_two_and_three_processes_make_the_same_evaluations(tmp_path):
    """Of 10 samples and of 2, so that there are shares that differ and shares that are empty."""
    runs = {processes: run_on(processes, tmp_path / str(processes)) for processes in (1, 2, 3)}
    expected = runs[1][0]
    assert [record["num_fake"] for record in expected] == [10, 2, 10, 2]
    for processes, (found, ranks) in runs.items():
        assert len(ranks) == processes
        scored = sorted(seed for rank in ranks for seed in rank["scored"])
        assert scored == sorted([*range(10), *range(2)])
        assert len({rank["calls"] for rank in ranks}) == 1
        for record, reference in zip(found, expected, strict=True):
            assert record["value"] == pytest.approx(reference["value"], rel=1e-12)
            assert record["floor"] == pytest.approx(reference["floor"], rel=1e-12)
            look = pytest.approx(reference["second_look"], rel=1e-6)
            assert record["second_look"] == look
            assert (record["num_real"], record["data"]) == (31, reference["data"])
            assert record["images"] == processes * record["step"]


@pytest.mark.system
def test_an_error_of_the_first_process_stops_all_instead_of_leaving_them_waiting(tmp_path):
    run_on(2, tmp_path / "run")
    for path in (tmp_path / "run" / "cache").iterdir():
        path.write_bytes(b"broken")
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_on(2, tmp_path / "run")
    assert error.value.stderr.count(b"is not a file of statistics") >= 2  # each process says it


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_score", "low"),
        ("best_step", -3),
        ("best_step", 1.5),
        ("images", (1, -2, 3)),
        ("best_against", 7),
        ("best_against", {"solver": 7}),
    ],
)
def test_a_state_that_was_not_saved_by_it_is_refused(name, value):
    callback = FIDEvaluation(16, extractor="digits-cnn")
    callback.load_state_dict(callback.state_dict())
    with pytest.raises(ValueError, match=r"must be .*, got "):
        callback.load_state_dict(callback.state_dict() | {name: value})
