"""Trains somebody else's module with callbacks that were copied into packages of their own.

Arguments: the folder of the packages project_<file>, and the Lightning package to train with. The
other one and lit_diffusion cannot be imported. Each callback trains once undisturbed; a second run
is killed in the middle of a step and resumed.
"""

import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path

folder, package = Path(sys.argv[1]), sys.argv[2]
absent = {"lit_diffusion", "lightning", "pytorch_lightning"} - {package}


class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
sys.path[:] = [str(folder), *(entry for entry in sys.path if Path(entry).name != "tests")]

import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

pl = import_module("lightning.pytorch" if package == "lightning" else package)

STEPS, EPOCH, KILLED_AT = 12, 4, 9


def copied(file, name, **arguments):
    return lambda: getattr(import_module(f"project_{file}.{file}"), name)(**arguments)


CALLBACKS = {
    "ema": copied("ema", "EMA", decays=(0.9, 0.5), buffers=True),
    "momentum_decay": copied("momentum_decay", "MomentumDecay"),
    "curriculum": copied("curriculum", "ImportanceWeightedCurriculum", num_steps=STEPS),
    "loss_resampler": copied("loss_resampler", "LossSecondMomentResampler", num_bins=4, history=2),
    "step_seed": copied("step_seed", "StepSeed", seed=3),
    "finite_updates": copied("finite_updates", "FiniteUpdates", max_nonfinite_steps=2),
}


class Module(pl.LightningModule):
    """Denoises vectors at noise levels that it draws."""

    def __init__(self, file, folder, dies):
        super().__init__()
        torch.manual_seed(0)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)
        )
        self.timestep_density = self.timestep_weight = None
        self.file, self.folder, self.dies = file, folder, dies
        self.evidence = set()  # of the callback's work

    def training_step(self, batch, batch_idx):
        if self.file != "step_seed":
            torch.manual_seed(self.global_step)
        x = batch[0]
        u = torch.rand(len(x))
        if self.timestep_density is not None:
            bins = torch.multinomial(self.timestep_density, len(x), replacement=True)
            u = (bins + u) / len(self.timestep_density)
            self.evidence.add(tuple(self.timestep_density.tolist()))
        x_u = x + u[:, None] * torch.randn_like(x)
        losses = (self.network(torch.cat([x_u, u[:, None]], 1)) - x).square().mean(1)
        weights = torch.ones(len(x))
        if self.timestep_weight is not None:
            weights = self.timestep_weight[(u * len(self.timestep_weight)).long()]
        if self.file == "finite_updates" and self.global_step in (2, 10):
            losses = losses * torch.nan
        return {"loss": (weights * losses).mean(), "u": u, "per_sample_loss": losses.detach()}

    def validation_step(self, batch, batch_idx):
        self.evidence.add(self.network[0].weight.sum().item())

    def on_train_batch_end(self, *_):
        if self.dies and self.global_step == KILLED_AT:
            os._exit(9)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01, betas=(0.8, 0.99))
        used = lambda *_: self.evidence.add(optimizer.param_groups[0]["betas"][0])  # noqa: E731
        optimizer.register_step_post_hook(used)
        return optimizer


def fit(file, name, ckpt_path=None, dies=False):
    run, callback = folder / file / name, CALLBACKS[file]()
    module = Module(file, run, dies)
    saver = pl.callbacks.ModelCheckpoint(run, "{step}", save_top_k=-1)
    trainer = pl.Trainer(
        default_root_dir=run,
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[callback, saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    batches = DataLoader(TensorDataset(data), batch_size=32 // EPOCH)
    trainer.fit(module, batches, batches, ckpt_path=ckpt_path)
    return module


def end(file, name):
    """What the last checkpoint holds, but for paths."""
    saved = torch.load(folder / file / name / f"step={STEPS}.ckpt", weights_only=True)
    states = {k: v for k, v in saved["callbacks"].items() if "ModelCheckpoint" not in k}
    return {key: saved[key] for key in ("state_dict", "optimizer_states")} | {"callbacks": states}


def check(file):
    whole = fit(file, "whole")
    if (child := os.fork()) == 0:
        fit(file, "killed", dies=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (folder / file / "killed" / f"step={STEPS}.ckpt").exists()
    fit(file, "killed", folder / file / "killed" / f"step={2 * EPOCH}.ckpt")
    torch.testing.assert_close(end(file, "killed"), end(file, "whole"), rtol=0, atol=0)
    return whole


def main():
    modules = {file: check(file) for file in CALLBACKS}
    states = {file: end(file, "whole") for file in CALLBACKS}
    averages = states["ema"]["callbacks"]["EMA{'prefix': ''}"]["shadows"][0]
    raw = states["ema"]["state_dict"]
    assert averages["network.1.running_mean"].ne(raw["network.1.running_mean"]).all()
    assert averages["network.0.weight"].sum().item() in modules["ema"].evidence  # at validation
    assert {0.8, 0.4} <= modules["momentum_decay"].evidence
    assert states["momentum_decay"]["optimizer_states"][0]["param_groups"][0]["betas"][0] == 0.8
    assert len({d for d in modules["curriculum"].evidence if type(d) is tuple}) == STEPS
    assert len({d for d in modules["loss_resampler"].evidence if type(d) is tuple}) > 2
    assert states["finite_updates"]["callbacks"]["FiniteUpdates"] == {"skipped_updates": 2}
    assert (folder / "finite_updates" / "whole" / "non-finite-rank0.ckpt").exists()
    losses = {name: states[name]["state_dict"]["network.0.weight"].sum() for name in states}
    assert losses["step_seed"] != losses["finite_updates"]
    assert not absent & {name.partition(".")[0] for name in sys.modules}
    print("done")


main()
