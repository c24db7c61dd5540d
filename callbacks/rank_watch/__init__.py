"""Which of several ranks failed, told by the others."""

from lit_diffusion.callbacks.rank_watch.callback import RankWatch as RankWatch
