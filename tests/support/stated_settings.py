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
                name_of_class = callback["class_path"].rpartition(".")[2]
                yield from flat(callback, f"{name}.{key}.{name_of_class}")
        else:
            yield from flat(value, f"{name}.{key}".lstrip("."))


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
}
_CIFAR10 = {
    "trainer.max_steps": 500_000,
    "trainer.devices": 1,
    "trainer.precision": "32-true",
    "data": "lit_diffusion.data.cifar10.CIFAR10",
    "data.batch_size": 128,
    "data.flip": False,
    "model.process.betas": "lit_diffusion.processes.CosineBetas",
    "model.process.betas.num_steps": 4000,
    "model.process.rescale_labels": True,
    "model.num_classes": None,
    "model.network.dropout": 0.3,
}
_IMAGENET128 = {
    "trainer.max_steps": 4_000_000,
    "trainer.strategy": "ddp",
    "trainer.devices": 8,
    "trainer.precision": "16-mixed",
    "data": "lit_diffusion.data.image_folder.ImageNet",
    "data.batch_size": 256 // 8,
    "data.image_size": 128,
    "data.flip": True,
    "model.process.betas": "lit_diffusion.processes.LinearBetas",
    "model.process.betas.num_steps": 1000,
    "model.process.rescale_labels": None,
    "model.num_classes": 1000,
    "model.network.dropout": None,
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
    "imagenet128-guided": _BOTH | _IMAGENET128 | {"model.network.resblock_updown": True},
    "imagenet128-guided-small": _BOTH | _IMAGENET128,
}
"""What the reproductions say, among other things; None is a setting that they leave out.

The sizes of their networks are checked by the number of parameters.
"""
