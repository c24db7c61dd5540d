"""FID of 2,000 samples, as `FIDEvaluation` computes it, by the CIFAR-10 network and Inception.

Inception has random weights, as the real ones cannot be had everywhere: only times mean something.
"""

import hashlib
import json
import tempfile
from pathlib import Path

import ours
import torch
import torch_fidelity.feature_extractor_inceptionv3 as inception
from fit_overhead import NoiseImages
from lightning.pytorch import Trainer
from measure import device
from turns import Body, Channel

from lit_diffusion.callbacks import EMA, FIDEvaluation
from lit_diffusion.metrics.extractors import InceptionV3Compat


class RandomInception(inception.FeatureExtractorInceptionV3):
    """Torch-fidelity's Inception before it loads its weights."""

    def load_state_dict(self, *args: object, **kwargs: object) -> None:
        """Keep the initial weights."""


def random_inception(folder: Path) -> InceptionV3Compat:
    empty, path = folder / "empty.pt", folder / "inception.pt"
    torch.save({}, empty)
    torch.manual_seed(0)
    network = RandomInception("random", ["2048"], feature_extractor_weights_path=str(empty))
    torch.save(network.state_dict(), path)
    return InceptionV3Compat(str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def evaluations(tiny: bool) -> dict[str, Body]:
    num, batch, steps = (8, 4, 2) if tiny else (2000, 500, 20)

    def body(channel: Channel) -> None:
        channel.reply()
        channel.request()
        folder = Path(tempfile.mkdtemp())
        extractor = "patches-cnn" if tiny else random_inception(folder)
        module = ours.build("cifar10-improved", tiny, solver=ours.ddim(steps), channels_last=True)
        module.image_shape = (3, 32, 32)
        evaluation = FIDEvaluation(
            num, extractor, batch_size=batch, save_best=False, cache_dir=str(folder / "cache")
        )
        trainer = Trainer(
            max_steps=2,
            val_check_interval=1,
            limit_val_batches=1,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
            accelerator=device().type,
            devices=1,
            default_root_dir=folder,
            callbacks=[EMA((0.9999,)), evaluation],
        )
        trainer.fit(module, NoiseImages(batch_size=4 if tiny else 128))
        lines = (folder / "evaluations.jsonl").read_text().splitlines()
        first, *_, last = [json.loads(line)["seconds"] for line in lines]
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        row = {f"{part}_seconds": seconds for part, seconds in last.items()}
        row |= {"first_seconds": first["total"], "peak_gib": peak}  # first: real images as well
        channel.reply({f"FID of {num}, DDIM({steps}), bf16-mixed": row})

    return {"evaluations": body}
