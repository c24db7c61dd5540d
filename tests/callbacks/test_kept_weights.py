import torch

from lit_diffusion.callbacks.kept_weights import KeptWeights, Reading


def test_weights_come_back_to_the_last_bit_and_the_memory_is_used_again():
    weights = [torch.randn(3, requires_grad=True), torch.randn(2, 2, requires_grad=True)]
    kept = KeptWeights()
    for _ in range(2):
        expected = [w.detach().clone() for w in weights]
        kept.keep(weights)
        places = [copy.data_ptr() for copy in kept._copies]
        with torch.no_grad():
            for w in weights:
                w.fill_(torch.nan)
        kept.put_back()
        assert all(torch.equal(w, e) for w, e in zip(weights, expected, strict=True))
    kept.keep(weights)
    assert [copy.data_ptr() for copy in kept._copies] == places


def test_other_weights_take_the_place_of_the_first():
    kept, a, b = KeptWeights(), torch.ones(1), torch.ones(2)
    kept.keep([a])
    kept.keep([b])
    a.zero_(), b.zero_()
    kept.put_back()
    assert (a.tolist(), b.tolist()) == ([0.0], [1.0, 1.0])


def test_nothing_kept_is_nothing_put_back():
    KeptWeights().put_back()


def test_numbers_are_read():
    assert Reading(torch.tensor([0.0, 1.0])).get() == [0.0, 1.0]
