import inspect
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer, strategies
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from support.plain_module import PlainModule, loader, make_trainer
from support.tiny_diffusion import images, tiny_diffusion
from torch import nn
from torch.distributed.fsdp import fully_shard

from lit_diffusion import callbacks
from lit_diffusion.callbacks import trainer_state
from lit_diffusion.callbacks.trainer_state import first_nonfinite, is_dtensor, is_nonfinite

FUNCTIONS = ("is_accumulating", "validation_follows", "is_ending")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ([], [5, 10], [10])),
        ({"accumulate_grad_batches": 2}, ([1, 3, 6, 8], [5, 10], [10])),
        ({"val_check_interval": 2}, ([], [2, 4, 7, 9], [10])),
        ({"limit_val_batches": 0, "max_epochs": -1, "max_steps": 7}, ([], [], [7])),
        ({"check_val_every_n_epoch": 2}, ([], [10], [10])),
    ],
)
def test_batches_whose_gradients_wait_that_validation_follows_and_that_are_the_last(
    tmp_path, options, expected
):
    module, true_at = PlainModule(), [[] for _ in FUNCTIONS]

    def ask(*_):
        for name, batches in zip(FUNCTIONS, true_at, strict=True):
            if getattr(trainer_state, name)(trainer):
                batches.append(trainer.fit_loop.total_batch_idx + 1)

    module.on_train_batch_end = ask
    trainer = make_trainer(tmp_path, **{"max_epochs": 2, **options})
    trainer.fit(module, loader(40), loader(16))
    assert tuple(true_at) == expected


@pytest.mark.parametrize(
    ("options", "scheduling", "total"),
    [
        ({"max_steps": 7, "max_epochs": 1}, {}, 5),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, {}, 4),
        ({"max_epochs": 4}, {0: 1, 1: 2, 3: 9}, 5 + 3 + 3 + 1),
        ({"max_epochs": -1, "max_steps": 7}, {0: 1, 1: 2}, 7),
    ],
)
def test_the_total_is_the_number_of_steps_that_the_run_takes(tmp_path, options, scheduling, total):
    """Also where the number of batches that are accumulated changes with the epochs."""
    schedulers = [GradientAccumulationScheduler(scheduling)] if scheduling else []
    trainer = make_trainer(tmp_path, *schedulers, **options)
    trainer.fit(PlainModule(), loader(40))
    assert trainer_state.total_steps(trainer) == trainer.global_step == total


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_private_names_of_lightning_are_of_the_kind_that_is_used():
    trainer = Trainer(logger=False, enable_progress_bar=False, accelerator="cpu")
    loop = trainer.fit_loop.epoch_loop
    assert parameters(loop._should_accumulate) == []
    assert parameters(loop._should_check_val_fx) == ["data_fetcher"]
    assert parameters(trainer._signal_connector.register_signal_handlers) == []
    assert parameters(_parse_num_batches) == ["stage", "length", "limit_batches"]
    assert PlainModule()._trainer is None
    assert trainer._logger_connector.should_update_logs in (True, False)
    assert loop._batches_that_stepped == 0
    assert trainer.fit_loop._can_stop_early in (True, False)
    assert trainer.fit_loop._data_fetcher is None
    assert trainer._checkpoint_connector._loaded_checkpoint == {}
    assert _given_hyperparameters.get() is None


# Strategies

FOLLOWERS = [callbacks.EMA, callbacks.LRCompensation]
SUPPORTED = ["SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy"]
UNSUPPORTED = ["FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy"]


@pytest.mark.parametrize("name", SUPPORTED + UNSUPPORTED)
def test_strategies_that_are_not_supported_are_named_with_what_to_use(name):
    kind = getattr(strategies, name)
    trainer = SimpleNamespace(strategy=kind.__new__(kind))  # those of GPUs can't be started here
    message = f"EMA does not support {name}.*'ddp'.*ModelParallelStrategy"
    with nullcontext() if name in SUPPORTED else pytest.raises(ValueError, match=message):
        trainer_state.refuse_strategy(trainer, "EMA")


@pytest.mark.parametrize("callback", FOLLOWERS)
def test_each_callback_that_follows_optimizers_refuses_a_strange_strategy(tmp_path, callback):
    class Strange(strategies.SingleDeviceStrategy):
        restore_checkpoint_after_setup = True

    trainer = make_trainer(tmp_path, callback(), strategy=Strange("cpu"))
    for run in (trainer.fit, trainer.validate)[: 1 + (callback is callbacks.EMA)]:
        with pytest.raises(ValueError, match=f"{callback.__name__} does not support Strange"):
            run(PlainModule(), loader())


class SplitByHand(PlainModule):
    def configure_model(self):
        fully_shard(self.inner, mesh=torch.distributed.init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize("callback", FOLLOWERS)
def test_weights_that_are_split_behind_the_strategys_back_are_refused(tmp_path, one_rank, callback):
    trainer = make_trainer(tmp_path, callback())
    expected = rf"{callback.__name__}.*SingleDeviceStrategy would save one rank's part of 'inner.0"
    with pytest.raises(ValueError, match=expected):
        trainer.fit(SplitByHand(), loader())


def test_gradients_of_split_weights_are_not_compared(tmp_path, one_rank):
    class Split(type(tiny_diffusion())):
        def configure_model(self):
            fully_shard(self.network, mesh=torch.distributed.init_device_mesh("cpu", (1,)))

    module = tiny_diffusion()
    module.__class__ = Split
    trainer = make_trainer(tmp_path, callbacks.GradientDiagnostics(1, 2, 4), max_steps=1)
    with pytest.raises(ValueError, match=r"GradientDiagnostics needs whole .*'network"):
        trainer.fit(module, images(8, 4))


# Split tensors


@pytest.fixture
def split(one_rank):
    """A network whose weights one rank alone has parts of: all of each."""
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    return fully_shard(nn.Linear(3, 2), mesh=mesh)


def test_whole_tensors_are_split_as_their_model_is_and_gathered_again(split):
    whole = torch.randn(2, 3)
    part = trainer_state.distribute_like(whole, split.weight)
    assert is_dtensor(part)
    assert part.placements == split.weight.placements
    assert torch.equal(part.full_tensor(), whole)
    trainer_state.local_part(part).fill_(5)  # its own memory
    assert (part.full_tensor() == 5).all()
    assert trainer_state.distribute_like(whole, whole) is trainer_state.local_part(whole) is whole


def test_a_nested_state_is_gathered_and_the_rest_of_it_kept(split):
    state = {"a": [split.weight, (split.bias, 3)], "b": {"c": torch.ones(1), "d": None}}
    whole = trainer_state.gather_state(state)
    assert trainer_state.find_dtensor(state) == "a.0"
    assert trainer_state.find_dtensor(whole) is None
    assert torch.equal(whole["a"][0], trainer_state.local_part(split.weight))
    assert not whole["a"][0].requires_grad
    assert whole["a"][1][1] == 3
    assert whole["b"]["c"] is state["b"]["c"]
    assert trainer_state.gather_state({"a": [2]}) == {"a": [2]}


@pytest.mark.parametrize(
    ("lr", "arguments", "init_step"),
    [
        (0.0, {"closure": None}, True),
        (torch.tensor(0.0), {"closure": None}, True),
        (0.1, {"closure": None}, False),
        (0.0, {}, False),  # the first step of a warm-up from 0
        (0.0, {"closure": lambda: 1.0}, False),  # the same, as Lightning takes it
    ],
)
def test_only_the_step_by_which_torch_initializes_state_is_recognized(lr, arguments, init_step):
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)
    calls = []
    sgd.register_step_pre_hook(lambda optimizer, _, kwargs: calls.append((optimizer, kwargs)))
    sgd.step(**arguments)
    assert trainer_state.is_state_init_step(*calls[0]) == init_step


# Non-finite tensors


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_noticed_in_any_shape_and_type(value):
    wide = torch.tensor([1e300, 1.0], dtype=torch.float64)
    sparse = torch.sparse_coo_tensor([[0, 0]], torch.tensor([1.0, value]), (3,))
    tensors = [wide, torch.full((2, 3), value), torch.tensor(value, dtype=torch.bfloat16)]
    flags = is_nonfinite([*tensors, torch.ones(0), sparse])
    assert flags.tolist() == [False, True, True, False, True]


def test_large_numbers_whose_squares_overflow_are_finite():
    large = torch.full((3,), 3e38)
    assert is_nonfinite([large, torch.full((3,), 6e4, dtype=torch.float16)]).tolist() == [False] * 2
    assert is_nonfinite([large, torch.tensor(torch.nan)]).tolist() == [False, True]


def test_the_first_is_named_past_empty_ones():
    good, odd = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert first_nonfinite([good, torch.empty(0), odd, odd]) == 2
    assert first_nonfinite([good, torch.empty(0)]) is None
    assert first_nonfinite([]) is None
