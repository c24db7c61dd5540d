import itertools

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from lit_diffusion.cli.doctor.ranks import (
    Ranks,
    check_launch,
    check_slurm,
    check_torchrun,
    is_first_process,
)
from lit_diffusion.cli.doctor.report import Level, has_problem

JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
FITTING = Ranks(devices=4, num_nodes=2)


def look(ranks, environ, **changes):
    merged = {**environ, **changes}
    return check_launch(ranks, {name: value for name, value in merged.items() if value is not None})


def gravest(findings):
    return max((finding.level for finding in findings), default=None)


def text(findings):
    return " ".join(finding.text for finding in findings)


def test_without_a_launcher_there_is_nothing_to_say():
    assert check_launch(Ranks(1, 1), {}) == []
    assert check_launch(Ranks(1, 2), {"MASTER_ADDR": "node1"}) == []


def test_nodes_without_a_launcher_are_warned_of():
    (finding,) = check_launch(Ranks(1, 2), {})
    assert finding.level is Level.WARNING
    assert "num_nodes=2" in finding.text


def test_a_job_that_fits_is_ok():
    (finding,) = look(FITTING, JOB)
    assert (finding.level, finding.text) == (Level.OK, "8 tasks on 2 nodes")


@pytest.mark.parametrize(
    ("ranks", "changes", "level", "told"),
    [
        (Ranks(2, 2), {}, Level.PROBLEM, "set --trainer.devices=4"),
        (Ranks(4, 1), {}, Level.PROBLEM, "set --trainer.num_nodes=2"),
        (Ranks(4, 2), {"SLURM_NTASKS": "7"}, Level.PROBLEM, "7 tasks, but the run has 8 ranks"),
        (Ranks(4, 2), {"SLURM_NTASKS_PER_NODE": None}, Level.PROBLEM, "--ntasks-per-node=4"),
        (Ranks(4, 2), {"SLURM_JOB_NAME": "bash"}, Level.PROBLEM, "another name"),
        (Ranks(4, 2), {"SLURM_JOB_NAME": "interactive"}, Level.PROBLEM, "another name"),
        (Ranks(4, 2), {"SLURM_JOB_NAME": "bash2"}, Level.OK, ""),
        (Ranks(4, 2), {"SLURM_NTASKS": None}, Level.PROBLEM, "wait for the others for ever"),
        (Ranks(4, 1), {"SLURM_NTASKS": None}, Level.NOTE, "SLURM_NTASKS is not set"),
        (Ranks(4, 1), {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "bash"}, Level.NOTE, "itself"),
        (Ranks(4, 2), {"SLURM_JOB_NUM_NODES": "3"}, Level.WARNING, "2 of the 3 nodes"),
        (Ranks(4, 2), {"SLURM_STEP_ID": None}, Level.NOTE, "start fit with srun"),
        (Ranks(None, 2), {}, Level.OK, ""),
        (None, {}, Level.OK, "8 tasks on 2 nodes"),
        (None, {"SLURM_NTASKS_PER_NODE": None}, Level.PROBLEM, "which Lightning refuses"),
    ],
)
def test_a_job_that_does_not_fit(ranks, changes, level, told):
    found = look(ranks, JOB, **changes)
    assert gravest(found) is level
    assert told in text(found)


def _lightning_refuses(devices, nodes):
    try:
        SLURMEnvironment().validate_settings(devices, nodes)
    except (ValueError, RuntimeError):
        return True
    return False


def test_what_lightning_refuses_is_a_problem_here(monkeypatch):
    refused = 0
    for ntasks, per_node, nodes in itertools.product("124", (None, "1", "2"), ("1", "2")):
        environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": ntasks}
        environ |= {"SLURM_NNODES": nodes, "SLURM_STEP_ID": "0"}
        environ |= {} if per_node is None else {"SLURM_NTASKS_PER_NODE": per_node}
        with monkeypatch.context() as patch:
            patch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
            for name, value in environ.items():
                patch.setenv(name, value)
            for devices, num_nodes in itertools.product((1, 2), (1, 2)):
                found = check_launch(Ranks(devices, num_nodes), environ)
                world_fits = int(ntasks) == devices * num_nodes
                if _lightning_refuses(devices, num_nodes):
                    refused += 1
                    assert has_problem(found), (environ, devices, num_nodes)
                elif world_fits:
                    assert not has_problem(found), (environ, devices, num_nodes)
    assert refused > 20


def test_numbers_that_are_none_are_as_if_not_set():
    (finding,) = look(Ranks(4, 1), JOB, SLURM_NTASKS="2(x3)")
    assert "SLURM_NTASKS is not set" in finding.text
    assert check_launch(Ranks(1, 1), {"WORLD_SIZE": "4"}) == []  # anybody may set it


@pytest.mark.parametrize(
    ("ranks", "level", "told"),
    [
        (Ranks(2, 2), Level.OK, "as the config asks for"),
        (Ranks(4, 1), Level.PROBLEM, "--trainer.devices=2 --trainer.num_nodes=2"),
        (Ranks(1, 1), Level.PROBLEM, "but the config asks for 1 x 1 node"),
        (None, Level.OK, "4 processes, 2 on a node"),
    ],
)
def test_torchrun_must_start_what_the_config_asks_for(ranks, level, told):
    found = look(ranks, TORCHRUN)
    assert gravest(found) is level
    assert told in text(found)


def test_lightning_refuses_the_same_of_torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for devices, nodes in itertools.product((1, 2, 4), (1, 2)):
        try:
            TorchElasticEnvironment().validate_settings(devices, nodes)
        except ValueError:
            assert has_problem([check_torchrun(Ranks(devices, nodes), 4, 2)])


def test_torchrun_counts_inside_of_a_job():
    found = look(Ranks(2, 2), {**JOB, **TORCHRUN})
    assert [finding.topic for finding in found] == ["torchrun"]


def test_one_of_several_processes_speaks():
    assert is_first_process({})
    assert is_first_process(JOB)
    assert not is_first_process({**JOB, "SLURM_PROCID": "1"})
    assert not is_first_process({"RANK": "2", "LOCAL_RANK": "0"})


def test_an_unknown_number_of_devices_is_not_compared():
    assert not has_problem(check_slurm(Ranks(None, 5), JOB))
