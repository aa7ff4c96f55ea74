"""A line that is written over while a run trains, and a short word where a cell is interrupted.

Imported before anything else, it says in a line which package is not installed.
"""
import contextlib
import importlib.util
import math
import time

from IPython import get_ipython
from IPython.display import display


class Short(Exception):
    """An error that a notebook shows as one line, without a traceback."""

    def _render_traceback_(self):       # IPython asks for it by this name
        return [str(self)]


for name in "filelock gymnasium matplotlib minari numpy psutil scipy torch tqdm".split():
    if importlib.util.find_spec(name) is None:
        raise Short(f"{name} is missing: in the repository's folder, run pip install -r requirements.txt, "
                    "and restart the kernel")


class Stopped(Short):
    """What an interrupted cell ends with."""


class Resumable(contextlib.ContextDecorator):
    """Turns an interrupt into Stopped. train.train() has by then written a checkpoint."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind in (KeyboardInterrupt, SystemExit):
            raise Stopped("stopped; run the cell again to go on") from None


resumable = Resumable()


def clock(seconds):
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


class Progress:
    """Updates done, loss and time left of a run that trains, for train.train(watch=...).

    Outside a notebook it shows nothing.
    """

    def __init__(self, name):
        self.name, self.handle, self.shown, self.first = name, None, 0.0, None
        self.write("loading its data, or making them where this machine has none")

    def write(self, text):
        line = {"text/plain": f"{self.name}: {text}"}
        if self.handle:
            self.handle.update(line, raw=True)
        elif get_ipython():
            self.handle = display(line, raw=True, display_id=True)

    def __call__(self, run):
        """After each update. run: a train.Run."""
        now, done, steps = time.perf_counter(), run.done, run.cfg.steps
        if self.first is None:      # a run that goes on has done some before
            self.first, self.began = done, now
        if done < steps and (done == self.first or now - self.shown < 0.5):
            return
        self.shown = now
        text = f"{'█' * (20 * done // steps):░<20} {done:,} of {steps:,} updates"
        if math.isfinite(run.loss):     # it is averaged over a hundredth of the run
            text += f", loss {run.loss:.4f}"
        left = (now - self.began) / max(1, done - self.first) * (steps - done)
        self.write(f"{text}, about {clock(left)} left" if done < steps else f"{text}; now it plays episodes")

    def finish(self, result):
        """result: what result.json holds."""
        count = sum(row["episodes"] for row in result["rows"])
        self.write(f"{result['steps']:,} updates and {count} episodes in {clock(result['seconds'])}")
