"""Run `lit-diffusion fit | validate | test | predict` with LightningCLI, in a run folder.

The command line overrides configs, and configs override the checkpoint.
"""

import errno
import logging
import re
import signal
import sys
import time
import traceback
import warnings
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, Literal

import yaml
from jsonargparse import DefaultHelpFormatter
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_diffusion.callbacks.rank_watch import RankWatch
from lit_diffusion.callbacks.slurm import job_id
from lit_diffusion.checkpoints import loading
from lit_diffusion.checkpoints.averages import average_names
from lit_diffusion.checkpoints.reading import check_resumable, limit_parameters, read_checkpoint
from lit_diffusion.checkpoints.saving import AtomicCheckpointIO
from lit_diffusion.cli import changed_settings, options, run_callbacks, run_folder
from lit_diffusion.cli.changed_settings import ApplyChangedHyperparameters, differences
from lit_diffusion.cli.exact_resume import ExactResume, completed_epochs
from lit_diffusion.cli.fit import HELP, missing_model
from lit_diffusion.cli.init_weights import start_from
from lit_diffusion.cli.loggers import AppendingCSVLogger, read_evaluations, read_rows
from lit_diffusion.cli.run_callbacks import contains
from lit_diffusion.cli.run_folder import Request, read_config
from lit_diffusion.cli.run_outputs import RunConfig, requeue_line, resume_line, summary
from lit_diffusion.config.messages import describe_error, explain_parse_error, is_user_error
from lit_diffusion.config.trust import allow_class_paths, is_within
from lit_diffusion.data.image_folder import ImageFileDataModule
from lit_diffusion.protocols import WeightsProvider
from lit_diffusion.signals import TERMINAL_SIGNALS, SavedOnSignal, print_error, redeliver_signal


def run_request(request: Request) -> None:
    """Run a command line."""
    if request.requeued:
        rank_zero_only(print)(requeue_line(request), file=sys.stderr)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip: For seamless" not in record.getMessage()
    )
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    with allow_class_paths(request.trust, rank_zero_info), ExitStack() as stack:
        RunCLI(request, stack)


class RunCLI(LightningCLI):
    """LightningCLI whose runs have a run folder.

    A fit locks its run folder. The lock is released when the ExitStack `stack` is closed.
    """

    def __init__(self, request: Request, stack: ExitStack) -> None:
        self.request = request
        self.is_fit = request.command == "fit"
        self.changed: dict[str, tuple[Any, Any]] = {}  # settings: (in the checkpoint, used)
        self._stack = stack
        self._start = time.monotonic()
        file = request.checkpoint
        checkpoint = {} if file is None else read_checkpoint(file, shapes_only=True)
        if file is not None and self.is_fit:
            check_resumable(checkpoint, file)
        self._saved_model = loading.model_spec(checkpoint)
        self._saved_data = loading.model_spec(checkpoint, "datamodule_hyper_parameters")
        self._has_averages = bool(average_names(checkpoint, file or ""))
        self._weights = checkpoint.get("state_dict", {})
        self.saved_step = checkpoint.get("global_step")
        self._saved_epochs = completed_epochs(checkpoint)
        del checkpoint  # `self._weights` is then the only reference to the mapped file
        # Raise errors and refuse abbreviated options, as in `run_folder`.
        strict = {"exit_on_error": False, "allow_abbrev": False}
        command_kwargs = {
            "description": HELP[request.command].partition("\noptions:")[0],
            "usage": f"lit-diffusion {request.command} --config FILE [options]",
            **strict,
        }
        common = {"prog": "lit-diffusion", "formatter_class": _HelpFormatter, **strict}
        super().__init__(
            save_config_callback=RunConfig,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_kwargs={**common, request.command: command_kwargs},
            args=self._arguments(),
        )

    # Parsing

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return only the requested command, because building all parsers is slow."""
        return {self.request.command: LightningCLI.subcommands()[self.request.command]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options that do not belong to the model, the data or the Trainer."""
        text = "what the numbers of this config were tuned on, in words; `compare` shows it"
        parser.add_argument("--tuned_on", type=str | None, help=text)
        kind, text = Literal[options.FLOAT32_PRECISIONS], options.FLOAT32_PRECISION_HELP
        parser.add_argument("--float32_precision", type=kind | None, help=" ".join(text.split()))
        text = "start from all weights of another run that fit: CKPT, CKPT:raw, CKPT:ema, an export"
        parser.add_argument("--init_weights", type=str | None, help=text)

    def _arguments(self) -> list[str]:
        """The command line, preceded by the checkpoint's model and the run's config."""
        request, configs = self.request, []
        if self._saved_model is not None:
            configs.append(yaml.safe_dump({"model": self._saved_model}))  # JSON has no inf
        config = run_folder.latest_config(request.root) if request.holds_checkpoint else None
        if config and not request.configs:
            configs.append(yaml.safe_dump(read_config(config)))
        arguments = [request.command, *(x for text in configs for x in ("--config", text))]
        arguments += request.options
        # Options such as --model.help=CLASS must be the last ones.
        class_help = r"--(model|data|trainer\.\w+)\.help(=|$)"
        if not any(re.match(class_help, option) for option in request.options):
            arguments += ["--trainer.default_root_dir", str(request.root)]
            if request.checkpoint is not None:
                arguments += ["--ckpt_path", str(request.checkpoint)]
        return arguments

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments; raise a ValueError with a short message for a mistake."""
        assert isinstance(args, list)
        command = self.request.command
        configs = {path: read_config(path) for path in self.request.configs}
        for line in run_callbacks.dropped_callbacks(configs):
            rank_zero_info(line)
        args, by_name = run_callbacks.split_callback_options(map(_rewrite_nested_null, args))
        try:
            if by_name:
                config = parser.parse_args([a for a in args if "--print_config" not in a])
                dumped = yaml.safe_load(parser.dump(config, skip_unset=False, skip_validation=True))
                callbacks = dumped[command]["trainer"]["callbacks"] or []
                callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
                changed = yaml.safe_dump(run_callbacks.apply_callback_options(callbacks, by_name))
                args = [*args, f"--trainer.callbacks={changed}"]
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            names = [action.dest for action in self._subcommand_parsers[command]._actions]
            message = explain_parse_error(error, names)
            if message == f"{command}.model must be given.":
                raise missing_model(self.request) from error
            raise ValueError(message) from error

    def _parse_ckpt_path(self) -> None:
        """Complete the parsed config, and log the settings that differ from the checkpoint.

        Replaces a method of Lightning, which would let the checkpoint's model override the config.
        """
        settings = self.config[self.request.command]
        strategy = settings["trainer"]["strategy"]
        if getattr(strategy, "class_path", "").startswith("lightning.pytorch.strategies.Model"):
            strategy.class_path = "lit_diffusion.checkpoints.sharded.AtomicModelParallelStrategy"
        _take_from_data(settings["model"], settings["data"], self.request.trust)
        _inherit_num_classes(settings["model"])
        # The parser has validated the config, which takes most of the time of Lightning's own dump.
        text = self.parser.dump(self.config, skip_unset=False, skip_validation=True)
        self.config_dump = yaml.safe_load(text)[self.request.command]
        if self._saved_model is None:
            return
        self.changed = changed = differences(self._saved_model, self.config_dump["model"])
        if self._saved_data is not None and self.is_fit:
            changed = changed | differences(self._saved_data, self.config_dump["data"], "data")
        for name, (old, new) in changed.items():
            rank_zero_info(f"The checkpoint had {name} {old}, using {new}.")

    # Checks before the classes are instantiated

    @property
    def writes(self) -> bool:
        """Whether the command writes into the run folder: a fit without `fast_dev_run`."""
        return self.is_fit and not self.config_dump["trainer"]["fast_dev_run"]

    def before_instantiate_classes(self) -> None:
        """Raise an error for wrong settings, or if a fit would overwrite or repeat a run."""
        request = self.request
        if self._saved_model is not None and request.checkpoint is not None:
            model, settings = self.config_dump["model"], run_folder.model_settings(request)
            loading.check_codec_folder(model, request.checkpoint, request.trust, settings)
        trainer = self.config_dump["trainer"]
        if trainer["max_steps"] is None:
            raise ValueError("trainer.max_steps must be a number, -1 for no end, got null.")
        for name in ("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval"):
            if isinstance(value := trainer[name], int) and value < 1:
                raise ValueError(f"trainer.{name} must be at least 1, got {value}.")
        if self.writes:
            rank_zero_only(run_folder.refuse_mixing)(self.request)
            self._refuse_finished(trainer["max_steps"], trainer["max_epochs"])

    def _refuse_finished(self, max_steps: int, max_epochs: int | None) -> None:
        """Raise ValueError for a finished run, or SystemExit(0) if its command is repeated."""
        for unit, done, limit in (
            ("steps", self.saved_step, max_steps),
            ("epochs", self._saved_epochs, max_epochs),
        ):
            if done and limit is not None and 0 <= limit <= done:
                setting = f"trainer.max_{unit}"
                text = f"{self.request.checkpoint} has {done} {unit}, and {setting} is {limit}"
                if self.request.requeued or self.request.repeated:
                    print_error(f"{text}: the run is finished.")
                    raise SystemExit(0)
                raise ValueError(f"{text}; raise {setting} to train further.")

    # Building

    def instantiate_classes(self) -> None:
        """Build model, data and Trainer, and store class paths and arguments as hyperparameters."""
        options.set_float32_precision(self.config_dump["float32_precision"])
        try:
            trust = self.request.trust
            with limit_parameters(self._weights, trust) if self._weights else nullcontext():
                super().instantiate_classes()
        except ValueError as error:  # jsonargparse wraps the errors of constructors
            message = _failed_init(error) + explain_parse_error(error)
            if self._saved_model is not None and not self.changed:
                message = f"the settings in {self.request.checkpoint}: {message}"
            raise ValueError(message) from error
        loading.refuse_other_dtypes(self.model, self._weights, self.request.checkpoint)
        self._weights = {}  # releases the file
        if self.trainer.precision == "64-true":
            self.model.double()  # Lightning converts after restoring, which rounds to float32
        source = self.config_init[self.request.command]["init_weights"]
        if source is not None and self.is_fit and not self.request.checkpoint:
            settings = self.config_dump["model"].get("init_args", {})
            rank_zero_info(start_from(self.model, source, settings))
        for key, built in (("model", self.model), ("data", self.datamodule)):
            if built is not None:
                spec = self.config_dump[key]
                built.hparams.clear()
                built.hparams.update(
                    _class_path=spec["class_path"],
                    # for Lightning's own `load_from_checkpoint`
                    _instantiator="lightning.pytorch.cli.instantiate_module",
                )
                built.hparams.update(spec.get("init_args", {}) | spec.get("dict_kwargs", {}))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer, adding the default plugins, loggers and callbacks of a run."""
        config = self.config_init[self.request.command]["trainer"]
        plugins = _with_safe_reading(config.plugins, self.request.trust)
        kwargs |= {"logger": self._loggers(config.logger), "callbacks": self._callbacks(config)}
        try:
            trainer = super().instantiate_trainer(plugins=plugins, **kwargs)
            trainer.run_folder = trainer.default_root_dir  # type: ignore[attr-defined]
        except MisconfigurationException as error:
            if not re.search("No supported gpu backend|can not run on your system", str(error)):
                raise
            raise ValueError(
                f"trainer.accelerator={config.accelerator} is not available on this machine; use "
                "auto or cpu."
            ) from None
        except RuntimeError as error:
            repeated = re.match(r"Found more than one stateful callback of type `(\w+)", str(error))
            if not repeated:
                raise
            raise ValueError(
                f"trainer.callbacks has {repeated[1]} twice, and a checkpoint holds the state of "
                "only one; remove one of them, or the config that adds it."
            ) from None
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment not in plugins:
            # Lightning would save and requeue inside a signal handler, whatever the command.
            environment.auto_requeue = False
        run_callbacks.skip_empty_hooks(trainer.callbacks)  # type: ignore[attr-defined]
        return trainer

    def _loggers(self, loggers: Any) -> Any:
        """Loggers of the config (default TensorBoard) and metrics.csv, for a fit.

        Other commands have only the loggers of the config. Loggers of the config come first,
        because `self.logger` of a module is the first logger.
        """
        root = self.request.root
        if loggers is None or loggers is True:
            loggers = self.is_fit and TensorBoardLogger(
                root, name="", version="", sub_dir="tensorboard", default_hp_metric=False
            )
        as_list = loggers if isinstance(loggers, list) else [loggers]
        if not self.is_fit or not loggers or contains(as_list, AppendingCSVLogger):
            return loggers
        return [*as_list, AppendingCSVLogger(root)]

    def _callbacks(self, config: Any) -> list[Callback]:
        """Return the callbacks; raise ValueError if the command would give no useful results."""
        shows_progress = config.enable_progress_bar is not False
        callbacks = run_callbacks.with_defaults(
            config.callbacks, fits=self.is_fit, shows_progress=shows_progress
        )
        # Metrics of raw weights must not be mistaken for metrics of the averages in the file.
        if not self.is_fit and self._has_averages and not contains(callbacks, WeightsProvider):
            raise ValueError(
                f"{self.request.checkpoint} holds averaged weights, but no EMA callback is "
                "configured to use them: add the config of the run, or EMA to trainer.callbacks."
            )
        if self.request.command == "predict" and not contains(callbacks, BasePredictionWriter):
            raise ValueError(
                "predict would discard its results: write images with `lit-diffusion sample`, or "
                "add a lightning.pytorch.callbacks.BasePredictionWriter to trainer.callbacks."
            )
        if self.writes:
            callbacks += [ApplyChangedHyperparameters(self.changed), ExactResume()]
            if config.enable_checkpointing is not False:
                folder = self.request.root / "checkpoints"
                return run_callbacks.with_last_checkpoint(callbacks, folder)
        redeliver_signal()
        return callbacks

    # Running

    @rank_zero_only
    def before_fit(self) -> None:
        """Lock the run folder, and check that a resume can append to its files."""
        root = self.request.root
        if self.writes:
            self._stack.enter_context(run_folder.occupied(root))
            read_rows(root / "metrics.csv")
            read_evaluations(root / "evaluations.jsonl")

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Arguments of the Trainer's method; no config can disable `weights_only`."""
        return {**super()._prepare_subcommand_kwargs(subcommand), "weights_only": True}

    def _run_subcommand(self, subcommand: str) -> None:
        self.run_trainer(partial(super()._run_subcommand, subcommand))

    def run_trainer(self, run: Callable[[], None]) -> None:
        """Call `run`, which calls the Trainer, and explain the error that ended it."""
        try:
            run()
        except (SystemExit, Exception) as error:
            if number := self._signal_that_ended(error):
                saved, step = isinstance(error, SavedOnSignal), self.trainer.global_step
                requeued = saved and number not in TERMINAL_SIGNALS and job_id()
                if self.writes and not requeued and self.trainer.is_global_zero:
                    print_error(resume_line(self.request, step, number, saved))
                code = error.code if isinstance(error, SavedOnSignal) else 128 + number
                raise SystemExit(code) from error
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, RankWatch) and callback.verdict:
                    raise RuntimeError(callback.verdict) from error
            if _is_disk_full(error):  # not a mistake of the command line, which exits with 2
                raise RuntimeError(describe_error(error)) from error
            untrained = self.trainer.global_step == self.saved_step
            if (explanation := explain(error, self.request, untrained)) is not None:
                raise explanation from error
            raise

    def _signal_that_ended(self, error: BaseException) -> signal.Signals | None:
        """The signal that ended the Trainer, or None; Lightning's own exit codes do not show it."""
        if isinstance(error, SavedOnSignal):
            return error.signal
        if isinstance(error.__context__, KeyboardInterrupt):
            return signal.SIGINT
        # Batch systems signal the workers too, so the Trainer may notice their death first.
        worker = self.trainer.received_sigterm and str(error).startswith("DataLoader worker")
        return signal.SIGTERM if worker or isinstance(error, SIGTERMException) else None

    def after_fit(self) -> None:
        """Print the summary of the run."""
        if self.trainer.is_global_zero and self.writes:
            seconds = time.monotonic() - self._start
            print(summary(self.request, self.trainer, seconds), file=sys.stderr)


class _HelpFormatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Help formatter of jsonargparse that preserves the lines of the description."""


def _rewrite_nested_null(option: str) -> str:
    """Rewrite --model.network.a=null, whose value jsonargparse would read as the text "None"."""
    match = re.fullmatch(r"(--(?:model|data)\.[\w.]+)\.(\w+)=(?:null|~)", option)
    parent = match[1].replace(".init_args", "") if match else ""
    return f'{parent}={{"{match[2]}": null}}' if match and "." in parent else option


def _take_from_data(model: Any, data: Any, trust: Sequence[str]) -> None:
    """Replace the value "data" of a module's `image_shape` and `num_classes` with the data's."""
    arguments = getattr(model, "init_args", None) or {}
    names = [name for name in ("image_shape", "num_classes") if arguments.get(name) == "data"]
    if not names:
        return
    if data is None:
        raise ValueError(f"model.{names[0]} is 'data', but the config names no data; add data:.")
    built = loading.instantiate([data.as_dict()], LightningDataModule, trust, "data")
    for name in names:
        if not hasattr(built, name):
            raise ValueError(
                f"model.{name} is 'data', but {data.class_path} has no {name}; set a value."
            )
        arguments[name] = getattr(built, name)
    dropout, conditioning = arguments.get("label_dropout"), arguments.get("conditioning")
    is_unlabelled = "num_classes" in names and arguments["num_classes"] is conditioning is None
    if dropout and is_unlabelled and isinstance(built, ImageFileDataModule):
        raise ValueError(
            f"{built.folder('train')} has no class folders, and label_dropout={dropout} needs "
            "classes: put the images into a folder per class, or add --model.label_dropout=0."
        )


def _inherit_num_classes(model: Any) -> None:
    """If a network's `num_classes` is None, set it to the module's `num_classes`."""
    arguments = getattr(model, "init_args", None) or {}
    network = getattr(arguments.get("network"), "init_args", None) or {}
    if "num_classes" in network and network["num_classes"] is None and not network.get("condition"):
        network["num_classes"] = arguments.get("num_classes")


def _with_safe_reading(plugins: Any, trust: Sequence[str]) -> list[Any]:
    """The plugins, with one that reads checkpoints without executing code from them."""
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


def _is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk, or a used-up quota, caused an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


# Error messages that name the file or setting at fault


def _failed_init(error: BaseException) -> str:
    """The prefix "UNet cannot be built: " if a constructor failed outside of its checks."""
    while not is_user_error(error) and error.__cause__ is not None:
        error = error.__cause__
    if is_user_error(error):
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        kind = type(frame.f_locals.get("self"))
        is_ours = is_within(kind.__module__, ["lit_diffusion"])
        in_constructor = frame.f_code.co_name == "__init__" and not issubclass(kind, LightningCLI)
        if is_ours and in_constructor:
            return f"{kind.__name__} cannot be built: "
    return ""


def explain(error: BaseException, request: Request, untrained: bool) -> ValueError | None:
    """Explain an error that a checkpoint or setting has caused in torch or Lightning.

    If `untrained`, the error occurred before the first optimizer step after the checkpoint was
    loaded. An error in an optimizer is then attributed to the optimizer state in the checkpoint.

    Returns:
        A readable error, or None for an error with another cause.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    message = str(error).split("\n")[0]
    if isinstance(error, RuntimeError) and message.startswith("Error(s) in loading state_dict"):
        details = loading.list_mismatches(error)
        return ValueError(
            f"{request.checkpoint} has a different architecture than the config: {details}"
        )
    # These modules only restore checkpoints.
    restoring = ["lightning.pytorch.trainer.connectors.checkpoint_connector"]
    restoring += [changed_settings.__name__, *(["torch.optim"] if untrained else [])]
    if request.checkpoint is not None and any(is_within(name, restoring) for name in modules):
        if not is_user_error(error):
            message = (
                "it is damaged, or was saved with other callbacks, optimizers or versions "
                f"({type(error).__name__} in {frames[-1].f_code.co_qualname}: {message})."
            )
        elif changed_settings.__name__ in modules:
            return None
        return ValueError(f"{request.checkpoint} cannot be restored: {message}")
    in_constructor = frames[-1].f_code.co_name == "__init__"  # may compare a null setting
    is_mistake = in_constructor or is_user_error(error, ("torch",))
    if is_within(modules[-1], ["torch.optim"]) and is_mistake:
        return ValueError(f"model.optimizer or model.lr_scheduler: {message}")
    return None
