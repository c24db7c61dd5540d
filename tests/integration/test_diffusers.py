"""The training methods in somebody else's LightningModule, with diffusers' network and schedule."""

import pytest
import torch
from support.golden import Z
from support.plain_module import assert_same_bits, make_trainer, trainable
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.callbacks import EMA, MomentumDecay, StepSeed, TimestepCurriculum
from lit_diffusion.callbacks.momentum_decay import momentum_decay

diffusers = pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")

from support.recorded import Recorded  # noqa: E402

STEPS = 6


class Foreign(Recorded):
    """DDPM training of UNet2DModel as in diffusers' own examples, with times from a density."""

    timestep_density = timestep_weight = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = diffusers.UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            block_out_channels=(8,),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownBlock2D",),
            up_block_types=("UpBlock2D",),
        )
        self.shared = torch.nn.Identity()
        self.forward_process = diffusers.DDPMScheduler(num_train_timesteps=100)
        self.densities = []

    def loss(self, batch):
        x0 = batch[0]
        self.densities.append(self.timestep_density)
        t = torch.multinomial(self.timestep_density, len(x0), replacement=True)
        noise = torch.randn_like(x0)
        x_t = self.forward_process.add_noise(x0, noise, t)
        return (self.inner(x_t, t).sample - noise).pow(2).mean()


def run(folder, epochs=STEPS, ckpt_path=None, **options):
    module, ema = Foreign(), EMA((0.9,))
    trainer = make_trainer(
        folder,
        StepSeed(0),
        ema,
        MomentumDecay(total_steps=STEPS),
        TimestepCurriculum(num_steps=4, num_bins=100),
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        **options,
    )
    data = DataLoader(TensorDataset(Z((8, 1, 8, 8), 1).float()), batch_size=4)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, ema, trainer


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_methods_work_and_resume_exactly_in_a_module_with_a_diffusers_network(tmp_path, precision):
    whole, ema, trainer = run(tmp_path, precision=precision)
    for step, ((lr, beta1),) in whole.used:
        decayed = momentum_decay(step, STEPS, beta0=0.8)
        assert (lr, beta1) == (1e-2 * decayed.lr_factor, decayed.beta1)
    assert len(whole.used) == STEPS
    assert len({density[0].item() for density in whole.densities}) == 5  # at steps 0 to 4
    assert {"mdlrc/beta1", "mdlrc/lr", "clts/gamma", "clts/tv", "ema/decay"} <= {
        *trainer.callback_metrics
    }
    _, _, first = run(tmp_path, 3, precision=precision)
    first.save_checkpoint(tmp_path / "c.ckpt")
    second, ema_again, _ = run(tmp_path, ckpt_path=tmp_path / "c.ckpt", precision=precision)
    assert_same_bits(trainable(second), trainable(whole))
    assert_same_bits(ema_again.state_dict(), ema.state_dict())
    assert second.used == whole.used[3:]
