"""A logger that keeps what it is given."""

from lightning.pytorch.loggers import Logger


class MemoryLogger(Logger):
    name = version = ""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def of(self, name):
        """(step, value) of each row that has the name."""
        return [(step, row[name]) for step, row in self.rows if name in row]

    def rows_with(self, name):
        """(step, whole row) of each row that has the name."""
        return [(step, row) for step, row in self.rows if name in row]
