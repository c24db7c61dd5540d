"""Configs of fits drawn from a seed: precision, data, callbacks, intervals, schedule."""

from dataclasses import replace

from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from lit_diffusion.data.digits import Digits
from support.small_digits import small_digits

CALLBACKS = "lit_diffusion.callbacks"
LIGHTNING = "lightning.pytorch.callbacks"
SAMPLES = 12


class FewDigits(Digits):
    """The first of each split."""

    def load(self, split):
        whole = super().load(split)
        num = 50 if split == "train" else SAMPLES
        return replace(whole, images=whole.images[:num], labels=whole.labels[:num])


class SavesEvery(LastCheckpoint):
    """Saves by steps, as the clock is not the same twice."""

    def __init__(self, folder, first, every_n_steps):
        super().__init__(folder, first)
        self.every_n_steps = every_n_steps

    def _save(self, trainer):
        super()._save(trainer)
        self._due = trainer.global_step + self.every_n_steps


def random_config(rng, root):
    """A config; `rng` is a random.Random."""
    config = small_digits(rng.randint(9, 20), **_trainer(rng), default_root_dir=root)
    trainer, model = config["trainer"], config["model"]["init_args"]
    if rng.random() < 0.2:
        trainer |= {"max_steps": -1, "max_epochs": rng.randint(2, 3)}
    model["network"]["init_args"] |= {"model_channels": 4, "norm_groups": 2, "dropout": 0.1}
    model["network"]["init_args"] |= {"channel_mult": [1], "attention_downsample": []}
    model["solver"]["init_args"]["steps"] = 2
    model |= {"optimizer": _optimizer(rng), "lr_scheduler": _schedule(rng)}
    trainer["callbacks"] = _callbacks(rng, trainer, model, root)
    data = {"batch_size": rng.choice([7, 10, 12]), "num_workers": rng.choice([0, 0, 0, 1, 2])}
    config["data"] = _spec("support.random_fits.FewDigits", **data)
    return config


def _trainer(rng):
    validations = [
        {"check_val_every_n_epoch": None, "val_check_interval": rng.randint(2, 7)},
        {"val_check_interval": rng.randint(1, 3)},
        {"val_check_interval": 0.5},
        {"check_val_every_n_epoch": rng.randint(1, 2)},
    ]
    return {
        "precision": rng.choice(["32-true", "64-true", "bf16-true", "bf16-mixed"]),
        "accumulate_grad_batches": rng.randint(1, 3),
        "log_every_n_steps": rng.randint(1, 4),
        "gradient_clip_val": rng.choice([None, 1.0]),
        "num_sanity_val_steps": rng.randint(0, 1),
        "enable_progress_bar": rng.random() < 0.3,
        **rng.choice(validations),
    }


def _optimizer(rng):
    return rng.choice(
        [
            _spec("torch.optim.Adam", lr=0.002),
            _spec("torch.optim.AdamW", lr=0.002, amsgrad=True),
            _spec("torch.optim.Adam", lr=0.002, foreach=False),
            _spec("torch.optim.RMSprop", lr=0.002, centered=True),
        ]
    )


def _schedule(rng):
    ours, theirs = "lit_diffusion.lr_schedules", "torch.optim.lr_scheduler"
    return rng.choice(
        [
            None,
            _spec(f"{ours}.WarmupConstant", warmup_steps=4),
            _spec(f"{ours}.WarmupLinear", total_steps=30, warmup_steps=4),
            _spec(f"{ours}.WarmupCosine", warmup_steps=2),
            _spec(f"{theirs}.StepLR", step_size=3, gamma=0.7),
            _spec(f"{theirs}.CosineAnnealingLR", T_max=8),
        ]
    )


def _callbacks(rng, trainer, model, root):
    """A random subset, in a random order."""

    def often():
        return rng.choice([None, 2, 3, 5])

    steps, adam = often(), "Adam" in model["optimizer"]["class_path"]
    ema = rng.random() < 0.7
    decays = rng.choice([[0.9], [0.5, 0.99]])
    fid = _spec(
        f"{CALLBACKS}.FIDEvaluation",
        num_samples=SAMPLES,
        extractor="digits-cnn",
        batch_size=SAMPLES,
        every_n_steps=steps,
        weights=rng.choice(["ema", "raw"]) if ema else "raw",
        repeats_at_end=rng.choice([0, 0, 1]),
    )
    name = f"val/fid_{SAMPLES}" + "_raw" * (fid["init_args"]["weights"] == "raw")
    times = rng.choice(
        [
            _spec(f"{CALLBACKS}.TimestepCurriculum", num_steps=9, mean=0.3, std=0.2),
            _spec(f"{CALLBACKS}.LossSecondMomentResampler", num_bins=4, history=3),
            _spec(f"{CALLBACKS}.ImportanceWeightedCurriculum", num_steps=9, std=0.3),
            _spec(f"{CALLBACKS}.CurriculumWeight", num_steps=9, std=0.3),
        ]
    )
    candidates = [
        (ema, _spec(f"{CALLBACKS}.EMA", decays=decays, every_n_steps=rng.randint(1, 2))),
        (scores := rng.random() < 0.6, fid),
        (rng.random() < 0.3, _spec(f"{CALLBACKS}.SampleGrid", num=4, every_n_steps=often())),
        (adam and rng.random() < 0.5, _spec(f"{CALLBACKS}.MomentumDecay", min_beta1=0.4)),
        (rng.random() < 0.5, times),
        (
            rng.random() < 0.4,
            _spec(f"{CALLBACKS}.NoiseLevelLoss", num_levels=2, num_images=9, every_n_steps=often()),
        ),
        (rng.random() < 0.2, _spec(f"{CALLBACKS}.StepSeed", seed=5)),
        (rng.random() < 0.2, _spec(f"{LIGHTNING}.LearningRateMonitor")),
        (
            rng.random() < 0.15,
            _spec(f"{LIGHTNING}.EarlyStopping", monitor="val/loss", min_delta=0.01, patience=2),
        ),
        (
            trainer["accumulate_grad_batches"] == 1 and rng.random() < 0.15,
            _spec(f"{LIGHTNING}.GradientAccumulationScheduler", scheduling={0: 1, 1: 2}),
        ),
        (rng.random() < 0.5, _keeper(rng, name if scores and steps is None else "val/loss")),
        (
            rng.random() < 0.8,
            _spec(
                "support.random_fits.SavesEvery",
                folder=f"{root}/checkpoints",
                first=rng.randint(1, 4),
                every_n_steps=rng.randint(1, 5),
            ),
        ),
    ]
    callbacks = [callback for wanted, callback in candidates if wanted]
    rng.shuffle(callbacks)
    return callbacks


def _keeper(rng, metric):
    """One that keeps other checkpoints than the last."""
    by_metric = {"monitor": rng.choice([metric, "val/loss"]), "save_top_k": rng.randint(1, 3)}
    return _spec(
        f"{LIGHTNING}.ModelCheckpoint",
        **rng.choice(
            [
                by_metric,
                by_metric | {"filename": "best"},
                by_metric | {"every_n_train_steps": rng.randint(2, 4)},
                {"monitor": "train/loss", "every_n_train_steps": rng.randint(1, 3)},
                {"save_top_k": -1, "every_n_train_steps": rng.randint(2, 5)},
                {"every_n_train_steps": rng.randint(2, 4)},
                {"every_n_epochs": 1, "save_weights_only": rng.random() < 0.5},
            ]
        ),
    )


def _spec(path, **arguments):
    return {"class_path": path, "init_args": arguments}
