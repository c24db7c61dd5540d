"""Host time and Python calls of a step of `lit-diffusion fit`, by callback, hook and part.

    python tests/benchmarks/gpu/host_time.py [digits | cifar10] [--compile MODE] [--out FILE]

Figures are medians over steps that neither log nor save; the time of a part leaves out the parts
inside it. Each step starts with an idle device; on a CPU, time is that of this process. Calls of
Python functions are counted in other steps than time. Beside the fit stands a bare loop
(fit_overhead.py) in the same process. Measuring adds a microsecond or two to each part.
"""

import argparse
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning
import torch
from fit_overhead import WARM_UP, bare_loop, clock, config_options, run_fit
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.profilers import Profiler
from measure import synchronize

from lit_diffusion.callbacks.trainer_state import should_log

BARE = "[Bare loop]"
options = argparse.Namespace()


class Parts(Profiler):
    """Charges time or calls to the innermost part that runs; Lightning names its parts."""

    def __init__(self, rest: str) -> None:
        super().__init__()
        self.running = [rest]  # the innermost is the last
        self.step, self.unit = Counter[str](), "us"  # amounts of this step, by part
        self.steps: dict[str, list[Counter[str]]] = {"us": [], "calls": []}
        self.last = 0.0

    def start_step(self, unit: str) -> None:
        synchronize()
        self.unit, self.step, self.last = unit, Counter(), clock()
        sys.setprofile(self.count_call if unit == "calls" else None)

    def end_step(self, counts: bool = True) -> None:
        sys.setprofile(None)
        if counts:
            self.steps[self.unit].append(self.step)

    def count_call(self, frame: Any, event: str, _: Any) -> None:
        self.step[self.running[-1]] += event == "call" and frame.f_code.co_filename != __file__

    def charge(self) -> None:
        if self.unit == "us":
            self.step[self.running[-1]] += 1e6 * (clock() - self.last)

    def start(self, action_name: str) -> None:
        self.charge()
        self.running.append(action_name)
        self.last = clock()

    def stop(self, action_name: str) -> None:
        self.charge()
        self.running.pop()
        self.last = clock()

    def per_step(self) -> dict[str, tuple[float, float]]:
        """Medians over steps of microseconds and calls, by part."""
        times, calls = self.steps.values()
        return {
            part: (median(step[part] for step in times), median(step[part] for step in calls))
            for part in set().union(*times, *calls)
        }


class HostTime(Callback):
    """Measures steps of a fit, then those of a bare loop, and ends the process."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.count, self.had_logged = -WARM_UP, True
        self.parts = trainer.profiler = Parts("[Lightning]")
        for optimizer in trainer.optimizers:
            for hooks in (
                optimizer._optimizer_step_pre_hooks,
                optimizer._optimizer_step_post_hooks,
            ):
                for key, hook in hooks.items():
                    hooks[key] = self.timed(hook)

    def timed(self, hook: Any) -> Any:
        def run(*args: Any) -> None:
            with self.parts.profile("[Callback]EMA.(hook of the optimizer)"):
                hook(*args)

        return run

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        logs = should_log(trainer)
        is_odd = self.had_logged or logs or "save_checkpoint" in self.parts.step
        self.parts.end_step(counts=self.count > 0 and not is_odd)
        self.had_logged, self.count = logs, self.count + 1
        if self.count == 2 * options.steps:
            report(self.parts.per_step() | bare_steps(trainer, pl_module), trainer)
            sys.stdout.flush()
            os._exit(0)
        self.parts.start_step("calls" if self.count >= options.steps else "us")


def bare_steps(trainer: Trainer, module: Any) -> dict[str, tuple[float, float]]:
    parts = Parts(BARE + "rest")
    step = bare_loop(trainer, module, lambda name: parts.profile(BARE + name))
    for i in range(-WARM_UP, 2 * options.steps):
        parts.start_step("calls" if i >= options.steps else "us")
        step()
        parts.end_step(counts=i >= 0)
    return parts.per_step()


def report(amounts: dict[str, tuple[float, float]], trainer: Trainer) -> None:
    """Print a table, groups first, and write it as JSON."""
    groups: dict[str, Counter[str]] = {}
    rows = {}
    for part, (us, calls) in amounts.items():
        kind, group, hook = re.fullmatch(r"(?:\[(.*?)\])?(\w*)(?:{.*})?\.?(.*)", part).groups()
        group, hook = (group, hook) if kind == "Callback" else (kind or "Lightning", hook or group)
        rows[f"{group}: {hook}" if hook else group] = (us, calls)
        groups.setdefault(group, Counter()).update(us=us, calls=calls)
    print("| part of a step | host time, us | Python calls |\n|---|---|---|")
    for group, total in sorted(groups.items(), key=lambda item: -item[1]["us"]):
        print(f"| **{group}** | {total['us']:,.0f} | {total['calls']:,.1f} |")
        for name, (us, calls) in sorted(rows.items(), key=lambda item: -item[1][0]):
            if name.startswith(f"{group}: ") and us >= 0.5:
                print(f"| {name} | {us:,.0f} | {calls:,.1f} |")
    values = {name: {"us": round(us, 1), "calls": calls} for name, (us, calls) in rows.items()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    common = {"config": options.config, "compile": options.compile, "device": device}
    common |= {"torch": torch.__version__, "lightning": lightning.__version__}
    common["batch"] = trainer.datamodule.batch_size  # type: ignore[attr-defined]
    common["commit"] = options.commit
    if options.out:
        with options.out.open("a") as file:
            file.write(json.dumps(common | {"parts": values}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", choices=["digits", "cifar10"], default="digits")
    parser.add_argument("--batch", type=int, help="images a step, instead of the config's")
    parser.add_argument("--compile", metavar="MODE", help="mode of torch.compile")
    parser.add_argument("--tiny", action="store_true", help="a small network for cifar10")
    parser.add_argument("--steps", type=int, default=50, help="to time, and as many to count calls")
    parser.add_argument("--out", type=Path, help="file to which a line of JSON is added")
    parser.add_argument("--commit", default="unknown", help="written into the JSON")
    parser.parse_args(namespace=options)
    settings = config_options(options.config, options.tiny)
    if options.batch:
        settings.append(f"--data.init_args.batch_size={options.batch}")
    raise SystemExit(run_fit(settings, "host_time.HostTime", options.compile))


if __name__ == "__main__":
    import host_time  # under the name by which the command line imports the callback

    host_time.main()
