import json
import math

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from support.memory_logger import MemoryLogger
from support.pixels import FEATURES, PixelProtocol, random_images
from support.rising import Rising, loader, trainer
from support.spawn import rank_and_size, spawn
from support.vision_transformers import publish, write_clip
from torchvision.transforms.functional import to_pil_image

from lit_diffusion.callbacks.ema import EMA
from lit_diffusion.callbacks.fid import FIDEvaluation
from lit_diffusion.callbacks.step_seed import StepSeed
from lit_diffusion.metrics.extractors import InceptionV3Compat
from lit_diffusion.metrics.frechet import FrechetDistance
from lit_diffusion.metrics.vision_transformers import CLIP
from lit_diffusion.protocols import NonFiniteSamples

NUM = 20
NAME = f"val/fid_{NUM}_raw"


def fid(tmp_path, num_samples=NUM, protocol=PixelProtocol, **options):
    defaults = {"weights": "raw", "batch_size": 8, "auxiliary_metrics": False}
    defaults["cache_dir"] = str(tmp_path / "cache")
    return FIDEvaluation(num_samples, protocol([]), **(defaults | options))


def fit(folder, *callbacks, module=None, ckpt_path=None, seed=1, **options):
    """Train for an epoch of 8 steps, and validate on 30 images."""
    module = Rising() if module is None else module
    run = trainer(folder, list(callbacks), **options)
    run.fit(module, loader(8), loader(30, seed=seed), ckpt_path=ckpt_path)
    return module, run


def records(folder, *names):
    """Lines of evaluations.jsonl, or what they have under some names."""
    lines = (folder / "evaluations.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    return [tuple(line[name] for name in names) for line in lines] if names else lines


def best(folder):
    """The checkpoint of the best step; None without one."""
    file = folder / "checkpoints" / "best-fid.ckpt"
    return torch.load(file, weights_only=True) if file.exists() else None


def distance(module, seeds):
    with torch.no_grad():
        samples = module.eval().generate(seeds)
    metric = FrechetDistance(FEATURES)
    metric.update(samples.flatten(1), real=False)
    metric.update(random_images(30, 1).flatten(1), real=True)
    return pytest.approx(metric.compute().item(), rel=1e-6)


def averaged(step, decay=0.5):
    """`level` is k after step k; so is its average, up to the history."""
    level = 0.0
    for k in range(1, step + 1):
        level = decay * level + (1 - decay) * k
    return level


# Where the files are


def test_each_run_of_another_project_writes_where_its_logger_does_and_into_no_other(tmp_path):
    for version in range(2):
        fit(tmp_path, fid(tmp_path), logger=CSVLogger(tmp_path, name="project"))
        folder = tmp_path / f"project/version_{version}"
        assert records(folder, "step") == [(8,)]
        assert best(folder)["global_step"] == 8
    assert not (tmp_path / "evaluations.jsonl").exists()
    with pytest.raises(
        ValueError, match=r"evaluations\.jsonl belongs to another run: give the Trainer"
    ):
        fit(folder, fid(tmp_path))
    assert records(folder, "step") == [(8,)]


def test_a_damaged_list_of_evaluations_is_named_before_the_first_step(tmp_path):
    _, run = fit(tmp_path, fid(tmp_path))
    run.save_checkpoint(tmp_path / "c.ckpt")
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 16')
    module = Rising()
    with pytest.raises(ValueError, match=r"evaluations\.jsonl is damaged or no list of evaluat"):
        fit(tmp_path, fid(tmp_path), module=module, ckpt_path=tmp_path / "c.ckpt", max_epochs=2)
    assert module.losses == []


# What is measured


def test_every_evaluation_is_logged_and_written_with_its_protocol(tmp_path):
    memory = MemoryLogger()
    module, run = fit(
        tmp_path, fid(tmp_path, batch_size=7, auxiliary_metrics=True), max_epochs=2, logger=memory
    )
    first, second = records(tmp_path)
    assert (first["step"], second["step"]) == (8, 16)
    assert second["value"] == distance(module, range(NUM))
    for name, key in ((NAME, "value"), (f"{NAME}_floor", "floor")):
        (one, at_one), (two, at_two) = memory.of(name)
        assert (one, two) == (7, 15)
        assert [at_one, at_two] == pytest.approx([first[key], second[key]], rel=1e-6)
        assert run.callback_metrics[name] == at_two
    seconds = first.pop("seconds")
    assert set(seconds) == {"generate", "features", "second look", "total", "estimated"}
    assert min(first.pop("value"), first.pop("floor"), first["second_look"]["pixels"]) > 0
    assert len(first.pop("data")) == 16
    assert set(first.pop("second_look")) == {
        *("pixels", "pixels floor", "random-cnn", "random-cnn floor"),
        *("precision", "recall", "pixel precision", "pixel recall", "memorized"),
    }
    assert first == {
        "metric": NAME,
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
        "floor_sd": None,  # 8 images of 8
        "floor_images": "8 train images against val",
        "non_finite": 0,
        "non_finite_seeds": [],
    }


def test_another_distance_has_another_name_beside_the_fid(tmp_path, monkeypatch):
    memory = MemoryLogger()
    clip = publish(monkeypatch, CLIP, write_clip(tmp_path / "clip.pt"))
    other = fid(tmp_path, protocol=lambda _: clip, save_best=False)
    fit(tmp_path, fid(tmp_path), other, logger=memory)
    name = f"val/fd_clip_{NUM}_raw"
    first, second = records(tmp_path)
    assert (first["metric"], second["metric"]) == (NAME, name)
    assert (second["protocol"], second["resize"]) == ("clip-vit-b-32", clip.resize)
    assert second["extractor_sha256"] == clip.sha256
    assert min(second["value"], second["floor"]) > 0
    for logged, key in ((name, "value"), (f"{name}_floor", "floor")):
        assert memory.of(logged) == [(7, pytest.approx(second[key], rel=1e-6))]


class Telling(Rising):
    num_classes = 3

    def __init__(self, steps=20, **options):
        super().__init__(**options)
        self.steps = steps

    def sampling_record(self):
        return {"solver": "DDIM", "steps": self.steps}


def test_sampling_and_labels_are_recorded_as_the_module_tells_them(tmp_path):
    module, _ = fit(tmp_path, fid(tmp_path), module=Telling())
    (record,) = records(tmp_path)
    assert record["sampling"] == {"solver": "DDIM", "steps": 20}
    assert record["labels"] == "seed % 3"
    assert module.labels == [seed % 3 for seed in range(NUM)]
    assert record["second_look"] == {}


@pytest.mark.parametrize(
    ("num", "weights", "name"),
    [(2, "ema", "2"), (1000, "ema", "1k"), (1500, "ema", "1500"), (50_000, "raw", "50k_raw")],
)
def test_the_name_tells_the_number_and_weights_other_than_ema(tmp_path, num, weights, name):
    assert fid(tmp_path, num, weights=weights).metric_name("val") == f"val/fid_{name}"


def test_a_folder_of_images_may_be_the_reference(tmp_path):
    folder = tmp_path / "real"
    folder.mkdir()
    for number, image in enumerate(random_images(30, 1)):
        to_pil_image(image).save(folder / f"{number:03d}.png")
    fit(tmp_path, fid(tmp_path))
    fit(tmp_path / "other", fid(tmp_path, reference=str(folder)))
    assert records(tmp_path / "other", "value", "data") == records(tmp_path, "value", "data")
    assert records(tmp_path / "other")[0]["reference"] == str(folder)
    assert records(tmp_path / "other")[0]["floor_images"].startswith("15 ")


def test_a_resume_in_an_epoch_without_validation_finds_the_validation_data(tmp_path):
    """Lightning makes their loader in the epoch that needs it."""
    options = {"check_val_every_n_epoch": 2}
    _, first = fit(tmp_path, fid(tmp_path), max_epochs=2, **options)
    first.save_checkpoint(tmp_path / "c.ckpt")
    fit(tmp_path, fid(tmp_path), ckpt_path=tmp_path / "c.ckpt", max_epochs=4, **options)
    assert records(tmp_path, "step") == [(16,), (32,)]
    assert len({*records(tmp_path, "data", "floor", "floor_images")}) == 1


# The last step again


@pytest.mark.parametrize(("every_n_steps", "evaluations"), [(None, 1), (3, 3)])
def test_the_last_step_is_evaluated_again_with_the_next_seeds(tmp_path, every_n_steps, evaluations):
    ema = EMA(decays=(0.5,), warmup=False)
    callback = fid(tmp_path, weights="ema", repeats_at_end=2, every_n_steps=every_n_steps)
    module, _ = fit(tmp_path, ema, callback)
    assert module.seeds == [*range(NUM)] * evaluations + [*range(NUM, 3 * NUM)]
    curve = [record["value"] for record in records(tmp_path) if record["seeds"][0] == 0]
    assert callback.best_score == min(curve)  # of no repeat
    last = [record for record in records(tmp_path) if record["step"] == 8]
    assert [record["seeds"] for record in last] == [[i * NUM, (i + 1) * NUM] for i in range(3)]
    with torch.no_grad():
        module.level.fill_(averaged(8))
    assert [record["value"] for record in last] == [
        distance(module, range(i * NUM, (i + 1) * NUM)) for i in range(3)
    ]


# Which weights


@pytest.mark.parametrize(
    ("weights", "ema_first", "every_n_steps"),
    [("ema", True, None), ("ema", False, 3), ("raw", True, 3)],
)
def test_weights_are_those_asked_for_wherever_the_callbacks_stand(
    tmp_path, ema_first, every_n_steps, weights
):
    """Training goes on with the raw weights, which best-fid.ckpt holds."""
    ema = EMA(decays=(0.5,), warmup=False)
    both = [ema, fid(tmp_path, weights=weights, every_n_steps=every_n_steps)]
    module, _ = fit(tmp_path, *(both if ema_first else reversed(both)), max_epochs=2)
    steps = [step for (step,) in records(tmp_path, "step")]
    assert steps == ([8, 16] if every_n_steps is None else [3, 6, 9, 12, 15])
    expected = [averaged(step) if weights == "ema" else step for step in steps]
    batches = math.ceil(NUM / 8)
    assert module.levels == pytest.approx([level for level in expected for _ in range(batches)])
    assert module.level.item() == 16
    assert best(tmp_path)["state_dict"].keys() == module.state_dict().keys()
    assert best(tmp_path)["state_dict"]["level"] == best(tmp_path)["global_step"]


def test_an_unknown_name_of_weights_is_answered_with_the_known_ones(tmp_path):
    module = Rising()
    with pytest.raises(ValueError, match="provide raw; add lit_diffusion"):
        fit(tmp_path, fid(tmp_path, weights="ema"), module=module)
    with pytest.raises(ValueError, match=r"provide ema, ema_0\.5, raw"):
        fit(tmp_path, EMA(decays=(0.5,)), fid(tmp_path, weights="ema_0.9"), module=module)
    assert module.losses == []


# When


def test_nothing_is_evaluated_in_the_sanity_check_and_in_fast_dev_run(tmp_path):
    module, _ = fit(tmp_path, fid(tmp_path), num_sanity_val_steps=2)
    assert len(records(tmp_path)) == 1
    module, _ = fit(tmp_path / "trial", fid(tmp_path), fast_dev_run=True)
    assert len(module.levels) == 1
    assert not (tmp_path / "trial" / "evaluations.jsonl").exists()


def test_a_module_that_never_validates_is_evaluated_by_steps_or_refused(tmp_path):
    module = Rising()
    with pytest.raises(ValueError, match="pass every_n_steps"):
        trainer(tmp_path, [fid(tmp_path, reference="train")]).fit(module, loader(8))
    assert module.losses == []
    callback = fid(tmp_path, every_n_steps=4, reference="train")
    trainer(tmp_path, [callback], max_epochs=2).fit(module, loader(8))
    assert records(tmp_path, "step", "floor_images") == [
        (step, "4 train images against 4 others of them") for step in (4, 8, 12, 16)
    ]


def test_what_watches_the_fid_finds_it_or_is_refused_before_the_first_step(tmp_path):
    fit(tmp_path, fid(tmp_path), EarlyStopping(monitor=NAME))
    module, watcher = Rising(), EarlyStopping(monitor=NAME)
    with pytest.raises(ValueError, match=r"every_n_steps=4.*val_check_interval"):
        fit(tmp_path, fid(tmp_path, every_n_steps=4), watcher, module=module)
    assert module.losses == []


def test_test_scores_the_test_split_under_its_own_name(tmp_path):
    module, run = fit(tmp_path, fid(tmp_path))
    run.test(module, loader(40, seed=2))
    record = records(tmp_path)[-1]
    assert record["metric"] == f"test/fid_{NUM}_raw"
    assert (record["reference"], record["num_real"], record["step"]) == ("test", 40, 8)
    assert run.callback_metrics[record["metric"]] == pytest.approx(record["value"], rel=1e-6)


def test_validate_from_a_checkpoint_scores_its_weights_and_names_its_step(tmp_path):
    _, run = fit(tmp_path, fid(tmp_path))
    run.save_checkpoint(tmp_path / "end.ckpt")
    module, again = Rising(), trainer(tmp_path / "again", [fid(tmp_path, every_n_steps=100)])
    again.validate(module, loader(30, seed=1), ckpt_path=tmp_path / "end.ckpt")
    assert set(module.levels) == {8.0}
    assert records(tmp_path / "again", "step", "value") == records(tmp_path, "step", "value")


def test_validate_from_weights_alone_names_their_step_too(tmp_path):
    _, run = fit(tmp_path, fid(tmp_path))
    run.save_checkpoint(tmp_path / "end.ckpt")
    _, run = fit(tmp_path / "longer", fid(tmp_path), max_epochs=2)
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    again = trainer(tmp_path / "again", [fid(tmp_path)])
    for name in ("end", "weights"):
        again.validate(Rising(), loader(30, seed=1), ckpt_path=tmp_path / f"{name}.ckpt")
    assert records(tmp_path / "again", "step") == [(8,), (16,)]


def test_validate_in_the_run_folder_keeps_the_images_and_the_order_of_its_lines(tmp_path):
    module, _ = fit(tmp_path, fid(tmp_path), module=Rising(best=8), max_epochs=3)
    before = records(tmp_path, "step", "images", "value")
    assert [line[:2] for line in before] == [(8, 8), (16, 16), (24, 24)]
    file = tmp_path / "checkpoints" / "best-fid.ckpt"
    trainer(tmp_path, [fid(tmp_path)]).validate(module, loader(30, seed=1), ckpt_path=file)
    assert records(tmp_path, "step", "images", "value") == before


# What training and the extractor see


# The best step


def test_best_fid_holds_the_weights_of_the_step_that_was_scored_best(tmp_path):
    """Scored at 3, 6, 9, ...: the FID falls, then rises; `level` says which step was saved."""
    callback = fid(tmp_path, every_n_steps=3)
    _, run = fit(tmp_path, callback, module=Rising(best=9), max_epochs=3)
    scores = dict(records(tmp_path, "step", "value"))
    assert min(scores, key=scores.get) == 9
    assert best(tmp_path)["global_step"] == 9
    assert best(tmp_path)["state_dict"]["level"] == 9
    assert (callback.best_step, callback.best_score) == (9, scores[9])
    assert not any("fid" in name for name in run.callback_metrics)  # nothing may monitor it


@pytest.mark.parametrize("every_n_steps", [None, 4])
def test_the_loggers_have_it_in_the_row_of_the_batch_that_made_the_weights(tmp_path, every_n_steps):
    """Before the best is saved: else a run that resumes from the file would lack the row."""

    class Counting(Rising):
        def training_step(self, batch, batch_idx):
            self.log("train/steps_after", self.global_step + 1.0)
            return super().training_step(batch, batch_idx)

    rows_at_saves = []
    watch = LambdaCallback(on_save_checkpoint=lambda *_: rows_at_saves.append(len(memory.of(NAME))))
    memory, callback = MemoryLogger(), fid(tmp_path, every_n_steps=every_n_steps)
    options = {"logger": memory, "log_every_n_steps": 1, "max_epochs": 3, "val_check_interval": 4}
    fit(tmp_path, callback, watch, module=Counting(best=24), **options)
    steps_after = dict(memory.of("train/steps_after"))
    assert [steps_after[row] for row, _ in memory.of(NAME)] == [4, 8, 12, 16, 20, 24]
    assert [step for (step,) in records(tmp_path, "step")] == [4, 8, 12, 16, 20, 24]
    assert rows_at_saves == [1, 4, 5, 6]  # the second and third are no better


@pytest.mark.quick
@pytest.mark.parametrize(
    ("every_n_steps", "validate_every", "step"),
    [(None, 8, 8), (None, 3, 11), (3, 8, 12)],
    ids=["epoch end", "uneven", "by steps"],
)
def test_a_run_that_resumes_from_best_fid_is_the_undisturbed_one(
    tmp_path, every_n_steps, validate_every, step
):
    def run(folder, **options):
        callbacks = [StepSeed(7), EMA(decays=(0.5,)), fid(tmp_path, every_n_steps=every_n_steps)]
        options |= {"max_epochs": 3, "val_check_interval": validate_every}
        return fit(folder, *callbacks, module=Rising(best=step), **options)

    whole, _ = run(tmp_path / "whole")
    assert best(tmp_path / "whole")["global_step"] == step
    file = tmp_path / "whole" / "checkpoints" / "best-fid.ckpt"
    resumed, trainer_of_resumed = run(tmp_path / "resumed", ckpt_path=file)
    assert trainer_of_resumed.global_step == 24
    assert resumed.losses == whole.losses[step:]
    expected = [r for r in records(tmp_path / "whole", "step", "images", "value") if r[0] > step]
    assert records(tmp_path / "resumed", "step", "images", "value") == expected
    assert best(tmp_path / "resumed") is None  # nothing was better


class OtherPixels(PixelProtocol):
    sha256 = "1" * 64


@pytest.mark.slow
def test_a_best_that_was_measured_otherwise_decides_nothing_after_a_resume(tmp_path, recwarn):
    """Resumed for an epoch in which every sample is too bright."""

    def run(name, steps=20, decay=0.5, level=-50, protocol=PixelProtocol, **options):
        score = fid(tmp_path, weights="ema", protocol=protocol)
        callbacks = EMA(decays=(decay,)), score
        fit(tmp_path / name, *callbacks, module=Telling(steps, best=level), **options)
        return best(tmp_path / name) is not None

    run("first", level=8)
    file = tmp_path / "first" / "checkpoints" / "best-fid.ckpt"
    resume = {"ckpt_path": file, "max_epochs": 2}
    assert not run("same", **resume)
    old = torch.load(file, weights_only=True)  # of a version that did not save these
    state = old["callbacks"][fid(tmp_path, weights="ema").state_key]
    del state["best_against"]["sampling"], state["best_against"]["ema_decay"], state["images"]
    torch.save(old, tmp_path / "old.ckpt")
    assert not run("old", ckpt_path=tmp_path / "old.ckpt", max_epochs=2)
    assert records(tmp_path / "old", "images") == [(16,)]
    assert not any("it is dropped" in str(warning.message) for warning in recwarn)
    for what, options in {
        "sampling": {"steps": 4},
        "ema_decay": {"decay": 0.25},
        "data": {"seed": 2},
    }.items():
        dropped = f"at step 8, was measured with another {what}: it is dropped"
        with pytest.warns(UserWarning, match=dropped):
            assert run(what, **resume, **options)
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):
        assert run("extractor", **resume, protocol=OtherPixels)
    assert records(tmp_path / "ema_decay", "ema_decay") == [(0.25,)]


def test_two_callbacks_have_their_own_state_and_need_their_own_names_and_files(tmp_path):
    one, fewer = fid(tmp_path), fid(tmp_path, 10)
    other = fid(tmp_path, protocol=OtherPixels, save_best=False)
    assert len({callback.state_key for callback in (one, other, fewer)}) == 3
    with pytest.raises(ValueError, match=f"would both log {NAME}"):
        fit(tmp_path, one, other)
    with pytest.raises(ValueError, match="save_best=False"):
        fit(tmp_path, one, fewer)
    fit(tmp_path, fid(tmp_path, save_best=False), fid(tmp_path, 10, save_best=False))
    assert records(tmp_path, "num_fake") == [(NUM,), (10,)]
    assert best(tmp_path) is None


# Samples that are not finite


class Diverged(Rising):
    """Samples 3 and 11 are NaN at step 8, and no longer at step 16."""

    def generate(self, seeds, labels=None):
        bad = [seed for seed in seeds if seed in (3, 11)]
        if self.global_step == 8 and bad:
            raise NonFiniteSamples(bad, self.global_step, "t = 5")
        return super().generate(seeds, labels)


def test_samples_that_are_not_finite_give_nan_are_named_and_training_goes_on(tmp_path):
    memory, callback = MemoryLogger(), fid(tmp_path)
    with pytest.warns(UserWarning, match=r"at step 8 is NaN: 2 of 20 samples.*\[3, 11\]"):
        _, run = fit(tmp_path, callback, module=Diverged(), max_epochs=2, logger=memory)
    first, second = records(tmp_path, "value", "non_finite", "non_finite_seeds")
    assert first == (None, 2, [3, 11])
    assert second[0] > 0
    assert math.isnan(memory.of(NAME)[0][1])
    assert best(tmp_path)["global_step"] == run.global_step == 16


# Mistakes are found before the first step


def test_arguments_out_of_range_are_refused_with_rule_and_value(tmp_path):
    for options, message in (
        ({"num_samples": 1}, "num_samples must be from 2 to 100,000,000, got 1"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"repeats_at_end": -1}, "repeats_at_end must be >= 0, got -1"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1 or None, got 0"),
        ({"reference": "vall"}, "reference must be one of train, val, test or an existing path"),
    ):
        with pytest.raises(ValueError, match=message):
            fid(tmp_path, **options)


def test_what_is_missing_or_does_not_fit_is_found_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "empty"))
    module, cache = Rising(), {"weights": "raw", "cache_dir": str(tmp_path / "cache")}
    for callback, error, message in (
        (FIDEvaluation(NUM, InceptionV3Compat(), **cache), FileNotFoundError, r"6726825d\.pth"),
        (FIDEvaluation(NUM, "digits-cnn", **cache), ValueError, r"\(1, 8, 8\), got \(1, 2, 2\)"),
        (fid(tmp_path, reference="test"), ValueError, "reference='test'"),
    ):
        with pytest.raises(error, match=message):
            fit(tmp_path, callback, module=module)
    assert module.losses == []
    monkeypatch.delattr(Rising, "generate")
    with pytest.raises(TypeError, match=r"generate\(seeds, .* Rising has no such method"):
        fit(tmp_path, fid(tmp_path), module=module)


# Several processes


def evaluate_on_ranks(folder):
    """Evaluate 10 samples and 2; returns the seeds that a rank scored, and its calls."""
    processes = rank_and_size()[1]
    options = {"weights": "raw", "batch_size": 3, "cache_dir": str(folder / "cache")}
    callbacks = [
        FIDEvaluation(num, PixelProtocol([]), save_best=num == 10, **options) for num in (10, 2)
    ]
    ddp = {"strategy": "ddp", "devices": processes} if processes > 1 else {}
    module = Rising(best=2)
    module.on_validation_start = lambda: (module.seeds.clear(), module.levels.clear())
    run = trainer(folder, callbacks, max_epochs=2, limit_train_batches=2, **ddp)
    run.fit(module, loader(12), loader(31, seed=1))
    scored = [seed for seed in module.seeds if seed % run.world_size == run.global_rank]
    return scored, len(module.levels)


@pytest.mark.system
def test_one_and_three_processes_make_the_same_evaluations(tmp_path):
    """Of 10 samples and of 2, so that there are shares that differ and shares that are empty."""
    for folder in ("1", "3"):
        (tmp_path / folder).mkdir()
    with pytest.warns(UserWarning, match="2 images cannot fill a covariance"):
        evaluate_on_ranks(tmp_path / "1")
    expected = records(tmp_path / "1")
    assert [record["num_fake"] for record in expected] == [10, 2, 10, 2]
    ranks = spawn(evaluate_on_ranks, 3, tmp_path / "3")
    scored = sorted(seed for seeds, _ in ranks for seed in seeds)
    assert scored == sorted([*range(10), *range(2)])
    assert len({calls for _, calls in ranks}) == 1
    for record, reference in zip(records(tmp_path / "3"), expected, strict=True):
        for key in ("value", "floor"):
            assert record[key] == pytest.approx(reference[key], rel=1e-12)
        assert record["second_look"] == pytest.approx(reference["second_look"], rel=1e-6)
        assert (record["num_real"], record["data"]) == (31, reference["data"])
        assert record["images"] == 3 * record["step"]
