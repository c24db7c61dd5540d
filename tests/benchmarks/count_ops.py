"""Operations, copies and synchronizations of one training step: count_ops.py [CONFIG ...]

The step is one of `lit-diffusion fit` with its default callbacks, between two logging steps, on the
CPU in eager mode. The network has the layers of the config at a small width, and the images are
8x8, since neither changes the counts. Each operation that torch dispatches and that computes is one
kernel or more on a GPU; views and allocations are not counted. Copies change dtype, layout or
place. A read of a tensor's value on the host is a synchronization if the tensor is on a GPU.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils._python_dispatch import TorchDispatchMode

from lit_diffusion.cli.fitting import RunCLI
from lit_diffusion.cli.run_folder import read_command_line

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = ["--model.network.model_channels=32", "--model.image_shape=[1,8,8]"]
OPTIONS = {
    "digits": SMALL,
    "cifar10-improved": [
        *SMALL,
        "--model.network.in_channels=1",
        "--model.network.out_channels=2",
        "--data=lit_diffusion.data.digits.Digits",
        "--data.batch_size=64",
    ],
}
STEP = 6  # counted from 0; after what only the first steps do
COPIES = {"_to_copy", "copy_", "clone", "_foreach_copy_"}
READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "unique_dim"}
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}
NO_KERNEL |= {"_unsafe_view", "_reshape_alias", "lift_fresh", "promote_types"}
NO_KERNEL |= {"_record_function_enter_new", "_record_function_exit"}


class CountOperations(TorchDispatchMode):
    """Counts operations by the part of the step that is running, `part`."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = ["Trainer"]
        self.counts: dict[str, Counter[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        counts = self.counts.setdefault(self.parts[-1], Counter())
        if not (func.is_view or name in NO_KERNEL):
            counts[name] += 1
        indices = args[1] if name in ("index", "index_put_") else ()
        if any(index is not None and index.dtype == torch.bool for index in indices):
            counts["nonzero"] += 1
        return func(*args, **(kwargs or {}))

    def attribute(self, owner: Any, name: str, part: str) -> None:
        """Count the operations inside the method `name` as those of `part`."""
        method: Callable[..., Any] = getattr(owner, name)

        @wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.parts.append(part)
            try:
                return method(*args, **kwargs)
            finally:
                self.parts.pop()

        setattr(owner, name, counted)


class CountStep(Callback):
    """Counts the operations from the start of a batch to the start of the next."""

    def __init__(self) -> None:
        self.mode = CountOperations()

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for name in dir(callback):
                is_hook = name.startswith(("on_", "_before_step", "_after_step"))
                if callback is not self and is_hook and getattr(callback, name) is not None:
                    self.mode.attribute(callback, name, type(callback).__name__)
        self.mode.attribute(pl_module, "training_step", "objective")
        self.mode.attribute(pl_module, "backward", "backward")
        self.mode.attribute(pl_module.network, "forward", "network")

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for optimizer in trainer.optimizers:
            optimizer.param_groups[0]["fused"] = True  # as `fit` has it on a GPU
            # The step contains the closure, and so the clipping.
            optimizer.register_step_pre_hook(lambda *_: self.mode.parts.append("optimizer"))
            optimizer.register_step_post_hook(lambda *_: self.mode.parts.pop() and None)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == STEP:
            self.mode.__enter__()
        if trainer.global_step == STEP + 1:
            self.mode.__exit__(None, None, None)


def count(config: str, options: list[str]) -> dict[str, Counter[str]]:
    """Operations by part and name."""
    counter = CountStep()

    class CLI(RunCLI):
        def instantiate_trainer(self, **kwargs: Any) -> Trainer:
            trainer = super().instantiate_trainer(**kwargs)
            trainer.callbacks.insert(0, counter)  # type: ignore[attr-defined]
            return trainer

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        argv = ["fit", "--config", str(CONFIGS / f"{config}.yaml"), *options]
        argv += ["--trainer.max_steps=8", "--trainer.log_every_n_steps=5"]
        argv += ["--trainer.accelerator=cpu", "--trainer.val_check_interval=null"]
        argv += ["--trainer.check_val_every_n_epoch=1000", "--trainer.enable_progress_bar=false"]
        argv += ["--trainer.callbacks.FIDEvaluation=null", "--trainer.callbacks.SampleGrid=null"]
        argv += [f"--trainer.default_root_dir={folder}"]
        CLI(read_command_line(argv), stack)
    return counter.mode.counts


def print_table(config: str, counts: dict[str, Counter[str]]) -> None:
    """A row for each part: operations, and among them copies and reads."""
    print(f"{config:<20} operations  copies  reads")
    total: Counter[str] = sum(counts.values(), Counter())
    for part, names in [*counts.items(), ("step", total)]:
        copies, reads = (sum(names[n] for n in kind) for kind in (COPIES, READS))
        operations = names.total() - names["_local_scalar_dense"]
        print(f"  {part:<18} {operations:10} {copies:7} {reads:6}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="*", default=[*OPTIONS], metavar="CONFIG")
    parser.add_argument("--precision", default="32-true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for config in arguments.configs:
        options = [*OPTIONS[config], f"--trainer.precision={arguments.precision}"]
        print_table(config, count(config, options))
