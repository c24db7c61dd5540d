"""LightningCLI with a run folder around it: what fit, validate, test and predict are."""

import logging
import re
import signal
import sys
import time
import warnings
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import DefaultHelpFormatter
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_diffusion.callbacks.rank_watch import RankWatch
from lit_diffusion.callbacks.slurm import job_id
from lit_diffusion.checkpoints.averages import find_averages
from lit_diffusion.checkpoints.loading import dtype_mismatches, model_spec
from lit_diffusion.checkpoints.reading import check_resumable, limit_parameters, read_checkpoint
from lit_diffusion.checkpoints.saving import AtomicCheckpointIO
from lit_diffusion.cli.changed_settings import differences
from lit_diffusion.cli.defaults import contains, run_callbacks, with_defaults, with_last_checkpoint
from lit_diffusion.cli.explained import explain, name_builder
from lit_diffusion.cli.init_weights import start_from
from lit_diffusion.cli.lightning_internals import (
    SubcommandCLI,
    cluster_environment,
    completed_epochs,
)
from lit_diffusion.cli.loggers import AppendingCSVLogger, read_evaluations, read_rows
from lit_diffusion.cli.named_callbacks import Change, changed, split_off
from lit_diffusion.cli.run_folder import (
    Request,
    latest_config,
    occupied,
    read_command_line,
    read_config,
    refuse_mixing,
)
from lit_diffusion.cli.run_outputs import RunConfig
from lit_diffusion.cli.summary import requeue_line, resume_line, summary
from lit_diffusion.cli.trainer_settings import wrong_settings
from lit_diffusion.config.messages import explain_parse_error
from lit_diffusion.config.trust import allow_class_paths, is_within
from lit_diffusion.protocols import WeightsProvider
from lit_diffusion.signals import TERMINAL_SIGNALS, SavedOnSignal, print_error, redeliver_signal

_STRICT = {"exit_on_error": False, "allow_abbrev": False}
"""For the parsers of all commands and of each. The run folder is found by whole names alone."""

_CLASS_HELP = re.compile(r"--(model|data|trainer\.\w+)\.help(=|$)")
"""An option that prints the arguments of a class and ends the command."""

_INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
"""With which Lightning's own `load_from_checkpoint` reads our files."""


def run_command(argv: Sequence[str], descriptions: Mapping[str, str] | None = None) -> None:
    """Run fit, validate, test or predict, the first of `argv`.

    Raises:
        ValueError: for a config that is wrong, a run folder that holds another run, or a checkpoint
            that does not fit.
    """
    request = read_command_line(argv)
    if request.requeued:
        rank_zero_only(print)(requeue_line(request), file=sys.stderr)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip: For seamless" not in record.getMessage()
    )
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    with allow_class_paths(request.trust), ExitStack() as held:
        RunCLI(request, held, descriptions)


class RunCLI(SubcommandCLI):
    """LightningCLI whose runs live in a run folder and whose command line wins over checkpoints."""

    def __init__(
        self, request: Request, held: ExitStack, descriptions: Mapping[str, str] | None = None
    ) -> None:
        self.request = request
        self._held = held  # contexts that the run is in until it ends
        file = request.checkpoint
        saved = {} if file is None else read_checkpoint(file, mmap=True)
        if file is not None and request.command == "fit":
            check_resumable(saved, file)
        self._spec = model_spec(saved)
        self._data_spec = model_spec(saved, "datamodule_hyper_parameters")
        self._averaged = bool(find_averages(saved, file or ""))
        self._weights = saved.get("state_dict", {})
        self._restored_step = saved.get("global_step")
        self._restored_epochs = completed_epochs(saved)
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
                **{
                    name: {
                        "description": (descriptions or {}).get(name),
                        "usage": f"lit-diffusion {name} --config FILE [options]",
                        **_STRICT,
                    }
                    for name in self.subcommands()
                },
            },
            args=self._arguments(),
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Beside the model's, the data's and the Trainer's."""
        told = "what numbers of this config were tuned on, in words; `compare` says it"
        parser.add_argument("--tuned_on", type=str | None, help=told)
        told = "start a new run from what fits of another: CKPT, CKPT:raw, CKPT:ema, or an export"
        parser.add_argument("--init_weights", type=str | None, help=told)

    def _arguments(self) -> list[str]:
        """The command line, after what it wins over: the checkpoint's model and run config."""
        request, configs = self.request, []
        if self._spec is not None:
            configs += ["--config", yaml.safe_dump({"model": self._spec})]  # JSON has no inf
        found = latest_config(request.root) if request.holds_checkpoint else None
        if found and not request.configs:
            configs += ["--config", yaml.safe_dump(read_config(found))]
        if any(_CLASS_HELP.match(option) for option in request.options):
            return [request.command, *configs, *request.options]  # nothing may follow it
        own = ["--trainer.default_root_dir", str(request.root)]
        if request.checkpoint is not None:
            own += ["--ckpt_path", str(request.checkpoint)]
        return [request.command, *configs, *request.options, *own]

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and say in a line what is wrong."""
        assert isinstance(args, list)
        args, changes = split_off(map(_nested_null, args))
        try:
            if changes:
                args = self._with_changed_callbacks(parser, args, changes)
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            message = explain_parse_error(error, self.options(self.request.command))
            if message.startswith(f"{self.request.command}.model must"):
                given = ", ".join(self.request.configs)
                message = "needs --config FILE, such as --config configs/digits.yaml."
                message = f"{given} names no model." if given else message
            raise ValueError(message) from error

    def _with_changed_callbacks(
        self, parser: LightningArgumentParser, args: list[str], changes: Sequence[Change]
    ) -> list[str]:
        self.config = parser.parse_args([arg for arg in args if "--print_config" not in arg])
        callbacks = self.dumped()["trainer"]["callbacks"] or []
        given = callbacks if isinstance(callbacks, list) else [callbacks]
        return [*args, f"--trainer.callbacks={yaml.safe_dump(changed(given, changes))}"]

    def compare_with_checkpoint(self) -> None:
        """Compare with the checkpoint, whose model was parsed first: what was given later won."""
        _hand_down_classes(self.value_of(self.config, "model"))
        if self._spec is None:
            return
        used = self.dumped()
        self.changed = told = differences(self._spec, used["model"])
        if self._data_spec is not None and self.request.command == "fit":
            told = told | differences(self._data_spec, used["data"], "data")
        for name, (old, new) in told.items():
            rank_zero_info(f"The checkpoint had {name} {old}, using {new}.")

    def before_instantiate_classes(self) -> None:
        """Find out before anything is built whether this run may write where it would."""
        trainer, ckpt_path = (self.value_of(self.config, key) for key in ("trainer", "ckpt_path"))
        for wrong in wrong_settings(vars(trainer), ckpt_path):
            raise ValueError(wrong)
        if self.request.command == "fit" and not self.is_trial:
            rank_zero_only(refuse_mixing)(self.request)
            self._refuse_finished(trainer.max_steps, trainer.max_epochs)

    def _refuse_finished(self, max_steps: int, max_epochs: int | None) -> None:
        """Say so where a checkpoint has all that is asked for: a mistake, unless it is repeated."""
        steps, epochs = (self._restored_step, max_steps), (self._restored_epochs, max_epochs)
        for what, (done, most) in {"steps": steps, "epochs": epochs}.items():
            if done and most is not None and 0 <= most <= done:
                file, setting = self.request.checkpoint, f"trainer.max_{what}"
                said = f"{file} has {done} {what}, and {setting} is {most}"
                if self.request.requeued or self.request.repeated:
                    print_error(f"{said}: the run is finished.")
                    raise SystemExit(0)
                raise ValueError(f"{said}; raise that to train on.")

    @property
    def is_trial(self) -> bool:
        """Whether this is a run of a few batches that keeps nothing."""
        return bool(self.value_of(self.config, "trainer").fast_dev_run)

    def instantiate_classes(self) -> None:
        """Also leave class paths and arguments where checkpoints take them from."""
        try:
            with limit_parameters(self._weights) if self._weights else nullcontext():
                super().instantiate_classes()
        except ValueError as error:  # jsonargparse wraps what a constructor says
            raise ValueError(name_builder(error) + explain_parse_error(error)) from error
        if cast := dtype_mismatches(self.model, self._weights):  # which torch would cast to floats
            raise ValueError(
                f"{self.request.checkpoint} is of another architecture: {'; '.join(cast[:3])}. "
                "Use the config that it was trained with."
            )
        self._weights = {}  # keeps the file open
        if self.trainer.precision == "64-true":
            self.model.double()  # Lightning does so after it has restored, which rounds to float32
        given, dumped = self.value_of(self.config, "init_weights"), self.dumped()
        if given is not None and self.request.command == "fit" and self.request.checkpoint is None:
            rank_zero_info(start_from(self.model, given, dumped["model"].get("init_args", {})))
        for key, built in (("model", self.model), ("data", self.datamodule)):
            if built is not None:
                spec = dumped[key]
                built.hparams.clear()
                built.hparams.update(_class_path=spec["class_path"], _instantiator=_INSTANTIATOR)
                built.hparams.update(spec.get("init_args", {}) | spec.get("dict_kwargs", {}))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer, with what a run needs and the config does not name."""
        config = self.value_of(self.config_init, "trainer")
        plugins = _with_atomic_saves(config.plugins, self.request.trust)
        kwargs |= {"logger": self._loggers(config.logger), "callbacks": self._callbacks(config)}
        try:
            trainer = super().instantiate_trainer(plugins=plugins, **kwargs)
        except MisconfigurationException as error:
            if re.search("No supported gpu backend|accelerator is not available", str(error)):
                asked = f"trainer.accelerator={config.accelerator}"
                raise ValueError(f"{asked}: there is none here; auto takes what is.") from None
            raise
        environment = cluster_environment(trainer)
        if isinstance(environment, SLURMEnvironment) and environment not in plugins:
            # Lightning would save and requeue inside of a handler, whatever the command.
            environment.auto_requeue = False
        return trainer

    def _loggers(self, given: Any) -> Any:
        """A fit keeps metrics.csv beside the loggers given, or TensorBoard; others have no own.

        Those given come first: a module's `self.logger` is the first.
        """
        root, fits = self.request.root, self.request.command == "fit"
        if given is None or given is True:
            given = fits and TensorBoardLogger(
                root, name="", version="", sub_dir="tensorboard", default_hp_metric=False
            )
        loggers = given if isinstance(given, list) else [given]
        if not fits or not given or contains(loggers, AppendingCSVLogger):
            return given
        return [*loggers, AppendingCSVLogger(root)]

    def _callbacks(self, config: Any) -> list[Callback]:
        fits, root = self.request.command == "fit", self.request.root
        shows = config.enable_progress_bar is not False
        callbacks = with_defaults(config.callbacks, fits=fits, shows_progress=shows)
        # Scores of raw weights must not pass for those of the averages in the file.
        if not fits and self._averaged and not contains(callbacks, WeightsProvider):
            raise ValueError(
                f"{self.request.checkpoint} holds averaged weights, but no EMA callback is "
                "configured to use them: pass the run's config, or add EMA to trainer.callbacks."
            )
        if self.request.command == "predict" and not contains(callbacks, BasePredictionWriter):
            raise ValueError(
                "predict would keep nothing: write images with `lit-diffusion sample`, or add a "
                "lightning.pytorch.callbacks.BasePredictionWriter to trainer.callbacks."
            )
        if fits and not self.is_trial:
            callbacks += run_callbacks(self.changed)
            if config.enable_checkpointing is not False:
                return with_last_checkpoint(callbacks, root / "checkpoints")
        redeliver_signal()
        return callbacks

    def run_trainer(self, run: Callable[[], None]) -> None:
        """Run the command, and say in words what ended it."""
        try:
            run()
        except (SystemExit, Exception) as error:
            if number := self._signal_behind(error):
                self._print_how_to_resume(error, number)
                code = error.code if isinstance(error, SavedOnSignal) else 128 + number
                raise SystemExit(code) from error
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, RankWatch) and callback.verdict:
                    raise RuntimeError(callback.verdict) from error
            untrained = self.trainer.global_step == self._restored_step
            if (explanation := explain(error, self.request, untrained)) is not None:
                raise explanation from error
            raise

    def _signal_behind(self, error: BaseException) -> signal.Signals | None:
        """The signal that ended the Trainer, which exits with 0 after SIGTERM, 1 after Ctrl-C."""
        if isinstance(error, SavedOnSignal):
            return error.signal
        if isinstance(error.__context__, KeyboardInterrupt):
            return signal.SIGINT
        terminated = self.trainer.received_sigterm
        # Batch systems signal the workers too, whose death may be what the Trainer hears of first.
        worker = terminated and str(error).startswith("DataLoader worker")
        return signal.SIGTERM if worker or isinstance(error, SIGTERMException) else None

    def _print_how_to_resume(self, error: BaseException, number: signal.Signals) -> None:
        """Say how a fit goes on that a signal stopped; one that SLURM requeues does by itself."""
        fits = self.request.command == "fit" and not self.is_trial
        saved, step = isinstance(error, SavedOnSignal), self.trainer.global_step
        requeued = saved and number not in TERMINAL_SIGNALS and job_id()
        if fits and not requeued and self.trainer.is_global_zero:
            print_error(resume_line(self.request, step, number, saved))

    def before_fit(self) -> None:
        """Find out before anything is trained whether it can be kept, and by nobody else."""
        if not self.is_trial:
            rank_zero_only(self._take_folder)(self.request.root)

    def _take_folder(self, root: Path) -> None:
        self._held.enter_context(occupied(root))
        read_rows(root / "metrics.csv")  # whether a resume can go on in these files
        read_evaluations(root / "evaluations.jsonl")

    def after_fit(self) -> None:
        """Say where things are and how good they are."""
        if self.trainer.is_global_zero and not self.is_trial:
            seconds = time.monotonic() - self._started
            print(summary(self.request, self.trainer, seconds), file=sys.stderr)


def _nested_null(option: str) -> str:
    """`--model.network.a=null` as jsonargparse wants it, which takes that for the text "None"."""
    match = re.fullmatch(r"(--(?:model|data)\.[\w.]+)\.(\w+)=(?:null|~)", option)
    place = match[1].replace(".init_args", "") if match else ""
    return f'{place}={{"{match[2]}": null}}' if match and "." in place else option


def _hand_down_classes(model: Any) -> None:
    """Tell a network, where nothing is said of it, the `num_classes` of its module."""
    arguments = getattr(model, "init_args", None) or {}
    network = getattr(arguments.get("network"), "init_args", None) or {}
    if "num_classes" in network and network["num_classes"] is None and not network.get("condition"):
        network["num_classes"] = arguments.get("num_classes")


class _Formatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """jsonargparse's help, under a description with its lines as they are."""


def _with_atomic_saves(plugins: Any, trust: Sequence[str]) -> list[Any]:
    """The plugins with one that reads checkpoints without running code in them."""
    given = list(plugins) if isinstance(plugins, list) else [plugins] * (plugins is not None)
    readers = [type(plugin) for plugin in given if isinstance(plugin, CheckpointIO)]
    for reader in readers:
        path = f"{reader.__module__}.{reader.__qualname__}"
        if not (issubclass(reader, AtomicCheckpointIO) or is_within(path, trust)):
            raise ValueError(
                f"trainer.plugins: {path} may run code that a checkpoint holds; leave it out, or "
                f"add --trust {reader.__module__}."
            )
    return given if readers else [*given, AtomicCheckpointIO()]
