"""A config of the real parts, small enough to train in seconds: digits, U-Net, EMA."""

from typing import Any


def small_digits(steps: int, **trainer: Any) -> dict[str, Any]:
    """A complete config; `trainer` adds to its Trainer."""
    ema = {"class_path": "lit_diffusion.callbacks.ema.EMA", "init_args": {"decays": [0.9]}}
    return {
        "trainer": {
            "accelerator": "cpu",
            "max_steps": steps,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
            "callbacks": [ema],
            **trainer,
        },
        "model": {
            "class_path": "lit_diffusion.modules.diffusion.DiffusionModule",
            "init_args": {
                "network": {
                    "class_path": "lit_diffusion.networks.unet.UNet",
                    "init_args": {
                        "in_channels": 1,
                        "out_channels": 1,
                        "model_channels": 8,
                        "channel_mult": [1, 2],
                        "num_res_blocks": 1,
                        "attention_downsample": [2],
                        "num_classes": 10,
                        "norm_groups": 4,
                    },
                },
                "process": {
                    "class_path": "lit_diffusion.processes.DiscreteVP",
                    "init_args": {"betas": {"class_path": "lit_diffusion.processes.LinearBetas"}},
                },
                "parameterization": {"class_path": "lit_diffusion.parameterizations.Velocity"},
                "loss": {
                    "class_path": "lit_diffusion.losses.DenoisingLoss",
                    "init_args": {"weighting": {"class_path": "lit_diffusion.losses.Simple"}},
                },
                "times": {"class_path": "lit_diffusion.timesteps.Uniform"},
                "solver": {
                    "class_path": "lit_diffusion.solvers.DDIM",
                    "init_args": {"steps": 4},
                },
                "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.002}},
                "lr_scheduler": {
                    "class_path": "lit_diffusion.lr_schedules.WarmupLinear",
                    "init_args": {"total_steps": 100, "warmup_steps": 4},
                },
                "image_shape": [1, 8, 8],
                "num_classes": 10,
                "label_dropout": 0.1,
            },
        },
        "data": {
            "class_path": "lit_diffusion.data.digits.Digits",
            "init_args": {"batch_size": 64},
        },
    }
