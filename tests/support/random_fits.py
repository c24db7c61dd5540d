"""Configs of fits drawn from a seed: model, precision, data, callbacks, intervals, schedule."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.data.digits import Digits
from lit_diffusion.data.latents import LatentIndex
from support.small_digits import small_digits
from support.tiny_run import spec

SAMPLES = 12
MODELS = ("DDPM", "flow", "EDM", "DiT", "latents", "GAN")
LATENTS = Path("latents")


class FewDigits(Digits):
    """The first of each split."""

    def load(self, split):
        whole = super().load(split)
        num = 50 if split == "train" else SAMPLES
        return replace(whole, images=whole.images[:num], labels=whole.labels[:num])


class FourPhases(PixelCodec):
    """Stands for a VAE: (1, 8, 8) images as (4, 4, 4) latents, noisy in training."""

    bounded, sha256 = False, "a" * 64

    def encoded_shape(self, image_shape: tuple[int, ...], /) -> tuple[int, ...]:
        return 4, image_shape[1] // 2, image_shape[2] // 2

    def encode(self, images: Tensor, /) -> Tensor:
        return images.float().chunk(2, dim=1)[0]

    def encode_for_training(self, images: Tensor) -> Tensor:
        mean, logvar = images.float().chunk(2, dim=1)
        return mean + (0.5 * logvar).exp() * torch.randn_like(mean)

    def decode(self, x0: Tensor, /) -> Tensor:
        return super().decode(F.pixel_shuffle(x0, 2))


def write_latents():
    """Shards of the first digits in `LATENTS`, if they are not there."""
    if LATENTS.exists():
        return
    LATENTS.mkdir()
    means = F.pixel_unshuffle(PixelCodec().encode(FewDigits().load("train").images), 2)
    moments = torch.cat([means, torch.full_like(means, -6.0)], dim=1)
    vae, classes = ("four phases", FourPhases.sha256), tuple("0123456789")
    index = LatentIndex(50, (1, 8, 8), classes, 20, *vae, "f" * 16, flips=False)
    index.write(LATENTS)
    for name, part, _ in index.shards():
        index.write_shard(LATENTS / name, moments[list(part)], torch.tensor(part) % 10)


class SavesEvery(LastCheckpoint):
    """Saves by steps, as the clock is not the same twice."""

    def __init__(self, folder, first, every_n_steps):
        super().__init__(folder, first)
        self.every_n_steps = every_n_steps

    def _save(self, trainer):
        super()._save(trainer)
        self._due = trainer.global_step + self.every_n_steps


METHODS = {
    "flow": {
        "process": spec("LinearFlow"),
        "parameterization": spec("FlowVelocity"),
        "times": spec("LogitNormal", mean=0.0, std=1.0),
        "solver": spec("Euler", steps=2),
    },
    "EDM": {
        "process": spec("EDMProcess"),
        "parameterization": spec("EDMPreconditioning", sigma_data=0.5),
        "times": spec("LogNormal", mean=-1.2, std=1.2),
        "solver": spec("Heun", steps=2),
    },
}
"""What a method has in place of the process, parameterization, times and solver of DDPM."""
OPTIMIZERS = (
    spec("torch.optim.Adam", lr=0.002),
    spec("torch.optim.AdamW", lr=0.002, amsgrad=True),
    spec("torch.optim.Adam", lr=0.002, foreach=False),
    spec("torch.optim.RMSprop", lr=0.002, centered=True),
)
SCHEDULES = (
    None,
    spec("WarmupConstant", warmup_steps=4),
    spec("WarmupLinear", total_steps=30, warmup_steps=4),
    spec("WarmupCosine", warmup_steps=2),
    spec("torch.optim.lr_scheduler.StepLR", step_size=3, gamma=0.7),
    spec("torch.optim.lr_scheduler.CosineAnnealingLR", T_max=8),
)


def random_config(rng, root):
    """A config; `rng` is a random.Random."""
    kind = rng.choice(MODELS)
    config = small_digits(rng.randint(9, 20), **_trainer(rng), default_root_dir=root)
    trainer = config["trainer"]
    if rng.random() < 0.2:
        trainer |= {"max_steps": -1, "max_epochs": rng.randint(2, 3)}
    data = {"batch_size": rng.choice([7, 10, 12]), "num_workers": rng.choice([0, 0, 0, 1, 2])}
    config["data"] = spec("support.random_fits.FewDigits", **data)
    if kind == "GAN":
        config["model"] = _gan(rng)
        trainer |= {"accumulate_grad_batches": 1, "gradient_clip_val": None}
        trainer["callbacks"] = _gan_callbacks(rng, root)
        return config
    model = config["model"]["init_args"]
    model["network"]["init_args"] |= {"model_channels": 4, "norm_groups": 2, "dropout": 0.1}
    model["network"]["init_args"] |= {"channel_mult": [1], "attention_downsample": []}
    model |= METHODS.get(kind, {})
    model["solver"] = spec(model["solver"]["class_path"], steps=2)
    model |= {"optimizer": rng.choice(OPTIMIZERS), "lr_scheduler": rng.choice(SCHEDULES)}
    if kind == "latents":
        write_latents()
        model |= {"codec": spec("support.random_fits.FourPhases"), "image_shape": [4, 4, 4]}
        data |= {"train": str(LATENTS), "val": SAMPLES}
        model["solver"]["init_args"]["clip"] = False
        config["data"] = spec("Latents", **data)
    if kind in ("DiT", "latents"):
        channels, size, _ = model["image_shape"]
        sizes = {"image_size": size, "in_channels": channels, "out_channels": channels}
        width = {"width": 8, "depth": 1, "num_heads": 2, "num_classes": 10}
        model["network"] = spec("DiT", **sizes, **width)
    trainer["callbacks"] = _callbacks(rng, trainer, model, root, scores=kind != "latents")
    return config


def _gan(rng):
    """A DCGAN of digits; its networks step at paces of 1 to 1, 2 to 1 or 3 to 1."""
    adam = spec("torch.optim.Adam", lr=0.001, betas=[0.5, 0.999])
    return spec(
        "GANModule",
        generator=spec("DCGANGenerator", image_size=8, out_channels=1, latent_dim=4, width=4),
        discriminator=spec("DCGANDiscriminator", image_size=8, in_channels=1, width=4),
        loss=spec("NonSaturating"),
        generator_optimizer=adam,
        discriminator_optimizer=adam,
        image_shape=[1, 8, 8],
        discriminator_steps=rng.randint(1, 3),
        r1=rng.choice([0.0, 0.1]),
    )


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


def _often(rng):
    return rng.choice([None, 2, 3, 5])


def _callbacks(rng, trainer, model, root, scores):
    """A random subset, in a random order; FID among them if the data are images."""
    steps, adam = _often(rng), "Adam" in model["optimizer"]["class_path"]
    ema = rng.random() < 0.7
    averages = [
        _ours("EMA", decays=[0.9], every_n_steps=rng.randint(1, 2)),
        _ours("EMA", decays=[0.5, 0.99], on_cpu=True),
        _ours("PowerEMA", snapshot_every_n_steps=rng.choice([None, 1, 3])),
    ]
    average = rng.choice(averages)
    weights = rng.choice(["ema", "raw"]) if ema else "raw"
    fid = _fid(steps, weights, repeats_at_end=rng.choice([0, 0, 1]))
    name = f"val/fid_{SAMPLES}" + "_raw" * (weights == "raw")
    curricula = [
        _ours("TimestepCurriculum", num_steps=9, mean=0.3, std=0.2),
        _ours("LossSecondMomentResampler", num_bins=4, history=3),
        _ours("InfoNoise", num_bins=4, history=3),
        _ours("AdaptiveTimesteps", num_bins=4, every_n_steps=2, lr=0.1),
        _ours("ImportanceWeightedCurriculum", num_steps=9, std=0.3),
        _ours("CurriculumWeight", num_steps=9, std=0.3),
    ]
    curriculum, levels = rng.choice(curricula), {"num_levels": 2, "num_images": 9}
    stop = {"monitor": "val/loss", "min_delta": 0.01, "patience": 2}
    one_batch = trainer["accumulate_grad_batches"] == 1
    candidates = [
        (ema, average),
        (scores := scores and rng.random() < 0.6, fid),
        (rng.random() < 0.3, _ours("SampleGrid", num=4, every_n_steps=_often(rng))),
        (adam and rng.random() < 0.5, _ours("MomentumDecay", min_beta1=0.4)),
        (rng.random() < 0.5, curriculum),
        (rng.random() < 0.4, _ours("NoiseLevelLoss", every_n_steps=_often(rng), **levels)),
        (rng.random() < 0.2, _ours("StepSeed", seed=5)),
        (rng.random() < 0.2, _lightnings("LearningRateMonitor")),
        (rng.random() < 0.15, _lightnings("EarlyStopping", **stop)),
        (
            one_batch and rng.random() < 0.15,
            _lightnings("GradientAccumulationScheduler", scheduling={0: 1, 1: 2}),
        ),
        (rng.random() < 0.5, _keeper(rng, name if scores and steps is None else "val/loss")),
        (rng.random() < 0.8, _saves_every(rng, root)),
    ]
    return _shuffled(rng, candidates)


def _gan_callbacks(rng, root):
    steps, ema = _often(rng), rng.random() < 0.7
    averages = [
        _ours("EMA", decays=[0.9], prefix="generator", buffers=True),
        _ours("PowerEMA", prefix="generator", snapshot_every_n_steps=3),
    ]
    candidates = [
        (ema, rng.choice(averages)),
        (rng.random() < 0.6, _fid(steps, "ema" if ema else "raw")),
        (rng.random() < 0.4, _ours("SampleGrid", num=4, every_n_steps=_often(rng))),
        (rng.random() < 0.4, _ours("MomentumDecay", min_beta1=0.2, total_steps=30)),
        (rng.random() < 0.8, _saves_every(rng, root)),
    ]
    return _shuffled(rng, candidates)


def _ours(name, **arguments):
    return spec(f"lit_diffusion.callbacks.{name}", **arguments)


def _lightnings(name, **arguments):
    return spec(f"lightning.pytorch.callbacks.{name}", **arguments)


def _fid(steps, weights, **more):
    small = {"num_samples": SAMPLES, "batch_size": SAMPLES, "extractor": "digits-cnn"}
    return _ours("FIDEvaluation", every_n_steps=steps, weights=weights, **small, **more)


def _shuffled(rng, candidates):
    callbacks = [callback for wanted, callback in candidates if wanted]
    rng.shuffle(callbacks)
    return callbacks


def _saves_every(rng, root):
    when = {"first": rng.randint(1, 4), "every_n_steps": rng.randint(1, 5)}
    return spec("support.random_fits.SavesEvery", folder=f"{root}/checkpoints", **when)


def _keeper(rng, metric):
    """One that keeps other checkpoints than the last."""
    by_metric = {"monitor": rng.choice([metric, "val/loss"]), "save_top_k": rng.randint(1, 3)}
    ways = [
        by_metric,
        by_metric | {"filename": "best"},
        by_metric | {"every_n_train_steps": rng.randint(2, 4)},
        {"monitor": "train/loss", "every_n_train_steps": rng.randint(1, 3)},
        {"save_top_k": -1, "every_n_train_steps": rng.randint(2, 5)},
        {"every_n_train_steps": rng.randint(2, 4)},
        {"every_n_epochs": 1, "save_weights_only": rng.random() < 0.5},
    ]
    return _lightnings("ModelCheckpoint", **rng.choice(ways))
