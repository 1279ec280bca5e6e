"""Progress in rich: a bar on a terminal; elsewhere lines, one a log entry of a training run or twice a minute."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback


class RichProgress(TrainerCallback):
    """Progress bar and log lines of a Trainer run."""

    def __init__(self, console: Console):
        self.console = console
        self.progress: Progress | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the bar."""
        if not state.is_world_process_zero:
            return
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console)
        self.progress.add_task("training", total=state.max_steps, completed=state.global_step)
        self.progress.start()

    def on_step_end(self, args, state, control, **kwargs):
        """Move the bar."""
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Print what was logged."""
        if state.is_world_process_zero and logs:
            numbers = "  ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in logs.items()
                if not name.rpartition("_")[2].isdigit()  # a line for every place of a block would hide the rest
            )
            self.console.print(f"step {state.global_step}  {numbers}", highlight=False, soft_wrap=True)

    def on_train_end(self, args, state, control, **kwargs):
        """Stop the bar."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


class Rate:
    """Progress of a long run with its rate and time left: a bar on a terminal, else a line every 30 seconds.

    Args:
        console: where to.
        total: units of work in all.
        before: units that were done by earlier runs; they do not count for the rate. None: what the first update says.
        unit: what is counted.
    """

    def __init__(self, console: Console, *, total: int, before: int | None = None, unit: str):
        self.console, self.total, self.before, self.unit = console, total, before, unit
        self._printed = self._started = time.monotonic()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(unit, total=total, completed=before or 0)

    def __enter__(self) -> Rate:
        self._bar.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._bar.stop()

    def update(self, done: int, *, tokens: int | None = None) -> None:
        """Show where it is.

        Args:
            done: units in all, those of earlier runs included.
            tokens: tokens of this run, where the rate is to count these.
        """
        if self.before is None:
            self.before = done
        now = time.monotonic()
        seconds = max(now - self._started, 1e-9)
        made = done - self.before
        left = timedelta(seconds=round(seconds * (self.total - done) / made)) if made else "?"
        rate = f"{made / seconds:.1f} {self.unit}/s" if tokens is None else f"{tokens / seconds:.1f} tokens/s"
        text = f"{self.unit}, {rate}, {left} left"
        self._bar.update(self._task, completed=done, description=text)
        if not self.console.is_terminal and now - self._printed >= 30:
            self._printed = now
            self.console.print(f"{done}/{self.total} {text}", highlight=False, markup=False)
