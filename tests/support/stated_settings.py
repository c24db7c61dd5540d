"""The settings of the shipped configs as numbers of their sources, to compare the files with.

Sources: appendix B of "Why diffusion models are stable and how to make them faster" (2023), and of
what it builds on: improved-diffusion, guided-diffusion, Min-SNR, P2, FDM; for U-ViT of its
repository's configurations.
"""

from collections.abc import Iterator
from typing import Any


def flat(settings: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names; a class has that of its place, a callback its own."""
    if not isinstance(settings, dict):
        yield name, settings
        return
    for key, value in settings.items():
        if key in ("class_path", "init_args"):
            yield from flat(value, name)
        elif key.startswith("callbacks"):
            for callback in value:
                own = callback["class_path"].rpartition(".")[2]
                yield from flat(callback, f"{name}.{key}.{own}")
        else:
            yield from flat(value, f"{name}.{key}".lstrip("."))


def _added(
    callback: str, package: str = "lit_diffusion.callbacks", **arguments: Any
) -> dict[str, Any]:
    name = f"trainer.callbacks+.{callback}"
    return {name: f"{package}.{callback}"} | {
        f"{name}.{key}": value for key, value in arguments.items()
    }


def _clts(num_steps: int, num_bins: int) -> dict[str, Any]:
    arguments = {"num_steps": num_steps, "mean": 0.3, "std": 1.0, "num_bins": num_bins}
    return _added("TimestepCurriculum", **arguments)


def _shifting(num_steps: int, num_bins: int) -> dict[str, Any]:
    arguments = {"start": 1.0, "end": 0.0, "std": 0.25, "num_bins": num_bins}
    package = "lit_diffusion.lab.shifting_gaussian"
    return _added("ShiftingGaussian", package, num_steps=num_steps, **arguments)


def _linear(num_steps: int) -> dict[str, Any]:
    name = "model.process.betas"
    return {name: "lit_diffusion.processes.LinearBetas", f"{name}.num_steps": num_steps}


def _weighting(name: str, **arguments: Any) -> dict[str, Any]:
    here = "model.loss.weighting"
    return {here: f"lit_diffusion.losses.{name}"} | {
        f"{here}.{key}": value for key, value in arguments.items()
    }


def _fdm(warmup_steps: int) -> dict[str, Any]:
    return _damped("Epsilon", 0.001, 152.17, warmup_steps)


def _edm_fdm(warmup_steps: int) -> dict[str, Any]:
    return _damped("EDMPreconditioning", 0.002, 80.0, warmup_steps)


def _damped(base: str, sigma_min: float, sigma_max: float, warmup_steps: int) -> dict[str, Any]:
    here, weighting = "model.parameterization", "lit_diffusion.losses.Simple"
    return _weighting("FDMWarmup", base=weighting, warmup_steps=warmup_steps) | {
        here: "lit_diffusion.parameterizations.FDM",
        f"{here}.base": f"lit_diffusion.parameterizations.{base}",
        f"{here}.sigma_min": sigma_min,
        f"{here}.sigma_max": sigma_max,
        f"{here}.multiplier": 2.0,
    }


def _optimizer(name: str, **arguments: float) -> dict[str, Any]:
    here = "model.optimizer"
    return {here: f"torch.optim.{name}"} | {f"{here}.{key}": v for key, v in arguments.items()}


_BOTH = {
    "model.optimizer": "torch.optim.Adam",
    "model.optimizer.lr": 1e-4,
    "model.optimizer.betas": [0.9, 0.999],
    "model.optimizer.weight_decay": None,
    "model.lr_scheduler": None,
    "trainer.gradient_clip_val": None,
    "trainer.accumulate_grad_batches": None,
    "trainer.callbacks.EMA.decays": [0.9999],
    "trainer.callbacks.EMA.warmup": False,
    "trainer.callbacks.FIDEvaluation.num_samples": 50_000,
    "trainer.callbacks.FIDEvaluation.extractor": "inception-v3-compat",
    "trainer.callbacks.FIDEvaluation.reference": "train",
    "trainer.callbacks.FIDEvaluation.repeats_at_end": 2,
    "model.parameterization": "lit_diffusion.parameterizations.Epsilon",
    "model.times": "lit_diffusion.timesteps.Uniform",
    "model.uniforms": "lit_diffusion.timesteps.Independent",
    "model.loss": "lit_diffusion.losses.HybridLoss",
    "model.loss.weighting": "lit_diffusion.losses.Simple",
    "model.loss.vb_weight": 0.001,
    "model.solver": "lit_diffusion.solvers.DDPM",
    "model.solver.variance": "lit_diffusion.gaussian.LearnedRange",
    "model.solver.steps": 250,
    "model.process": "lit_diffusion.processes.DiscreteVP",
    "model.network.num_heads": 4,
    "model.network.scale_shift_norm": True,
}
_CIFAR10 = {
    "trainer.max_steps": 500_000,
    "trainer.devices": 1,
    "trainer.precision": "32-true",
    "trainer.callbacks.FIDEvaluation.every_n_steps": 50_000,
    "data": "lit_diffusion.data.cifar10.CIFAR10",
    "data.batch_size": 128,
    "data.flip": False,
    "model.process.betas": "lit_diffusion.processes.CosineBetas",
    "model.process.betas.num_steps": 4000,
    "model.process.rescale_labels": True,
    "model.num_classes": None,
    "model.network.dropout": 0.3,
    "model.network.model_channels": 128,
    "model.network.channel_mult": [1, 2, 2, 2],
    "model.network.num_res_blocks": 3,
    "model.network.attention_downsample": [2, 4],
}
_IMAGENET128 = {
    "trainer.max_steps": 4_000_000,
    "trainer.strategy": "ddp",
    "trainer.devices": 8,
    "trainer.precision": "16-mixed",
    "trainer.callbacks.FIDEvaluation.every_n_steps": 250_000,
    "data": "lit_diffusion.data.image_folder.ImageNet",
    "data.batch_size": 256 // 8,
    "data.image_size": 128,
    "data.flip": True,
    **_linear(1000),
    "model.process.rescale_labels": None,
    "model.num_classes": 1000,
    "model.network.num_classes": 1000,
    "model.network.dropout": None,
    "model.network.channel_mult": [1, 1, 2, 3, 4],
    "model.network.num_res_blocks": 2,
}
_UVIT = {
    "trainer.max_steps": 500_000,
    "trainer.callbacks.EMA.decays": [0.9999],
    "trainer.callbacks.FIDEvaluation.num_samples": 50_000,
    "trainer.callbacks.FIDEvaluation.extractor": "inception-v3-compat",
    "model.process": "lit_diffusion.processes.ContinuousVP",
    "model.process.beta_min": None,  # 0.1 by default, and beta_d 19.9
    "model.parameterization": "lit_diffusion.parameterizations.Epsilon",
    "model.loss.weighting": "lit_diffusion.losses.Simple",
    "model.times": "lit_diffusion.timesteps.Uniform",
    "model.optimizer": "torch.optim.AdamW",
    "model.optimizer.lr": 2e-4,
    "model.optimizer.weight_decay": 0.03,
    "model.lr_scheduler": "lit_diffusion.lr_schedules.WarmupConstant",
    "trainer.gradient_clip_val": None,
}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "cifar10-uvit": {
        **_UVIT,
        "data": "lit_diffusion.data.cifar10.CIFAR10",
        "data.batch_size": 128,
        "data.flip": True,
        "model.num_classes": None,
        "model.solver": "lit_diffusion.solvers.DDPM",
        "model.solver.steps": 1000,
        "model.optimizer.betas": [0.99, 0.999],
        "model.lr_scheduler.warmup_steps": 2500,
    },
    "imagenet512-latents": {
        **_UVIT,
        "data": "lit_diffusion.data.latents.Latents",
        "trainer.devices": 8,
        "data.batch_size": 1024 // 8,
        "model.num_classes": 1000,
        "model.label_dropout": 0.15,
        "model.guidance.scale": 1.7,
        "model.solver.steps": 50,
        "model.optimizer.betas": [0.99, 0.99],
        "model.lr_scheduler.warmup_steps": 5000,
    },
    "cifar10-improved": _BOTH | _CIFAR10,
    "imagenet128-guided": {
        **_BOTH,
        **_IMAGENET128,
        "model.network.model_channels": 256,
        "model.network.attention_downsample": [4, 8, 16],
        "model.network.resblock_updown": True,
    },
    "imagenet128-guided-small": {
        **_BOTH,
        **_IMAGENET128,
        "model.network.model_channels": 128,
        "model.network.attention_downsample": [8, 16],
        "model.network.resblock_updown": False,
    },
}
"""What the reproductions say, among other things; None is a setting that they leave out."""

_EDM = {
    "model.process": "lit_diffusion.processes.EDMProcess",
    "model.parameterization": "lit_diffusion.parameterizations.EDMPreconditioning",
    "model.times": "lit_diffusion.timesteps.LogNormal",
}
_FAST = {
    "trainer.max_steps": 400,
    "trainer.val_check_interval": 50,
    **_added("TimestepCurriculum", num_steps=60, mean=0.35, std=0.2, num_bins=1000),
    "model.parameterization": "lit_diffusion.parameterizations.Velocity",
    **_weighting("MinSNR", gamma=5.0),
    "model.uniforms": "lit_diffusion.timesteps.Stratified",
    "model.optimizer.lr": 2e-3,
    "model.optimizer.betas": [0.8, 0.99],
    "model.lr_scheduler": "lit_diffusion.lr_schedules.WarmupLinear",
    "model.lr_scheduler.warmup_steps": 50,
}
_BETAS = {"model.optimizer.betas": [0.8, 0.999]}
ARMS: dict[str, dict[str, Any]] = {
    "md": _BETAS | _added("MomentumDecay", min_beta1=0.4, compensate_lr=False),
    "mdlrc": _BETAS | _added("MomentumDecay", min_beta1=0.4),
    "lr-decay": _BETAS | _added("LRCompensation", beta0=0.8, min_beta1=0.4),
    "min-snr": _weighting("MinSNR", gamma=5.0),
    "p2": _weighting("P2", gamma=1.0, k=1.0),
    "antithetic": {"model.uniforms": "lit_diffusion.timesteps.Antithetic"},
    "digits/clts": _clts(150, 1000),
    "digits/fdm": _fdm(15) | _linear(1000),
    "digits/linear": _linear(1000),
    "digits/edm": _EDM,
    "digits/edm-fdm": _EDM | _edm_fdm(15),
    "digits/fast": _FAST,
    "digits/sgd": _optimizer("SGD", lr=0.09, momentum=0.9),
    "digits/sgd-x3": _optimizer("SGD", lr=0.27, momentum=0.9),
    "digits/sgd-x10": _optimizer("SGD", lr=0.9, momentum=0.9),
    "digits/rmsprop": _optimizer("RMSprop", lr=1e-3),
    "digits/loss-density": _added("LossDensity", num_bins=20, history=64, uniform_prob=0.1),
    "digits/loss-resampler": _added("LossSecondMomentResampler", num_bins=100),
    "digits/shifting-gaussian": _shifting(1500, 1000),
    "cifar10/clts": _clts(50_000, 4000),
    "cifar10/fdm": _fdm(400) | _linear(4000),
    "cifar10/linear": _linear(4000),
    "cifar10/loss-resampler": _added("LossSecondMomentResampler", num_bins=4000),
    "cifar10/shifting-gaussian": _shifting(500_000, 4000),
    "imagenet128/clts": _clts(300_000, 1000),
    "imagenet128/fdm": _fdm(400),
    "imagenet128/loss-resampler": _added("LossSecondMomentResampler", num_bins=1000),
    "imagenet128/shifting-gaussian": _shifting(4_000_000, 1000),
}
"""All that these arms say."""
