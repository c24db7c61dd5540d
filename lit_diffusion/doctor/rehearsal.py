"""A fit up to the moment before it would begin, and what can be read off it."""

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lit_diffusion.commands.run import RunCLI
from lit_diffusion.commands.run_folder import Request
from lit_diffusion.data.base import Awaited, ImageDataModule
from lit_diffusion.doctor.lr import arguments_of, lr_of
from lit_diffusion.doctor.plan import (
    Average,
    Course,
    Evaluation,
    Grid,
    Plan,
)
from lit_diffusion.doctor.ranks import Ranks
from lit_diffusion.errors import innermost
from lit_diffusion.modules.diffusion import DiffusionModule

_CALLBACKS = "lit_diffusion.callbacks."


class Rehearsal(RunCLI):
    """Parses and builds all that a fit would, and stops there. Writes nothing.

    Args:
        request: of a fit.
        held: contexts that end with the rehearsal.

    Attributes:
        refusal: what the Trainer says against its settings; None where it takes them.
        callbacks: that the Trainer would have.
    """

    def __init__(self, request: Request, held: ExitStack) -> None:
        self.refusal: str | None = None
        self.callbacks: list[Callback] = []
        super().__init__(request, held)

    def before_instantiate_classes(self) -> None:
        """A folder that holds another run is a finding and no error here."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer; none where it refuses, so that the rest can still be looked at."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            self.refusal = innermost(error)
        except Exception as error:
            if type(error).__name__ != "MisconfigurationException":
                raise
            self.refusal = innermost(error)
        return None  # type: ignore[return-value]

    def _callbacks(self, config: Any) -> list[Callback]:
        self.callbacks = super()._callbacks(config)
        return self.callbacks

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing."""

    def limit(self, stage: str) -> int | float | None:
        """Batches of "train" or "val" that the Trainer is limited to."""
        overfit: int | float = self.settings["overfit_batches"]
        limit: int | float | None = self.settings[f"limit_{stage}_batches"]
        return overfit or limit

    @property
    def settings(self) -> dict[str, Any]:
        """Of the Trainer, as plain builtins."""
        settings: dict[str, Any] = self.config_dump["trainer"]
        return settings

    def arguments(self, part: str) -> dict[str, Any]:
        """Of the class of "model" or "data", as plain builtins."""
        return arguments_of(self.config_dump.get(part))

    def given_callbacks(self) -> list[tuple[str, dict[str, Any]]]:
        """Class names and arguments of our callbacks in the config."""
        given = self.settings["callbacks"] or []
        specs = given if isinstance(given, list) else [given]
        return [
            (spec["class_path"].rpartition(".")[2], arguments_of(spec))
            for spec in specs
            if spec["class_path"].startswith(_CALLBACKS)
        ]

    def ranks(self) -> Ranks:
        """Processes that the config asks for."""
        if self.trainer is not None:
            return Ranks(self.trainer.num_devices, self.trainer.num_nodes)
        return Ranks(_number_of_devices(self.settings["devices"]), self.settings["num_nodes"])


def _number_of_devices(devices: Any) -> int | None:
    if isinstance(devices, list):
        return len(devices)
    return int(devices) if str(devices).isdigit() else None


def optimizers_of(module: LightningModule) -> list[Optimizer]:
    """The optimizers of a fit, made anew."""
    if isinstance(module, DiffusionModule):
        return [module._make_optimizer([p for p in module.parameters() if p.requires_grad])]
    made = module.configure_optimizers()
    made = made.get("optimizer") if isinstance(made, dict) else made
    return [made] if isinstance(made, Optimizer) else list(made)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Data:
    """What the loaders of one process say.

    Attributes:
        num_images: of the training split; None where not known, as all else here.
        val_images: of the validation split; 0 without.
        batch_size: on each process.
        drop_last: whether what is left of an epoch makes no batch.
        workers: loading processes of each process that were asked for.
        fault: why the data cannot be read.
        awaited: what a fit would first fetch or unpack; the data cannot be read before.
        prepares: whether a fit would first call code of the data's own, which was not called here.
    """

    num_images: int | None = None
    val_images: int | None = None
    batch_size: int | None = None
    drop_last: bool = True
    workers: int | None = None
    fault: str | None = None
    awaited: Awaited | None = None
    prepares: bool = False

    @property
    def is_open(self) -> bool:
        """Whether they can be read now."""
        return self.fault is None and self.awaited is None


def data_of(cli: Rehearsal) -> Data:
    """Open the data of a fit without preparing them: nothing is downloaded."""
    source: LightningDataModule | LightningModule = cli.datamodule or cli.model
    stated = cli.arguments("data").get("batch_size")
    if isinstance(source, ImageDataModule) and (awaited := source.awaited()):
        return Data(batch_size=stated, workers=source.num_workers, awaited=awaited)
    try:
        if isinstance(source, LightningDataModule):
            source.setup("fit")
        train = source.train_dataloader()
        has_val = is_overridden("val_dataloader", source)
        val_images = _length(source.val_dataloader()) if has_val else 0
    except Exception as error:  # whatever a foreign data module may say
        foreign = not isinstance(source, ImageDataModule)
        prepares = foreign and is_overridden("prepare_data", source)
        fault = str(error) or type(error).__name__
        return Data(batch_size=stated, fault=fault, prepares=prepares)
    if not isinstance(train, DataLoader):
        return Data(batch_size=stated, val_images=val_images)
    return Data(
        num_images=_length(train),
        val_images=val_images,
        batch_size=train.batch_size,
        drop_last=train.drop_last,
        workers=getattr(source, "num_workers", train.num_workers),
    )


def _length(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def plan_of(cli: Rehearsal, data: Data, start_step: int = 0) -> Plan:
    """The run on paper."""
    settings, ranks = cli.settings, _world_size(cli)
    interval = settings["val_check_interval"]
    interval = 1.0 if interval is None else interval
    plan = Plan(
        max_steps=settings["max_steps"],
        max_epochs=settings["max_epochs"],
        has_timer=settings["max_time"] is not None,
        start_step=start_step,
        num_images=data.num_images,
        batch_size=data.batch_size,
        batches_per_epoch=_batches_per_epoch(data, ranks or 1, cli.limit("train")),
        ranks=ranks,
        accumulate=max(settings["accumulate_grad_batches"], 1),
        val_interval=interval if isinstance(interval, int | float) else None,
        val_epochs=settings["check_val_every_n_epoch"],
        val_images=_val_images(data, cli.limit("val"), ranks or 1),
        **_of_callbacks(cli, data),
    )
    spec = cli.arguments("model").get("lr_scheduler")
    return replace(plan, lr=lr_of(spec, cli.model, plan.steps))


def _world_size(cli: Rehearsal) -> int | None:
    if cli.trainer is not None:
        return int(cli.trainer.world_size)
    ranks = cli.ranks()
    return None if ranks.devices is None else ranks.devices * ranks.num_nodes


def _batches_per_epoch(data: Data, ranks: int, limit: int | float | None) -> int | None:
    if data.num_images is None or not data.batch_size:
        return None
    if data.drop_last:
        batches = data.num_images // ranks // data.batch_size
    else:
        batches = math.ceil(math.ceil(data.num_images / ranks) / data.batch_size)
    return limited(batches, limit)


def limited(batches: int, limit: int | float | None) -> int:
    """Batches under a limit of the Trainer: a number of them, or a share.

    Example:
        >>> limited(100, 10), limited(100, 10.0), limited(100, 1), limited(100, 1.0)
        (10, 10, 1, 100)
        >>> limited(100, 0.5), limited(100, None)
        (50, 100)
    """
    if limit is None:
        return batches
    if _is_count(limit):
        return min(int(limit), batches)
    return int(batches * limit)


def _is_count(limit: int | float | None) -> bool:
    """Whether it is a number of batches: the command line makes 3.0 of 3."""
    return limit is not None and (isinstance(limit, int) or limit > 1)


def _val_images(data: Data, limit: int | float | None, ranks: int) -> int | None:
    if limit == 0:
        return 0
    if data.val_images is None or limit is None or data.batch_size is None:
        return data.val_images
    if _is_count(limit):
        return min(data.val_images, int(limit) * data.batch_size * ranks)
    return int(data.val_images * limit)


def _of_callbacks(cli: Rehearsal, data: Data) -> dict[str, Any]:
    averages, evaluations, grids, courses = [], [], [], []
    for name, arguments in cli.given_callbacks():
        if name == "EMA":
            averages.append(Average(tuple(arguments["decays"]), arguments["warmup"]))
        elif name == "FIDEvaluation":
            evaluations.append(_evaluation(arguments, data))
        elif name == "SampleGrid":
            grids.append(Grid(arguments["num"], arguments["every_n_steps"]))
        elif "num_steps" in arguments or "total_steps" in arguments:
            length = arguments.get("num_steps", arguments.get("total_steps"))
            courses.append(Course(name, length))
    return {
        "averages": tuple(averages),
        "evaluations": tuple(evaluations),
        "grids": tuple(grids),
        "courses": tuple(courses),
    }


def _evaluation(arguments: dict[str, Any], data: Data) -> Evaluation:
    splits = {"train": data.num_images, "val": data.val_images}
    return Evaluation(
        num_samples=arguments["num_samples"],
        every_n_steps=arguments["every_n_steps"],
        repeats_at_end=arguments["repeats_at_end"],
        num_features=None,
        num_real=splits.get(arguments["reference"]),
    )
