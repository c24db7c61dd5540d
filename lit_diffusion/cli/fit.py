"""`lit-diffusion fit | validate | test | predict`: what Lightning's Trainer does."""

from collections.abc import Sequence

DESCRIPTIONS = {
    "fit": """Train a model, or resume a run.

    lit-diffusion fit --config configs/digits.yaml
    lit-diffusion fit --config configs/digits.yaml --config configs/arms/NAME.yaml
    lit-diffusion fit --config configs/digits.yaml --ckpt_path=last --trainer.max_steps=1000

A config names the model, data, trainer and callbacks; later configs and options win over earlier
ones, and all of them over a checkpoint. Everything goes to runs/<name of the first config>, or to
--trainer.default_root_dir. --print_config shows the result without running it; --trust PACKAGE lets
class paths name another package.""",
    "validate": """Loss and callbacks' metrics of a checkpoint on the validation split.

    lit-diffusion validate --ckpt_path runs/digits/checkpoints/last.ckpt

The config is that of the checkpoint's run folder, unless --config gives another.""",
    "test": """Loss and callbacks' metrics of a checkpoint on the test split, if the data have one.

    lit-diffusion test --ckpt_path runs/digits/checkpoints/last.ckpt

The config is that of the checkpoint's run folder, unless --config gives another.""",
    "predict": """Run a checkpoint on the prediction split of its data.

    lit-diffusion predict --ckpt_path runs/digits/checkpoints/last.ckpt \\
        --trainer.callbacks+=PACKAGE.A_BASE_PREDICTION_WRITER --trust PACKAGE

To write images, use `lit-diffusion sample`.""",
}


def run(argv: Sequence[str]) -> None:
    """Run a command of the Trainer: "fit", "validate", "test" or "predict", then options."""
    from lit_diffusion.cli.trainer_cli import run_command

    run_command(argv)
