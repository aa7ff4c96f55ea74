"""What every command does with a mistake: one message, exit code 2."""
import argparse
import contextlib
import difflib
import os
import re
import sys
import textwrap


class UserError(Exception):
    """Something the user can put right: what is wrong, where, and what to type next."""


def short(error):
    """A library's message in one line of at most 300 letters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextlib.contextmanager
def explained(what, advice="", kinds=Exception, fails=""):
    """Whatever libraries raise in here becomes a UserError: what fails, their words in brackets, advice.

    A UserError of our own has its advice already, and gets what in front.
    """
    try:
        yield
    except kinds as error:
        ours = isinstance(error, UserError)
        raise UserError(f"{what}: {error}" if ours else f"{what}{fails} ({short(error)}){advice}") from error


def nearest(word, words):
    """The end of a message about a wrong name: "did you mean ...?", or names that there are."""
    near = difflib.get_close_matches(word, words, 3, 0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there are: {textwrap.shorten(', '.join(words), 500)}"


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are UserErrors, without the whole usage before them."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")     # -1e3 too

    def error(self, message):
        raise UserError(f"{message} (--help lists everything)")


def quiet_interrupt(kind, error, trace):
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = quiet_interrupt        # Ctrl-C, also while the libraries load


def run_command(main):
    """Run main(). A UserError, or a file that cannot be read or written, ends with exit code 2."""
    try:
        main()
    except (UserError, OSError) as error:
        if isinstance(error, OSError):      # a full disk, or nobody reads: python data.py list | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)    # and so what is still to be printed fails too
        if not isinstance(error, BrokenPipeError):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
