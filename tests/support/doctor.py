"""Examinations by the doctor, in this process."""

import os
from contextlib import ExitStack
from pathlib import Path

import yaml

from lit_diffusion.cli.doctor.examination import examine_run
from lit_diffusion.cli.doctor.opening import open_data
from lit_diffusion.cli.doctor.plan import plan_of
from lit_diffusion.cli.doctor.rehearsal import Rehearsal, started
from lit_diffusion.cli.run_folder import read_command_line

SHORT = 0.2
"""Seconds of each measurement."""


def clean_folder(tmp_path, monkeypatch):
    """Stand in an empty folder, with no job of SLURM around and no weights in the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("torch.hub._hub_dir", None, raising=False)
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)


def look(*options, seconds=SHORT):
    """Findings by topic; of several on one topic the gravest."""
    found = {}
    for finding in examine_run(options, seconds):
        if finding.topic not in found or finding.level > found[finding.topic].level:
            found[finding.topic] = finding
    return found


def look_at(config, *options, seconds=SHORT):
    Path("run.yaml").write_text(yaml.safe_dump(config))
    return look("--config", "run.yaml", *options, seconds=seconds)


def rehearse(config, *options):
    """All that a fit of the config would build."""
    Path("run.yaml").write_text(yaml.safe_dump(config))
    request = read_command_line(["fit", "--config", "run.yaml", *options])
    return Rehearsal(request, ExitStack())


def planned(config, *options):
    """The plan of a fit of the config."""
    cli = rehearse(config, *options)
    with started(cli):
        list(open_data(cli))
        return plan_of(cli.trainer)


def topics(found, level):
    return {topic for topic, finding in found.items() if finding.level is level}
