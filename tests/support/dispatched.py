"""Operations that torch dispatches, counted by name."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def forward_and_backward(function, x):
    """Counts of function(x), and of its gradient by x."""
    with CountOperations() as forward:
        y = function(x.requires_grad_())
    with CountOperations() as backward:
        y.backward(y.detach())
    return forward.counts, backward.counts
