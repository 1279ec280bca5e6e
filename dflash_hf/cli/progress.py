"""Training progress in rich: a bar on a terminal, one line a log entry everywhere."""

from __future__ import annotations

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
