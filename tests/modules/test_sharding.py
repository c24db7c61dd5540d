"""Weights split over ranks by a config, beside DDP, which holds them whole."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from support.plain_module import assert_same_bits, make_trainer
from support.small_digits import small_digits
from support.spawn import rank_and_size, run_ranks, spawn
from support.tiny_diffusion import images, tiny_diffusion
from support.tiny_run import spec, write_config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Subset

from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.cli.loggers import read_rows
from lit_diffusion.cli.main import main
from lit_diffusion.files import remove
from lit_diffusion.modules.sharding import measure_step, network_blocks, shard_network
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.jit import JiT
from lit_diffusion.networks.uvit import UViT
from lit_diffusion.seeding import seed_step

SIZES = {"image_size": 8, "in_channels": 1, "out_channels": 1, "patch_size": 2}
SIZES |= {"width": 32, "depth": 2, "num_heads": 2, "num_classes": 10}


def config(steps, split, ranks=2, **model):
    """`split` is None for DDP, else what a checkpoint is: "file" or "folder"."""
    strategy = spec(
        "lightning.pytorch.strategies.ModelParallelStrategy",
        data_parallel_size=ranks,
        tensor_parallel_size=1,
        save_distributed_checkpoint=split == "folder",
    )
    trainer = {"devices": ranks, "strategy": strategy if split else "ddp", "val_check_interval": 2}
    settings = small_digits(steps, **trainer, limit_val_batches=1, enable_progress_bar=False)
    network = spec("lit_diffusion.networks.dit.DiT", **SIZES, gradient_checkpointing=True)
    settings["model"]["init_args"] |= {"network": network, **model}
    return settings


def fit(folder, steps, split, *options, **model):
    rank, ranks = rank_and_size()
    path = Path(f"{folder}-{rank}.yaml")
    write_config(config(steps, split, ranks, **model), path)
    assert (
        main(["fit", "--config", str(path), f"--trainer.default_root_dir={folder}", *options]) == 0
    )


def checkpoint(folder):
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")


@pytest.mark.slow
def test_a_fit_with_split_weights_has_the_losses_and_the_files_of_ddp(tmp_path):
    """Also where it goes on from a checkpoint of the other; two ranks sum without rounding."""
    whole, split, resumed = tmp_path / "whole", tmp_path / "split", tmp_path / "resumed"
    # The first rank has 9 images in two batches; the second has 8, and takes part in the other.
    measures = [
        spec("FIDEvaluation", num_samples=17, extractor="digits-cnn", batch_size=8),
        spec("SampleGrid", num=3),
        spec("NoiseLevelLoss", num_levels=2, num_images=4),
        spec("ConsistencyProbe", num=3),
    ]
    samples = [f"--trainer.callbacks+={json.dumps(each)}" for each in measures]
    spawn(fit, 2, whole, 4, None, *samples)
    spawn(fit, 2, split, 4, "folder", *samples)
    spawn(fit, 2, resumed, 2, None, *samples)
    spawn(fit, 2, resumed, 4, "file", *samples, "--ckpt_path=last")
    for folder in (split, resumed):
        assert read_rows(folder / "metrics.csv") == read_rows(whole / "metrics.csv")
        for key in ("state_dict", "callbacks", "optimizer_states", "lr_schedulers", "loops"):
            assert_same_bits(checkpoint(folder)[key], checkpoint(whole)[key])
        for picture in (whole / "samples").iterdir():
            assert (folder / "samples" / picture.name).read_bytes() == picture.read_bytes()
        assert main(["sample", "--checkpoint", str(folder), "--num=1", f"--out={folder}/out"]) == 0
    names = {name for row in read_rows(whole / "metrics.csv") for name in row}
    assert {"val/fid_17", "val/consistency"} <= names


AVERAGES = {
    "EMA": spec("lit_diffusion.callbacks.EMA", decays=[0.5, 0.9]),
    "PowerEMA": spec("lit_diffusion.callbacks.PowerEMA", snapshot_every_n_steps=1),
}


@pytest.mark.parametrize(
    ("before", "after", "average", "accelerator"),
    [
        pytest.param(2, 1, "EMA", "cpu", marks=pytest.mark.slow),
        pytest.param(1, 2, "PowerEMA", "cpu", marks=pytest.mark.slow),
        pytest.param(1, 1, "EMA", "gpu", marks=pytest.mark.gpu),
    ],
)
def test_ranks_resume_from_a_folder_of_other_ranks_as_from_a_file(
    tmp_path, before, after, average, accelerator
):
    options = (f"--trainer.callbacks=[{json.dumps(AVERAGES[average])}]", "--trainer.max_steps=3")
    options += (f"--trainer.accelerator={accelerator}", "--trainer.deterministic=true")
    folder, file = tmp_path / "folder", tmp_path / "file"
    spawn(fit, before, folder, 3, "folder", *options, "--trainer.max_steps=2")
    assert (folder / "checkpoints" / "last.ckpt" / f"__{before - 1}_0.distcp").is_file()
    shutil.copytree(folder, file)
    remove(file / "checkpoints" / "last.ckpt")
    write_checkpoint(checkpoint(folder), file / "checkpoints" / "last.ckpt")
    runs = {folder: "folder", file: "file"}
    if after == 1 and accelerator == "cpu":
        shutil.copytree(folder, tmp_path / "whole")
        runs[tmp_path / "whole"] = None
    for run, split in runs.items():
        changed = ("--ckpt_path=last", "--model.optimizer.lr=0.004")
        spawn(fit, after, run, 3, split, *options, *changed)
        for key in ("state_dict", "callbacks", "optimizer_states", "loops"):
            assert_same_bits(checkpoint(run)[key], checkpoint(folder)[key])
        assert read_rows(run / "metrics.csv") == read_rows(folder / "metrics.csv")
        assert os.listdir(run / "checkpoints") == ["last.ckpt"]
        (state,) = checkpoint(run)["optimizer_states"]
        assert state["param_groups"][0]["lr"] == pytest.approx(0.004)  # warmed up
    assert (folder / "checkpoints" / "last.ckpt").is_dir()
    assert (file / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.slow
def test_compiled_blocks_of_split_weights_train_save_and_resume(tmp_path):
    """In bfloat16, where weights are gathered in half of the bytes."""
    options = ("--model.compile=default", "--trainer.precision=bf16-mixed")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    spawn(fit, 2, whole, 3, "file", *options, timeout=400)
    spawn(fit, 2, resumed, 1, "folder", *options, timeout=400)
    spawn(fit, 2, resumed, 3, "folder", "--ckpt_path=last", *options, timeout=400)
    assert_same_bits(checkpoint(whole)["state_dict"], checkpoint(resumed)["state_dict"])
    assert {value.dtype for value in checkpoint(whole)["state_dict"].values()} == {torch.float32}
    eager = tmp_path / "eager"
    spawn(fit, 2, eager, 3, "file", options[1])
    for name, value in checkpoint(eager)["state_dict"].items():
        torch.testing.assert_close(checkpoint(whole)["state_dict"][name], value, rtol=0, atol=2e-3)


def refuse(folder, tensor_parallel_size, loss):
    weighting = spec("lit_diffusion.losses.Simple")
    settings = config(1, "file", loss=spec(f"lit_diffusion.losses.{loss}", weighting=weighting))
    settings["trainer"]["strategy"]["init_args"] |= {
        "data_parallel_size": 2 // tensor_parallel_size,
        "tensor_parallel_size": tensor_parallel_size,
    }
    path = Path(f"{folder}-{rank_and_size()[0]}.yaml")
    write_config(settings, path)
    assert main(["fit", "--config", str(path), f"--trainer.default_root_dir={folder}"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor_parallel_size", "loss", "message"),
    [
        (1, "UncertaintyLoss", "loss.log_variance is not part of the network"),
        (2, "DenoisingLoss", "data_parallel_size=2, the number of ranks; got 2 and 1"),
    ],
)
def test_what_ranks_would_not_share_is_refused(tmp_path, tensor_parallel_size, loss, message):
    ranks = run_ranks(refuse, 2, tmp_path / "run", tensor_parallel_size, loss)
    assert [message in rank.output for rank in ranks] == [True, True], ranks[0].output
    tiny_diffusion().configure_model()  # without a Trainer, as in `load_from_checkpoint`


def test_fsdp_of_torch_1_is_refused_for_model_parallel_strategy(tmp_path):
    module = tiny_diffusion()
    module.trainer = make_trainer(tmp_path)
    module.trainer._accelerator_connector.strategy = FSDPStrategy()
    with pytest.raises(ValueError, match=r"does not support FSDPStrategy.*ModelParallelStrategy"):
        module.configure_model()


def losses_on_a_rank(folder):
    losses, record = [], Callback()

    def on_train_batch_end(trainer, module, outputs, *_):
        losses.append(outputs["per_sample_loss"].mean().item())

    record.on_train_batch_end = on_train_batch_end
    rank, ranks = rank_and_size()
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    options = {"devices": ranks, "strategy": strategy, "use_distributed_sampler": False}
    data = images(96, 6).dataset
    loader = DataLoader(Subset(data, range(rank, len(data), ranks)), batch_size=6)
    seed_everything(0)
    module = tiny_diffusion(network=DiT(**SIZES), num_classes=10)
    make_trainer(folder, record, **options).fit(module, loader)
    return losses


@pytest.mark.slow
def test_four_ranks_have_the_losses_of_one_process_with_the_same_batches(tmp_path):
    losses = spawn(losses_on_a_rank, 4, tmp_path)
    seed_everything(0)
    module, data = tiny_diffusion(network=DiT(**SIZES), num_classes=10), images(96, 6).dataset
    optimizer, module._log_training = module.configure_optimizers(), lambda *_: None
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(4):
            seed_step(0, rank, step, step)
            batch = data[24 * step + rank : 24 * (step + 1) : 4]
            loss = module.training_step(batch, step)["loss"]
            (loss / 4).backward()
            assert losses[rank][step] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.step()


def test_a_network_that_is_split_already_is_not_split_otherwise(one_rank):
    network, mesh = DiT(**SIZES), init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    for _ in range(2):
        shard_network(network, mesh, "32-true")
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    for settings in ((mesh, "bf16-mixed"), (other, "32-true")):
        with pytest.raises(ValueError, match="sharded the network over 1 ranks in 32-true"):
            shard_network(network, *settings)


@pytest.mark.parametrize("network", [DiT, JiT, UViT])
def test_most_weights_of_a_network_belong_to_the_blocks_that_it_names(network):
    built = network(**SIZES)
    assert sum(isinstance(block, nn.Module) for block in network_blocks(built)) >= 2
    in_blocks = sum(p.numel() for block in network_blocks(built) for p in block.parameters())
    assert in_blocks > 0.6 * sum(p.numel() for p in built.parameters())


def test_the_cost_of_a_step_is_that_of_the_network_without_running_it():
    with torch.device("meta"):
        network = DiT(8, 1, 1, patch_size=2, width=64, depth=4, num_heads=2)
        checkpointed = DiT(
            8, 1, 1, patch_size=2, width=64, depth=4, num_heads=2, gradient_checkpointing=True
        )
    cost, other = (measure_step(each, (1, 8, 8), 6) for each in (network, checkpointed))
    assert cost.parameters == sum(p.numel() for p in DiT(8, 1, 1, 2, 64, 4, 2).parameters())
    assert cost.parameters == 4 * cost.block + cost.rest
    # 18 w^2 weights in a block: 12 for each token, 6 for each image.
    tokens, w = 16, 64
    products = 6 * 4 * (tokens * 12 * w**2 + 6 * w**2 + 2 * tokens**2 * w)
    assert cost.flops == pytest.approx(3 * 2 * products, rel=0.1)
    assert other.activations < 0.25 * cost.activations
    assert other.flops == pytest.approx(4 / 3 * cost.flops, rel=0.1)
