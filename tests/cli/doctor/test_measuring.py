import pytest
import torch
from lightning.pytorch import Trainer
from support.doctor import clean_folder, rehearse
from support.small_digits import small_digits
from support.tiny_run import TinyData, TinyModule, TinyNet

from lit_diffusion.cli.doctor.measuring import Stopwatch, sampling_seconds, seconds_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)


def small_module():
    return rehearse(small_digits(8)).model


@pytest.mark.parametrize(("limit", "told"), [(1000.0, "of 6 at a time"), (0.0, "of 1 at a time")])
def test_a_sample_takes_as_many_calls_of_the_network_as_its_solver_asks_for(limit, told, folder):
    module, calls = small_module(), []
    module.network.register_forward_hook(lambda *_: calls.append(1))
    solver = module.solver
    seconds, how = sampling_seconds(module, 6, limit)
    assert how == f"measured on one of 4 network calls, {told}"
    assert len(calls) == (6 if limit else 2)  # 1, 4 and 6 samples, each twice
    assert seconds > 0
    assert module.solver is solver


def test_samples_that_are_not_finite_take_time_too(folder):
    module = small_module()
    for parameter in module.parameters():
        parameter.data.fill_(torch.nan)
    assert sampling_seconds(module, 1, 1000.0)[0] > 0


@pytest.mark.parametrize(("limit", "sizes"), [(1000.0, [1, 4, 16, 50]), (0.0, [1])])
def test_batches_grow_while_there_is_time(limit, sizes):
    asked = []
    seconds, num = seconds_of(asked.append, 50, limit)
    assert sorted(set(asked)) == sizes
    assert num == sizes[-1]
    assert seconds >= 0


@pytest.mark.parametrize(
    ("limit", "accumulate", "steps", "counted"),
    [(0.0, 1, 1, 1), (1000.0, 1, 6, 4), (1000.0, 2, 6, 4)],
)
def test_a_stopwatch_counts_steps_and_stops(limit, accumulate, steps, counted, tmp_path):
    module, data = TinyModule(TinyNet(2), torch.optim.Adam), TinyData()
    watch = Stopwatch(limit)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(
        max_steps=6,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        limit_val_batches=0,
        enable_model_summary=False,
        callbacks=[watch],
        default_root_dir=tmp_path,
        **quiet,
    )
    trainer.fit(module, data)
    assert trainer.global_step == steps
    assert watch.steps == counted
    assert watch.seconds > 0
