"""`lit-diffusion fit | validate | test | predict`: LightningCLI, with a run folder around it."""

import logging
import re
import signal
import sys
import time
import warnings
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import DefaultHelpFormatter
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_diffusion.checkpoint_checks import check_resumable, no_larger_than
from lit_diffusion.checkpoints import (
    AtomicCheckpointIO,
    Checkpoint,
    ema_states,
    model_spec,
    read_checkpoint,
    wrong_types,
)
from lit_diffusion.commands.keeping import RunConfig
from lit_diffusion.commands.resume import differences, tell
from lit_diffusion.commands.run_callbacks import has, keepers, rank_watch, savers, with_defaults
from lit_diffusion.commands.run_errors import builder, explained
from lit_diffusion.commands.run_folder import (
    Request,
    latest_config,
    make_writable,
    occupied,
    read_command_line,
    read_config,
    refuse_mixing,
)
from lit_diffusion.commands.summary import goes_on, stopped, summary
from lit_diffusion.commands.trainer_settings import unknown_checkpoint, wrong_settings
from lit_diffusion.errors import innermost
from lit_diffusion.loggers import AppendingCSVLogger, read_evaluations, read_rows
from lit_diffusion.protocols import WeightsProvider
from lit_diffusion.signals import SAVED, SavedOnSignal, heed
from lit_diffusion.slurm import job_id
from lit_diffusion.trust import trusting, within
from lit_diffusion.yaml_extent import guard_options

_HELP = {
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
    "test": """Loss and callbacks' metrics of a checkpoint on the test split.

    lit-diffusion test --ckpt_path runs/digits/checkpoints/last.ckpt

The config is that of the checkpoint's run folder, unless --config gives another.""",
    "predict": """Run a checkpoint on the prediction split of its data.

    lit-diffusion predict --ckpt_path runs/digits/checkpoints/last.ckpt

To write images, use `lit-diffusion sample`.""",
}

_STRICT = {"exit_on_error": False, "allow_abbrev": False}
"""For the parsers of all commands and of each. The run folder is found by whole names alone."""

_CLASS_HELP = re.compile(r"--(model|data|trainer\.\w+)\.help(=|$)")
"""An option that prints the arguments of a class and ends the command."""

_INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
"""With which Lightning's own `load_from_checkpoint` reads our files."""


def run(argv: Sequence[str]) -> None:
    """Run a command of the Trainer.

    Args:
        argv: fit, validate, test or predict, then options.

    Raises:
        ValueError: for a config that is wrong, a run folder that holds another run, or a checkpoint
            that does not fit.
    """
    request = read_command_line(argv)
    if request.requeued:
        rank_zero_only(print)(goes_on(request), file=sys.stderr)
    _quiet_lightning()
    guard_options()
    with trusting(request.trust), ExitStack() as held:
        RunCLI(request, held)


class RunCLI(LightningCLI):
    """LightningCLI whose runs live in a run folder and whose command line wins over checkpoints.

    Args:
        request: what the command line asks for.
        held: contexts that the run is in until it ends.
    """

    def __init__(self, request: Request, held: ExitStack) -> None:
        self.request = request
        self._held = held
        saved = self._read_checkpoint()
        self._spec = model_spec(saved)
        self._averaged = bool(ema_states(saved, request.checkpoint or ""))
        self._weights = saved.get("state_dict", {})
        self._restored_step = saved.get("global_step")
        self.changed: dict[str, tuple[Any, Any]] = {}
        self._started = time.monotonic()
        super().__init__(
            save_config_callback=RunConfig,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_kwargs={
                "prog": "lit-diffusion",
                "formatter_class": _Formatter,
                **_STRICT,
                **{name: _parser_settings(name) for name in _HELP},
            },
            args=self._arguments(),
        )

    def _read_checkpoint(self) -> Checkpoint:
        """The checkpoint that is asked for; {} without, or for a fit that has none yet."""
        file = self.request.checkpoint
        if file is None or (self.request.command == "fit" and not file.is_file()):
            return {}
        saved = read_checkpoint(file, mmap=True)
        if self.request.command == "fit":
            try:
                check_resumable(saved)
            except ValueError as error:
                raise ValueError(f"{file} {error}.") from None
        return saved

    def _arguments(self) -> list[str]:
        """The command line, after what it wins over: the checkpoint's model and run config."""
        request, configs = self.request, []
        if self._spec is not None:
            configs += ["--config", yaml.safe_dump({"model": self._spec})]  # JSON has no inf
        if not request.configs and request.holds_checkpoint:
            found = latest_config(request.root)
            if found:
                read_config(found)  # the real parser does not name what it cannot read
            configs += ["--config", str(found)] if found else []
        if any(_CLASS_HELP.match(option) for option in request.options):
            return [request.command, *configs, *request.options]  # nothing may follow it
        own = ["--trainer.default_root_dir", str(request.root)]
        if request.checkpoint is not None and request.checkpoint.is_file():
            own += ["--ckpt_path", str(request.checkpoint)]
        return [request.command, *configs, *request.options, *own]

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and say in a line what is wrong."""
        assert isinstance(args, list)
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            subparser = self._subcommand_parsers[self.request.command]
            options = [action.dest for action in subparser._actions]
            message = innermost(error, options)
            if message.startswith(f"{self.request.command}.model must"):
                given = ", ".join(self.request.configs)
                message = "needs --config FILE, such as --config configs/digits.yaml."
                message = f"{given} names no model." if given else message
            raise ValueError(message) from error

    def _parse_ckpt_path(self) -> None:
        """Compare with the checkpoint, whose model was parsed first: what was given later won."""
        if self._spec is None:
            return
        self.subcommand = self.config["subcommand"]
        self._dump_config()
        self.changed = differences(self._spec, self.config_dump["model"])
        tell(self.changed)
        del self.config_dump  # the seed is yet to be set in it

    def before_instantiate_classes(self) -> None:
        """Find out before anything is built whether this run may write where it would."""
        wrong = [
            *wrong_settings(vars(self._get(self.config, "trainer"))),
            *unknown_checkpoint(self._get(self.config, "ckpt_path")),
        ]
        if wrong:
            raise ValueError(wrong[0])
        if self.request.command == "fit" and not self.is_trial:
            rank_zero_only(refuse_mixing)(self.request)

    @property
    def is_trial(self) -> bool:
        """Whether this is a run of a few batches that keeps nothing."""
        return bool(self._get(self.config, "trainer").fast_dev_run)

    def instantiate_classes(self) -> None:
        """Also leave class paths and arguments where checkpoints take them from."""
        try:
            with no_larger_than(self._weights) if self._weights else nullcontext():
                super().instantiate_classes()
        except ValueError as error:  # jsonargparse wraps what a constructor says
            raise ValueError(builder(error) + innermost(error)) from error
        self._dump_config()
        for key, built in (("model", self.model), ("data", self.datamodule)):
            if built is not None:
                spec = self.config_dump[key]
                built.hparams.clear()
                built.hparams.update(_class_path=spec["class_path"], **spec.get("init_args", {}))
                built.hparams.update(spec.get("dict_kwargs", {}), _instantiator=_INSTANTIATOR)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer, with what a run needs and the config does not name."""
        config = self._get(self.config_init, "trainer")
        plugins = _with_atomic_saves(config.plugins, self.request.trust)
        trainer = super().instantiate_trainer(
            logger=self._loggers(config.logger),
            callbacks=self._callbacks(config),
            plugins=plugins,
            **kwargs,
        )
        _keep_from_requeues(trainer, plugins)
        return trainer

    def _loggers(self, given: Any) -> Any:
        if given is not None and given is not True:
            return given
        if self.request.command != "fit":
            return False
        root = self.request.root
        loggers: list[Logger] = [AppendingCSVLogger(root)]
        return [*loggers, TensorBoardLogger(root, name="", version="", sub_dir="tensorboard")]

    def _callbacks(self, config: Any) -> list[Callback]:
        fits, root = self.request.command == "fit", self.request.root
        shows = config.enable_progress_bar is not False
        callbacks = with_defaults(config.callbacks, fits=fits, shows_progress=shows)
        if fits and not self.is_trial:
            callbacks += keepers(root, self.changed)
            if config.enable_checkpointing is not False:
                return [*callbacks, *savers(callbacks, root / "checkpoints")]
        heed()
        return callbacks

    def _run_subcommand(self, subcommand: str) -> None:
        self._refuse_lost_averages(subcommand)
        self._refuse_cast_weights()
        try:
            super()._run_subcommand(subcommand)
        except (SystemExit, Exception) as error:
            if number := self._signal_behind(error):
                saved = isinstance(error, SavedOnSignal)
                if not (saved and job_id()):  # which goes on by itself
                    self._tell_stopped(number)
                raise SystemExit(SAVED if saved else 128 + number) from error
            untrained = self.trainer.global_step == self._restored_step
            if told := self._told_of_other_rank():
                raise RuntimeError(told) from error
            if (explanation := explained(error, self.request, untrained)) is not None:
                raise explanation from error
            raise

    def _told_of_other_rank(self) -> str | None:
        """What another rank did that ended this one."""
        watches = [c for c in self.trainer.callbacks if isinstance(c, rank_watch())]  # type: ignore[attr-defined]
        return next((watch.verdict for watch in watches if watch.verdict), None)

    def _signal_behind(self, error: BaseException) -> signal.Signals | None:
        """The signal that ended the Trainer, which exits with 0 after SIGTERM, 1 after Ctrl-C."""
        if isinstance(error, SavedOnSignal):
            return error.signal
        if isinstance(error.__context__, KeyboardInterrupt):
            return signal.SIGINT
        terminated = self.trainer._signal_connector.received_sigterm
        # Batch systems signal the workers too, whose death may be what the Trainer hears of first.
        worker = terminated and str(error).startswith("DataLoader worker")
        return signal.SIGTERM if worker or isinstance(error, SIGTERMException) else None

    def _tell_stopped(self, number: signal.Signals) -> None:
        """Say how a fit goes on that a signal stopped."""
        fits = self.request.command == "fit" and not self.is_trial
        if fits and self.trainer.is_global_zero:
            print(stopped(self.request, self.trainer.global_step, number), file=sys.stderr)

    def _refuse_lost_averages(self, subcommand: str) -> None:
        """Scores of raw weights must not pass for those of the averages in the file."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if subcommand != "fit" and self._averaged and not has(callbacks, WeightsProvider):
            raise ValueError(
                f"{self.request.checkpoint} holds averaged weights, but no EMA callback is "
                f"configured to use them: pass the run's config, or add EMA to trainer.callbacks."
            )

    def _refuse_cast_weights(self) -> None:
        """Weights that are no real numbers must not pass for such; torch would cast them."""
        weights, self._weights = self._weights, {}
        if cast := wrong_types(self.model, weights):
            raise ValueError(
                f"{self.request.checkpoint} is of another architecture: {'; '.join(cast[:3])}. "
                "Use the config that it was trained with."
            )

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """What the Trainer is called with: no config may have code in a checkpoint run."""
        return {**super()._prepare_subcommand_kwargs(subcommand), "weights_only": True}

    def before_fit(self) -> None:
        """Find out before anything is trained whether it can be kept, and by nobody else."""
        if not self.is_trial:
            rank_zero_only(make_writable)(self.request.root)
            rank_zero_only(self._held.enter_context)(occupied(self.request.root))
            rank_zero_only(_read_curves)(self.request.root)

    def after_fit(self) -> None:
        """Say where things are and how good they are."""
        if self.trainer.is_global_zero and not self.is_trial:
            seconds = time.monotonic() - self._started
            print(summary(self.request, self.trainer, seconds), file=sys.stderr)


def _read_curves(root: Path) -> None:
    """Find out before anything is written whether a resume can go on in these files."""
    read_rows(root / "metrics.csv")
    read_evaluations(root / "evaluations.jsonl")


def _parser_settings(command: str) -> dict[str, Any]:
    usage = f"lit-diffusion {command} --config FILE [options]"
    return {"description": _HELP[command], "usage": usage, **_STRICT}


class _Formatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """jsonargparse's help, under a description with its lines as they are."""


def _quiet_lightning() -> None:
    """Leave out its advertisements, and what it warns of in its own code."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(_is_no_advertisement)
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return "Tip: For seamless" not in record.getMessage()


def _keep_from_requeues(trainer: Trainer, given: Sequence[Any]) -> None:
    """In a SLURM job Lightning would save and requeue inside of a handler, whatever the command.

    A cluster environment that the config names is as it says.
    """
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment not in given:
        environment.auto_requeue = False


def _with_atomic_saves(plugins: Any, trust: Sequence[str]) -> list[Any]:
    """The plugins with one that reads checkpoints without running code in them."""
    given = list(plugins) if isinstance(plugins, list) else [plugins] * (plugins is not None)
    readers = [type(plugin) for plugin in given if isinstance(plugin, CheckpointIO)]
    for reader in readers:
        path = f"{reader.__module__}.{reader.__qualname__}"
        if not (issubclass(reader, AtomicCheckpointIO) or within(path, trust)):
            raise ValueError(
                f"trainer.plugins: {path} may run code that a checkpoint holds; leave it out, or "
                f"add --trust {reader.__module__}."
            )
    return given if readers else [*given, AtomicCheckpointIO()]
