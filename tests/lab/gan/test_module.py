import copy
from functools import partial

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from support.plain_module import make_trainer
from support.resuming import Recipe, assert_undisturbed, curves
from support.spawn import rank_and_size, spawn
from support.tiny_diffusion import images

from lit_diffusion.callbacks import EMA, sample_grid
from lit_diffusion.lab.gan.biggan import BigGANDiscriminator, BigGANGenerator
from lit_diffusion.lab.gan.dcgan import DCGANDiscriminator, DCGANGenerator
from lit_diffusion.lab.gan.module import GANModule, Hinge, NonSaturating
from lit_diffusion.protocols import NonFiniteSamples


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.999))


def dcgan(kind=GANModule, seed=0, **changes):
    torch.manual_seed(seed)
    arguments = {
        "generator": DCGANGenerator(8, 1, latent_dim=6, width=8, smallest=2),
        "discriminator": DCGANDiscriminator(8, 1, width=8, smallest=2),
        "loss": NonSaturating(),
        "generator_optimizer": adam,
        "discriminator_optimizer": adam,
        "image_shape": (1, 8, 8),
    }
    return kind(**{**arguments, **changes})


def biggan(num_classes=10, **changes):
    torch.manual_seed(0)
    sizes = {"width": 8, "attention_at": 4}
    return dcgan(
        generator=BigGANGenerator(
            num_classes, 1, (2, 2, 2), latent_dim=6, label_dim=5, smallest=2, **sizes
        ),
        discriminator=BigGANDiscriminator(num_classes, 1, (2, 2, 2), image_size=8, **sizes),
        loss=Hinge(),
        num_classes=num_classes,
        **changes,
    )


def test_the_losses_are_those_of_the_papers():
    real, fake = torch.tensor([2.0, -0.5]), torch.tensor([-3.0, 0.5])
    d_real, d_fake = real.sigmoid(), fake.sigmoid()
    losses = NonSaturating().discriminator_loss(real, fake)
    torch.testing.assert_close(losses, -d_real.log() - (1 - d_fake).log())
    torch.testing.assert_close(NonSaturating().generator_loss(fake), -d_fake.log())
    assert Hinge().discriminator_loss(real, fake).tolist() == [0.0, 3.0]
    assert Hinge().generator_loss(fake).tolist() == [3.0, -0.5]


def test_the_discriminator_makes_so_many_steps_for_one_of_the_generator(tmp_path):
    order = []

    def record(letter, parameters):
        optimizer = adam(parameters)
        optimizer.register_step_post_hook(lambda *_: order.append(letter))
        return optimizer

    module = dcgan(
        discriminator_steps=3,
        generator_optimizer=partial(record, "g"),
        discriminator_optimizer=partial(record, "d"),
    )
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = make_trainer(tmp_path, max_steps=8, max_epochs=-1)
    trainer.fit(module, images(16, 4))
    assert "".join(order) == "dddgdddg"
    assert trainer.global_step == 8
    assert not any(torch.equal(p, before[n]) for n, p in module.named_parameters())


@pytest.mark.parametrize("make", [dcgan, biggan])
def test_samples_are_a_function_of_their_seeds_and_labels(make):
    module = make()
    with torch.no_grad():
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer += 0.1 * torch.rand_like(buffer)
    whole = module.generate([3, 4, 5, 6])
    assert whole.dtype == torch.uint8
    assert whole.shape == (4, 1, 8, 8)
    assert torch.equal(module.generate([5, 3]), whole[[2, 0]])
    assert module.training
    labels = torch.tensor([5, 5])
    if module.num_classes:
        assert not torch.equal(module.generate([3, 4], labels), whole[:2])
        assert torch.equal(module.generate([5], torch.tensor([5])), whole[2:3])
    else:
        with pytest.raises(ValueError, match="labels must be -1"):
            module.generate([3, 4], labels)


def test_r1_is_half_the_squared_gradient_at_real_images():
    module = dcgan(r1=0.7).eval()
    x = torch.randn(3, 1, 8, 8)
    gradients = [torch.func.grad(lambda x: module.discriminator(x).sum())(one[None]) for one in x]
    expected = 0.7 / 2 * sum(g.square().sum() for g in gradients) / 3
    torch.testing.assert_close(module.r1_penalty(x, None), expected)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="discriminator_steps >= 1 and r1 >= 0"):
        dcgan(discriminator_steps=0)
    with pytest.raises(ValueError, match="num_classes is 3 in the module, but None in DCGAN"):
        dcgan(num_classes=3)
    with pytest.raises(ValueError, match="latent_dim must be divisible"):
        BigGANGenerator(3, 1, (2, 2), latent_dim=7)
    broken = copy.deepcopy(dcgan())
    with torch.no_grad():
        broken.generator.layers[0].weight.fill_(float("nan"))
    with pytest.raises(NonFiniteSamples, match="the generator"):
        broken.generate([1, 2])


class RecordsIndices(GANModule):
    def on_train_start(self):
        self.indices = []

    def training_step(self, batch, batch_idx):
        self.indices += batch[2].tolist()
        return super().training_step(batch, batch_idx)


def train_on_ranks(folder):
    """The global step, indices of the images and weights of a rank."""
    rank, ranks = rank_and_size()
    module = dcgan(RecordsIndices, seed=rank, r1=0.1)  # DDP gives all the weights of the first
    strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    options = {"strategy": strategy, "devices": ranks, "max_steps": 8, "max_epochs": -1}
    trainer = make_trainer(folder, EMA((0.9,), prefix="generator", buffers=True), **options)
    trainer.fit(module, images(32, 4))
    weights = {name: p.double().sum().item() for name, p in module.named_parameters()}
    return trainer.global_step, module.indices, weights


@pytest.mark.system
def test_ranks_see_other_images_and_have_the_same_weights(tmp_path):
    (step, first, weights), (other_step, second, other_weights) = spawn(train_on_ranks, 2, tmp_path)
    assert step == other_step == 8
    assert not set(first) & set(second)
    assert weights == other_weights


MEASURING = ("ConsistencyProbe", "FIDEvaluation", "SampleGrid", "MomentumDecay")
STEPS_AFTER = [1, 3, 4, 6, 7, 9, 10, 12]
"""Of both optimizers after each batch, where the generator steps in each second one."""


def two_paces(*callbacks, make=dcgan, **options):
    """A GAN whose optimizers step at different paces, with callbacks that log and write files."""
    options = {"val_check_interval": 3, "limit_val_batches": 1, **options}
    module = partial(make, discriminator_steps=2)
    return Recipe(callbacks, trainer=tuple(options.items()), module=module)


@pytest.mark.slow
def test_a_gan_that_died_has_the_weights_rows_scores_and_pictures_of_one_that_did_not(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert_undisturbed(tmp_path, two_paces(*MEASURING, "EMA", make=biggan), 5)
    whole, died = (sorted(tmp_path.glob(f"{name}/samples/*")) for name in ("whole", "died"))
    assert [file.name for file in whole] == [file.name for file in died]
    assert [file.read_bytes() for file in whole] == [file.read_bytes() for file in died]


def test_all_that_a_gan_logs_counts_batches_and_scores_count_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures = []
    monkeypatch.setattr(sample_grid, "log_picture", lambda *args: pictures.append(args[-1]))
    two_paces(*MEASURING).fit(tmp_path)
    rows, scores = curves(tmp_path)
    names = set().union(*rows)
    logged = {name: [int(row["step"]) for row in rows if name in row] for name in names}
    assert logged["train/discriminator_loss"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert logged["train/generator_loss"] == [1, 2, 3, 4, 5, 6, 7]
    assert logged["val/generator_loss"] == [2, 7]
    assert logged["val/consistency"] == [3, 5, 7]
    assert sorted({*pictures}) == [2, 4, 6, 8]
    assert logged["val/fid_66_raw"] == [2, 5, 7]
    assert [score["step"] for score in scores] == [STEPS_AFTER[i] for i in (2, 5, 7)]
