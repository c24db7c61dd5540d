"""LightningCLI with a run folder around it: what fit, validate, test and predict are.

Command line wins over config, config over checkpoint.
"""

import logging
import re
import signal
import sys
import time
import warnings
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
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
from lit_diffusion.cli.error_messages import explain, failed_class
from lit_diffusion.cli.fit import DESCRIPTIONS
from lit_diffusion.cli.init_weights import start_from
from lit_diffusion.cli.lightning_internals import (
    SubcommandCLI,
    cluster_environment,
    completed_epochs,
)
from lit_diffusion.cli.loggers import AppendingCSVLogger, read_evaluations, read_rows
from lit_diffusion.cli.run_callbacks import (
    apply_callback_options,
    contains,
    logging_and_resume_callbacks,
    split_callback_options,
    with_defaults,
    with_last_checkpoint,
)
from lit_diffusion.cli.run_folder import (
    Request,
    latest_config,
    occupied,
    read_command_line,
    read_config,
    refuse_mixing,
)
from lit_diffusion.cli.run_outputs import RunConfig, requeue_line, resume_line, summary
from lit_diffusion.config.messages import explain_parse_error
from lit_diffusion.config.trust import allow_class_paths, is_within
from lit_diffusion.protocols import WeightsProvider
from lit_diffusion.signals import TERMINAL_SIGNALS, SavedOnSignal, print_error, redeliver_signal


def run_command(argv: Sequence[str]) -> None:
    """Run a command line whose first word is fit, validate, test or predict.

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
    with allow_class_paths(request.trust), ExitStack() as stack:
        RunCLI(request, stack)


def wrong_trainer_settings(
    trainer: Mapping[str, Any], ckpt_path: str | None = None
) -> Iterator[str]:
    """Messages about settings that the Trainer takes, and on which a run fails later."""
    if trainer.get("max_steps", -1) is None:
        yield "trainer.max_steps must be a number, -1 for no end, got null."
    for name in ("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval"):
        value = trainer.get(name)
        if isinstance(value, int) and value < 1:
            counts = " where it counts batches" if name == "val_check_interval" else ""
            yield f"trainer.{name} must be at least 1{counts}, got {value}."
    if ckpt_path == "best":  # which Lightning knows
        yield (
            "ckpt_path=best is known to no run here; name the file, such as "
            "checkpoints/best-fid.ckpt in the run folder, or last."
        )


class RunCLI(SubcommandCLI):
    """LightningCLI whose runs live in a run folder.

    Args:
        request: the command line.
        stack: contexts that the run is in until it ends, to which the lock on its folder is added.
    """

    def __init__(self, request: Request, stack: ExitStack) -> None:
        self.request = request
        self.changed: dict[str, tuple[Any, Any]] = {}  # settings: (in the checkpoint, used)
        self._stack = stack
        self._start = time.monotonic()
        file = request.checkpoint
        checkpoint = {} if file is None else read_checkpoint(file, mmap=True)
        if file is not None and request.command == "fit":
            check_resumable(checkpoint, file)
        self._saved_model = model_spec(checkpoint)
        self._saved_data = model_spec(checkpoint, "datamodule_hyper_parameters")
        self._has_averages = bool(find_averages(checkpoint, file or ""))
        self._weights = checkpoint.get("state_dict", {})
        self._saved_step = checkpoint.get("global_step")
        self._saved_epochs = completed_epochs(checkpoint)
        # Errors are raised, and options have their whole names, as in `run_folder`.
        strict = {"exit_on_error": False, "allow_abbrev": False}
        parser_options: dict[str, Any] = {"prog": "lit-diffusion", **strict}
        parser_options["formatter_class"] = _HelpFormatter
        for name, description in DESCRIPTIONS.items():
            usage = f"lit-diffusion {name} --config FILE [options]"
            parser_options[name] = {"description": description, "usage": usage, **strict}
        super().__init__(
            save_config_callback=RunConfig,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_kwargs=parser_options,
            args=self._arguments(),
        )

    # Parsing

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add options beside those of the model, the data and the Trainer."""
        text = "in words, what the numbers of this config were tuned on; `compare` shows it"
        parser.add_argument("--tuned_on", type=str | None, help=text)
        text = "start a new run from what fits of another: CKPT, CKPT:raw, CKPT:ema, or an export"
        parser.add_argument("--init_weights", type=str | None, help=text)

    def _arguments(self) -> list[str]:
        """The command line, after what it overrides: the checkpoint's model, the run's config."""
        request, configs = self.request, []
        if self._saved_model is not None:
            configs.append(yaml.safe_dump({"model": self._saved_model}))  # JSON has no inf
        config = latest_config(request.root) if request.holds_checkpoint else None
        if config and not request.configs:
            configs.append(yaml.safe_dump(read_config(config)))
        arguments = [request.command, *(x for text in configs for x in ("--config", text))]
        arguments += request.options
        # --model.help=CLASS and the like print the arguments of a class, and nothing may follow.
        class_help = r"--(model|data|trainer\.\w+)\.help(=|$)"
        if not any(re.match(class_help, option) for option in request.options):
            arguments += ["--trainer.default_root_dir", str(request.root)]
            if request.checkpoint is not None:
                arguments += ["--ckpt_path", str(request.checkpoint)]
        return arguments

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, with a ValueError of one line for a mistake."""
        assert isinstance(args, list)
        args, by_name = split_callback_options(map(_nested_null, args))
        try:
            if by_name:
                self.config = parser.parse_args([a for a in args if "--print_config" not in a])
                callbacks = self.dumped()["trainer"]["callbacks"] or []
                callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
                changed = yaml.safe_dump(apply_callback_options(callbacks, by_name))
                args = [*args, f"--trainer.callbacks={changed}"]
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            message = explain_parse_error(error, self.options(self.request.command))
            if message.startswith(f"{self.request.command}.model must"):
                configs = ", ".join(self.request.configs)
                message = "needs --config FILE, such as --config configs/digits.yaml."
                message = f"{configs} names no model." if configs else message
            raise ValueError(message) from error

    def compare_with_checkpoint(self) -> None:
        """Say which settings differ from those of the checkpoint, whose model was parsed first."""
        _hand_down_classes(self.value_of(self.config, "model"))
        if self._saved_model is None:
            return
        used = self.dumped()
        self.changed = differences(self._saved_model, used["model"])
        all_changed = self.changed
        if self._saved_data is not None and self.request.command == "fit":
            all_changed = all_changed | differences(self._saved_data, used["data"], "data")
        for name, (old, new) in all_changed.items():
            rank_zero_info(f"The checkpoint had {name} {old}, using {new}.")

    # Before anything is built

    @property
    def is_trial(self) -> bool:
        """Whether this is a run of a few batches that writes nothing (fast_dev_run)."""
        return bool(self.value_of(self.config, "trainer").fast_dev_run)

    def before_instantiate_classes(self) -> None:
        """Refuse wrong settings, and a fit that must not write into the run folder."""
        trainer, ckpt_path = (self.value_of(self.config, key) for key in ("trainer", "ckpt_path"))
        for message in wrong_trainer_settings(vars(trainer), ckpt_path):
            raise ValueError(message)
        if self.request.command == "fit" and not self.is_trial:
            rank_zero_only(refuse_mixing)(self.request)
            self._refuse_finished(trainer.max_steps, trainer.max_epochs)

    def _refuse_finished(self, max_steps: int, max_epochs: int | None) -> None:
        """Raise ValueError for a finished run; SystemExit(0) if the command is just repeated."""
        for unit, done, limit in (
            ("steps", self._saved_step, max_steps),
            ("epochs", self._saved_epochs, max_epochs),
        ):
            if done and limit is not None and 0 <= limit <= done:
                setting = f"trainer.max_{unit}"
                text = f"{self.request.checkpoint} has {done} {unit}, and {setting} is {limit}"
                if self.request.requeued or self.request.repeated:
                    print_error(f"{text}: the run is finished.")
                    raise SystemExit(0)
                raise ValueError(f"{text}; raise that to train on.")

    # Building

    def instantiate_classes(self) -> None:
        """Build model, data and Trainer; leave class paths and arguments for their checkpoints."""
        try:
            with limit_parameters(self._weights) if self._weights else nullcontext():
                super().instantiate_classes()
        except ValueError as error:  # jsonargparse wraps what a constructor says
            raise ValueError(failed_class(error) + explain_parse_error(error)) from error
        if cast := dtype_mismatches(self.model, self._weights):  # which torch would cast to floats
            raise ValueError(
                f"{self.request.checkpoint} is of another architecture: {'; '.join(cast[:3])}. "
                "Use the config that it was trained with."
            )
        self._weights = {}  # keeps the file open
        if self.trainer.precision == "64-true":
            self.model.double()  # Lightning does so after it has restored, which rounds to float32
        source, dumped = self.value_of(self.config, "init_weights"), self.dumped()
        if source is not None and self.request.command == "fit" and not self.request.checkpoint:
            rank_zero_info(start_from(self.model, source, dumped["model"].get("init_args", {})))
        for key, built in (("model", self.model), ("data", self.datamodule)):
            if built is not None:
                spec = dumped[key]
                built.hparams.clear()
                built.hparams.update(
                    _class_path=spec["class_path"],
                    # by which Lightning's own `load_from_checkpoint` reads the file
                    _instantiator="lightning.pytorch.cli.instantiate_module",
                )
                built.hparams.update(spec.get("init_args", {}) | spec.get("dict_kwargs", {}))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer, with the plugins, loggers and callbacks of a run that the config lacks."""
        config = self.value_of(self.config_init, "trainer")
        plugins = _with_safe_reading(config.plugins, self.request.trust)
        kwargs |= {"logger": self._loggers(config.logger), "callbacks": self._callbacks(config)}
        try:
            trainer = super().instantiate_trainer(plugins=plugins, **kwargs)
        except MisconfigurationException as error:
            if re.search("No supported gpu backend|accelerator is not available", str(error)):
                setting = f"trainer.accelerator={config.accelerator}"
                raise ValueError(f"{setting}: there is none here; auto takes what is.") from None
            raise
        environment = cluster_environment(trainer)
        if isinstance(environment, SLURMEnvironment) and environment not in plugins:
            # Lightning would save and requeue inside of a handler, whatever the command.
            environment.auto_requeue = False
        return trainer

    def _loggers(self, loggers: Any) -> Any:
        """The config's loggers, or TensorBoard, and metrics.csv for a fit; none for other commands.

        Those of the config come first: a module's `self.logger` is the first.
        """
        root, fits = self.request.root, self.request.command == "fit"
        if loggers is None or loggers is True:
            loggers = fits and TensorBoardLogger(
                root, name="", version="", sub_dir="tensorboard", default_hp_metric=False
            )
        as_list = loggers if isinstance(loggers, list) else [loggers]
        if not fits or not loggers or contains(as_list, AppendingCSVLogger):
            return loggers
        return [*as_list, AppendingCSVLogger(root)]

    def _callbacks(self, config: Any) -> list[Callback]:
        """The callbacks of the run; ValueError where the command would be of no use."""
        fits, root = self.request.command == "fit", self.request.root
        shows = config.enable_progress_bar is not False
        callbacks = with_defaults(config.callbacks, fits=fits, shows_progress=shows)
        # Scores of raw weights must not pass for those of the averages in the file.
        if not fits and self._has_averages and not contains(callbacks, WeightsProvider):
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
            callbacks += logging_and_resume_callbacks(self.changed)
            if config.enable_checkpointing is not False:
                return with_last_checkpoint(callbacks, root / "checkpoints")
        redeliver_signal()
        return callbacks

    # Running

    @rank_zero_only
    def before_fit(self) -> None:
        """Lock the run folder, and check that a resume can append to its files."""
        root = self.request.root
        if not self.is_trial:
            self._stack.enter_context(occupied(root))
            read_rows(root / "metrics.csv")
            read_evaluations(root / "evaluations.jsonl")

    def run_trainer(self, run: Callable[[], None]) -> None:
        """Run the command, and raise what ended it in words."""
        try:
            run()
        except (SystemExit, Exception) as error:
            if number := self._signal_behind(error):
                saved, step = isinstance(error, SavedOnSignal), self.trainer.global_step
                requeued = saved and number not in TERMINAL_SIGNALS and job_id()
                fits = self.request.command == "fit" and not self.is_trial
                if fits and not requeued and self.trainer.is_global_zero:
                    print_error(resume_line(self.request, step, number, saved))
                code = error.code if isinstance(error, SavedOnSignal) else 128 + number
                raise SystemExit(code) from error
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, RankWatch) and callback.verdict:
                    raise RuntimeError(callback.verdict) from error
            untrained = self.trainer.global_step == self._saved_step
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

    def after_fit(self) -> None:
        """Print where things are and how good they are."""
        if self.trainer.is_global_zero and not self.is_trial:
            seconds = time.monotonic() - self._start
            print(summary(self.request, self.trainer, seconds), file=sys.stderr)


class _HelpFormatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """jsonargparse's help, under a description with its lines as they are."""


def _nested_null(option: str) -> str:
    """--model.network.a=null as jsonargparse wants it, which takes that for the text "None"."""
    match = re.fullmatch(r"(--(?:model|data)\.[\w.]+)\.(\w+)=(?:null|~)", option)
    parent = match[1].replace(".init_args", "") if match else ""
    return f'{parent}={{"{match[2]}": null}}' if match and "." in parent else option


def _hand_down_classes(model: Any) -> None:
    """Give a network that takes `num_classes`, and gets None, that of its module."""
    arguments = getattr(model, "init_args", None) or {}
    network = getattr(arguments.get("network"), "init_args", None) or {}
    if "num_classes" in network and network["num_classes"] is None and not network.get("condition"):
        network["num_classes"] = arguments.get("num_classes")


def _with_safe_reading(plugins: Any, trust: Sequence[str]) -> list[Any]:
    """The plugins, with one that reads checkpoints without running code in them."""
    plugins = list(plugins) if isinstance(plugins, list) else [plugins] * (plugins is not None)
    readers = [type(plugin) for plugin in plugins if isinstance(plugin, CheckpointIO)]
    for reader in readers:
        path = f"{reader.__module__}.{reader.__qualname__}"
        if not (issubclass(reader, AtomicCheckpointIO) or is_within(path, trust)):
            raise ValueError(
                f"trainer.plugins: {path} may run code that a checkpoint holds; leave it out, or "
                f"add --trust {reader.__module__}."
            )
    return plugins if readers else [*plugins, AtomicCheckpointIO()]
